"""The table of `headwise cost --article 624740065`: numbers of a published article beside those of
headwise.

The article (zhuanlan.zhihu.com/p/624740065) analyses parameters, FLOPs, activations, KV cache and
training time of decoder-only models, with GPT-3 and LLaMA-65B as examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import SpecError, suggest
from ..families import read_model_spec
from ..model_spec import ModelSpec
from ..translation.terminal_text import pad, pad_left, wrap
from .cost_report import estimate_cost
from .roofline import Device
from .training_memory import ActivationSettings, OptimiserMemory, activation_memory, recompute_flops
from .workload import Workload

SECONDS_PER_DAY = 86_400
LONG_INTEGER = 10**18  # larger numbers are printed in scientific notation
GPT3_LENGTH, LLAMA_LENGTH = 2048, 2048


class ArticleRow(NamedTuple):
    """One number of the article, that of headwise, and the reason of the difference."""

    model: str
    quantity: str
    formula: str
    article: float
    headwise: float
    explanation: str


class TrainingRun(NamedTuple):
    """A training run of the article: tokens, parameters, GPUs, their peak FLOP/s, and the
    utilisation.
    """

    tokens: float
    parameters: float
    gpus: int
    peak_flops: float
    utilisation: float


GPT3_RUN = TrainingRun(300e9, 175e9, 1024, 312e12, 0.45)
LLAMA_RUN = TrainingRun(1.4e12, 65e9, 2048, 624e12, 0.3)


def training_seconds(run: TrainingRun, flops_per_token: float) -> float:
    """Seconds of a training run: FLOPs / (GPUs x peak FLOP/s x utilisation).

    The article counts 8 FLOPs for each token and parameter: a forward pass, a backward pass of
    twice as many FLOPs, and the forward pass that recomputes activations. GPT-3 takes 34 days on
    1,024 A100:

    >>> round(training_seconds(GPT3_RUN, 8 * GPT3_RUN.parameters) / SECONDS_PER_DAY, 1)
    33.8
    """
    return run.tokens * flops_per_token / (run.gpus * run.peak_flops * run.utilisation)


def flops_per_trained_token(model: ModelSpec, length: int) -> float:
    """FLOPs that torch counts per token in training with recomputed blocks, for rows of this
    length.
    """
    workload = Workload(context=length)
    counted = estimate_cost(model, workload).counted_flops
    recomputed = recompute_flops(model, workload, ActivationSettings(checkpoint="block")).total
    return ((counted["prefill"] or 0) + (counted["backward"] or 0) + recomputed) / length


def list_gpt3_compute_rows() -> Iterator[ArticleRow]:
    """Yield parameters, FLOPs and training time of GPT-3: 96 layers of width
    12,288 with 96 heads.
    """
    model = read_model_spec("gpt3")
    (layers, width, vocabulary), workload = (96, 12_288, 50_257), Workload(context=GPT3_LENGTH)
    cost = estimate_cost(model, workload)
    parameters = cost.parameters.total
    row = _row_maker("GPT-3")
    rest = parameters - 12 * layers * width**2
    yield row(
        "parameters",
        "12 l h^2",
        (12 * layers * width**2, parameters),
        f"the article leaves out {rest:,}: biases and norms l 13 h + 2 h, and tables of tokens "
        "and positions",
    )
    forward = (
        layers * (24 * GPT3_LENGTH * width**2 + 4 * GPT3_LENGTH**2 * width)
        + 2 * GPT3_LENGTH * width * vocabulary
    )
    counted, required = cost.counted_flops["prefill"] or 0, cost.required_flops["prefill"] or 0
    yield row(
        "FLOPs, forward pass of 2,048 tokens",
        "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V",
        (forward, counted),
        "equal; the article calls it a training iteration, which has three times as many. Causal "
        "attention requires "
        f"{required:,}, because half of the pairs are not allowed",
    )
    trained = (counted + (cost.counted_flops["backward"] or 0)) / GPT3_LENGTH * GPT3_RUN.tokens
    yield row(
        "FLOPs, training on 300 G tokens",
        "6 x tokens x parameters",
        (6 * GPT3_RUN.tokens * GPT3_RUN.parameters, trained),
        "the article counts parameters of tables, which are looked up, and leaves out scores, s h "
        "per layer and token",
    )
    yield row(
        "days, training on 1,024 A100",
        "8 x tokens x parameters / (GPUs x peak x 0.45)",
        _days(model, GPT3_RUN, GPT3_LENGTH, GPT3_RUN.peak_flops),
        "headwise counts the products of one step with recomputed blocks instead of 8 per "
        "parameter",
    )


def list_gpt3_memory_rows() -> Iterator[ArticleRow]:
    """Yield training state, weights, activations and KV cache of GPT-3."""
    model, layers, width = read_model_spec("gpt3"), 96, 12_288
    workload = Workload(context=GPT3_LENGTH)
    cost = estimate_cost(model, workload)
    row, parameters = _row_maker("GPT-3"), cost.parameters.total
    article_state = OptimiserMemory.from_name("zhihu-624740065").bytes_per_parameter
    yield row(
        "bytes, training state",
        "20 x parameters",
        (
            article_state * GPT3_RUN.parameters,
            OptimiserMemory.from_name("zero").bytes_per_parameter * parameters,
        ),
        "the article keeps gradients in 16 and in 32 bits; headwise counts ZeRO's 16 bytes per "
        "parameter",
    )
    yield row(
        "bytes, weights for inference",
        "2 x parameters",
        (2 * GPT3_RUN.parameters, cost.weights_bytes),
        "the article rounds the parameters to 175 G",
    )
    settings = ActivationSettings("zhihu-624740065")
    yield row(
        "bytes, activations of 2,048 tokens",
        "l (34 b s h + 5 b s^2 a)",
        (layers * (34 * GPT3_LENGTH * width + 5 * GPT3_LENGTH**2 * 96), cost.activation_bytes or 0),
        "headwise counts fused attention without dropout, which saves no scores; with the "
        "article's assumptions it "
        f"counts {activation_memory(model, workload, settings).total:,}",
    )
    batch, prompt, generated = 64, 512, 32
    served = estimate_cost(model, Workload(batch, prompt, generate=generated))
    yield row(
        "bytes, KV cache of 64 rows of 512 + 32",
        "4 b l h (s + n)",
        (4 * batch * layers * width * (prompt + generated), served.cache_bytes),
        "the last generated token is never read again, so headwise does not cache it",
    )


def list_llama_rows() -> Iterator[ArticleRow]:
    """Yield the rows of LLaMA-65B: 80 layers of width 8,192."""
    model, (layers, width, hidden, vocabulary) = (
        read_model_spec("llama-65b"),
        (80, 8192, 22_016, 32_000),
    )
    row = _row_maker("LLaMA-65B")
    feed, tables = layers * (3 * width * hidden - 8 * width**2), 2 * vocabulary * width
    yield row(
        "parameters",
        "12 l h^2",
        (
            12 * layers * width**2,
            estimate_cost(model, Workload(context=LLAMA_LENGTH)).parameters.total,
        ),
        f"the three matrices of h x 22,016 in each layer have {feed:,} more than 8 l h^2 "
        "together; embedding and head "
        f"have {tables:,}, and norms l 2 h + h",
    )
    yield row(
        "days, training on 2,048 A100",
        "8 x tokens x parameters / (GPUs x peak x 0.3)",
        _days(model, LLAMA_RUN, LLAMA_LENGTH, Device.from_name("a100").flops["bf16"]),
        "the article's peak of 624 TFLOP/s is that of sparse matrices, twice that of dense ones, "
        "which headwise uses; "
        "21 days need 0.6 of the dense peak. The paper measured 380 tokens per second and GPU "
        "(2302.13971), or "
        f"{LLAMA_RUN.tokens / 380 / LLAMA_RUN.gpus / SECONDS_PER_DAY:.1f} days, without "
        "recomputing all activations",
    )


def _days(
    model: ModelSpec, run: TrainingRun, length: int, dense_peak: float
) -> tuple[float, float]:
    """Days of a run by the article's formula, and by headwise's FLOPs at the dense peak."""
    article = training_seconds(run, 8 * run.parameters)
    headwise = training_seconds(
        run._replace(peak_flops=dense_peak), flops_per_trained_token(model, length)
    )
    return article / SECONDS_PER_DAY, headwise / SECONDS_PER_DAY


def _row_maker(model: str) -> Callable[[str, str, tuple[float, float], str], ArticleRow]:
    def make(
        quantity: str, formula: str, numbers: tuple[float, float], explanation: str
    ) -> ArticleRow:
        return ArticleRow(model, quantity, formula, *numbers, explanation)

    return make


@dataclass(frozen=True)
class ArticleTable:
    """All rows of an article, as text and as plain values."""

    name: str
    source: str
    rows: tuple[ArticleRow, ...]

    @staticmethod
    def from_name(name: str) -> ArticleTable:
        """Compute the table of the article with this name, which is the number in its address."""
        if name not in ARTICLES:
            raise SpecError(f"there is no article {name!r}; {suggest(name, ARTICLES)}")
        return ArticleTable(name, *ARTICLES[name]())

    @property
    def data(self) -> dict[str, Any]:
        """The table as plain values."""
        return {
            "article": self.name,
            "source": self.source,
            "rows": [row._asdict() for row in self.rows],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from wrap(self.source)
        previous = ""
        for row in self.rows:
            if row.model != previous:
                yield ""
                yield (f"{row.model:<38}" + pad_left("article", 21) + pad_left("headwise", 21))
            previous = row.model
            yield (
                pad(row.quantity, 38)
                + f"{_format_number(row.article):>21}{_format_number(row.headwise):>21}"
            )
            text = f"{row.formula}: {row.explanation}"
            yield from wrap(text, indent="    ", hanging="    ")


def _format_number(number: float) -> str:
    """Format counts as integers with commas, very large ones in scientific notation, and days with
    one digit.

    >>> _format_number(173946175488), _format_number(3.15e23), _format_number(33.8118)
    ('173,946,175,488', '3.150e+23', '33.8')
    """
    if number >= LONG_INTEGER:
        return f"{number:.3e}"
    return f"{int(number):,}" if number == int(number) else f"{number:,.1f}"


ARTICLES: dict[str, Callable[[], tuple[str, tuple[ArticleRow, ...]]]] = {
    "624740065": lambda: (
        "zhuanlan.zhihu.com/p/624740065, on the parameters, FLOPs, memory and training time of "
        "decoder-only models: "
        "l layers of width h with a heads, a vocabulary of V tokens, b rows of s tokens and n "
        "generated ones",
        (*list_gpt3_compute_rows(), *list_gpt3_memory_rows(), *list_llama_rows()),
    )
}
