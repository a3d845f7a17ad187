"""The numbers of a published article on the cost of decoder-only models, next to headwise's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from ..models.families import read_model_spec
from ..models.model_spec import ModelSpec
from ..report.data import Column, Table
from ..util.errors import SpecError, suggest
from .cost_estimate import CostEstimate, estimate_cost
from .roofline import Device
from .training_memory import ActivationSettings, OptimiserMemory, recompute_flops
from .workload import Workload

SECONDS_PER_DAY = 86_400
LONG_INTEGER = 10**18  # larger numbers are printed in scientific notation
ARTICLE = "624740065"
ARTICLE_SOURCE = (
    "zhuanlan.zhihu.com/p/624740065, on the parameters, FLOPs, memory and training time of "
    "decoder-only models: l layers of width h with a heads, a vocabulary of V tokens, b rows of s "
    "tokens and n generated ones"
)


class ArticleRow(NamedTuple):
    """One number of the article, headwise's number, and the reason for the difference."""

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

    def days(self, flops_per_token: float) -> float:
        """Days of the run: FLOPs / (GPUs x peak FLOP/s x utilisation).

        The article counts 8 FLOPs for each token and parameter: a forward pass, a backward pass of
        twice as many FLOPs, and the forward pass that recomputes activations. GPT-3 takes 34 days
        on 1,024 A100:

        >>> round(GPT3_RUN.days(8 * GPT3_RUN.parameters), 1)
        33.8
        """
        flops_per_second = self.gpus * self.peak_flops * self.utilisation
        return self.tokens * flops_per_token / flops_per_second / SECONDS_PER_DAY


GPT3_RUN = TrainingRun(300e9, 175e9, 1024, 312e12, 0.45)
LLAMA_RUN = TrainingRun(1.4e12, 65e9, 2048, 624e12, 0.3)


def _training_flops(estimate: CostEstimate) -> int:
    """FLOPs that torch counts in a forward and a backward pass."""
    return sum(estimate.counted_flops[phase] or 0 for phase in ("prefill", "backward"))


def flops_per_trained_token(model: ModelSpec, length: int) -> float:
    """FLOPs that torch counts per token in training with recomputed blocks, for rows of this
    length.
    """
    workload = Workload(context=length)
    trained = _training_flops(estimate_cost(model, workload))
    recomputed = recompute_flops(model, workload, ActivationSettings(checkpoint="block")).total
    return (trained + recomputed) / length


def list_gpt3_rows() -> Iterator[ArticleRow]:
    """Yield the rows of GPT-3: 96 layers of width 12,288 with 96 heads."""
    row = partial(ArticleRow, "GPT-3")
    model = read_model_spec("gpt3")
    length = 2048
    layers = 96
    width = 12_288
    vocabulary = 50_257
    cost = estimate_cost(model, Workload(context=length))
    parameters = cost.parameters.total
    products = 12 * layers * width**2
    forward = layers * (24 * length * width**2 + 4 * length**2 * width)
    forward += 2 * length * width * vocabulary
    run = GPT3_RUN
    yield row(
        "parameters",
        "12 l h^2",
        products,
        parameters,
        f"the article leaves out {parameters - products:,}: biases and norms l 13 h + 2 h, and "
        "tables of tokens and positions",
    )
    yield row(
        "FLOPs, forward pass of 2,048 tokens",
        "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V",
        forward,
        cost.counted_flops["prefill"] or 0,
        "equal; the article calls it a training iteration, which has three times as many. Causal "
        f"attention requires {cost.required_flops['prefill']:,}, because half of the pairs are not "
        "allowed",
    )
    yield row(
        "FLOPs, training on 300 G tokens",
        "6 x tokens x parameters",
        6 * run.tokens * run.parameters,
        _training_flops(cost) / length * run.tokens,
        "the article counts parameters of tables, which are looked up, and leaves out scores, s h "
        "per layer and token",
    )
    yield row(
        "days, training on 1,024 A100",
        "8 x tokens x parameters / (GPUs x peak x 0.45)",
        run.days(8 * run.parameters),
        run.days(flops_per_trained_token(model, length)),
        "headwise counts the products of one step with recomputed blocks instead of 8 per "
        "parameter",
    )
    yield from _gpt3_memory_rows(model, cost)


def _gpt3_memory_rows(model: ModelSpec, cost: CostEstimate) -> Iterator[ArticleRow]:
    """Yield the rows of GPT-3 about bytes."""
    row = partial(ArticleRow, "GPT-3")
    layers = 96
    heads = 96
    width = 12_288
    length = 2048
    run = GPT3_RUN
    parameters = cost.parameters.total
    state = {
        name: OptimiserMemory.from_name(name).bytes_per_parameter
        for name in ("zhihu-624740065", "zero")
    }
    yield row(
        "bytes, training state",
        "20 x parameters",
        state["zhihu-624740065"] * run.parameters,
        state["zero"] * parameters,
        "the article keeps gradients in 16 and in 32 bits; headwise counts ZeRO's 16 bytes per "
        "parameter",
    )
    yield row(
        "bytes, weights for inference",
        "2 x parameters",
        2 * run.parameters,
        cost.weights_bytes,
        "the article rounds the parameters to 175 G",
    )
    yield row(
        "bytes, activations of 2,048 tokens",
        "l (34 b s h + 5 b s^2 a)",
        layers * (34 * length * width + 5 * length**2 * heads),
        cost.activation_bytes or 0,
        "headwise counts fused attention without dropout, which saves no scores",
    )
    batch = 64
    served = estimate_cost(model, Workload(batch, 512, generate=32))
    yield row(
        "bytes, KV cache of 64 rows of 512 + 32",
        "4 b l h (s + n)",
        4 * batch * layers * width * (512 + 32),
        served.cache_bytes,
        "the last generated token is never read again, so headwise does not cache it",
    )


def list_llama_rows() -> Iterator[ArticleRow]:
    """Yield the rows of LLaMA-65B: 80 layers of width 8,192."""
    row = partial(ArticleRow, "LLaMA-65B")
    model = read_model_spec("llama-65b")
    layers = 80
    width = 8192
    length = 2048
    feed = layers * (3 * width * 22_016 - 8 * width**2)
    tables = 2 * 32_000 * width
    run = LLAMA_RUN
    dense = run._replace(peak_flops=Device.from_name("a100").flops["bf16"])
    measured_days = run.tokens / 380 / run.gpus / SECONDS_PER_DAY
    yield row(
        "parameters",
        "12 l h^2",
        12 * layers * width**2,
        estimate_cost(model, Workload(context=length)).parameters.total,
        f"the three matrices of h x 22,016 in each layer have {feed:,} more than 8 l h^2 together; "
        f"embedding and head have {tables:,}, and norms l 2 h + h",
    )
    yield row(
        "days, training on 2,048 A100",
        "8 x tokens x parameters / (GPUs x peak x 0.3)",
        run.days(8 * run.parameters),
        dense.days(flops_per_trained_token(model, length)),
        "the article's peak of 624 TFLOP/s is that of sparse matrices, twice that of dense ones, "
        "which headwise uses; 21 days need 0.6 of the dense peak. The paper measured 380 tokens "
        f"per second and GPU (2302.13971), or {measured_days:.1f} days, without recomputing all "
        "activations",
    )


@dataclass(frozen=True)
class ArticleTable:
    """All rows of an article."""

    name: str
    source: str
    rows: tuple[ArticleRow, ...]

    @staticmethod
    def from_name(name: str) -> ArticleTable:
        """Compute the table of the article with this name, which is the number in its address."""
        if name != ARTICLE:
            raise SpecError(f"there is no article {name!r}; {suggest(name, [ARTICLE])}")
        return ArticleTable(name, ARTICLE_SOURCE, (*list_gpt3_rows(), *list_llama_rows()))

    @property
    def data(self) -> dict[str, Any]:
        """The table as plain values."""
        return {
            "article": self.name,
            "source": self.source,
            "rows": [row._asdict() for row in self.rows],
        }

    @property
    def tables(self) -> Sequence[Table]:
        """A table for each model."""
        columns = (
            "",
            Column("article", format_article_number),
            Column("headwise", format_article_number),
        )
        tables: list[Table] = []
        for model, group in groupby(self.rows, key=lambda row: row.model):
            rows = list(group)
            title = model if tables else f"{model} in {self.source}"
            cells = [row[1:2] + row[3:5] for row in rows]
            notes = [f"{row.quantity} = {row.formula}: {row.explanation}" for row in rows]
            tables.append(Table(title, columns, cells, notes))
        return tables


def format_article_number(number: float) -> str:
    """Format counts as integers with commas, very large ones in scientific notation, and days with
    one digit.

    >>> [format_article_number(number) for number in (173946175488, 3.15e23, 33.8118)]
    ['173,946,175,488', '3.150e+23', '33.8']
    """
    if number >= LONG_INTEGER:
        return f"{number:.3e}"
    return f"{int(number):,}" if number == int(number) else f"{number:,.1f}"
