"""Published cost formulas and the numbers of a published article, beside those of headwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..attention.spec.attention_spec import AttentionSpec
from ..models.families import read_model_spec
from ..models.model_spec import ModelSpec
from ..report.data import Column, Table
from ..util.errors import SpecError, suggest
from .cost_report import CostEstimate, estimate_cost
from .roofline import Device
from .training_memory import ActivationSettings, OptimiserMemory, recompute_flops
from .weight_storage import dtype_bytes
from .workload import Workload


class FormulaSizes(NamedTuple):
    """The variables of published formulas: l layers of width h with a heads of d channels, a
    vocabulary of V tokens, b rows of s tokens and n generated ones, N parameters, t tensor-parallel
    devices.
    """

    l: int  # noqa: E741 - the letter of every such formula
    h: int
    a: int
    d: int
    V: int
    b: int
    s: int
    n: int
    N: int
    t: int


class PublishedFormula(NamedTuple):
    """One formula: the quantity, the formula as text and as a function, and why headwise's number
    may differ.
    """

    quantity: str
    formula: str
    evaluate: Callable[[FormulaSizes], int]
    difference: str


@dataclass(frozen=True)
class FormulaSource:
    """Formulas of one source; `needs_blocks` is false if they apply to any attention layer."""

    name: str
    source: str
    formulas: tuple[PublishedFormula, ...]
    needs_blocks: bool = True

    @staticmethod
    def from_name(name: str) -> FormulaSource:
        """Return the source with this name."""
        if name not in FORMULA_SOURCES:
            raise SpecError(
                f"there are no published formulas {name!r}; {suggest(name, FORMULA_SOURCES)}"
            )
        return FORMULA_SOURCES[name]


class FormulaComparison(NamedTuple):
    """A `published` number beside headwise's `estimate`, which is None if headwise does not
    estimate it.
    """

    name: str
    source: str
    quantity: str
    formula: str
    published: int
    estimate: int | None
    explanation: str


def compare_formulas(
    estimate: CostEstimate, source: FormulaSource, tensor_parallel: int = 8
) -> Iterator[FormulaComparison]:
    """Compare every formula of a source with an estimate; `tensor_parallel` is the number of
    devices.
    """
    sizes = _formula_sizes(estimate, source, tensor_parallel)
    for quantity, formula, evaluate, difference in source.formulas:
        published = evaluate(sizes)
        value = HEADWISE_VALUES[quantity](estimate)
        explanation = "equal" if published == value else difference
        yield FormulaComparison(
            estimate.name, source.name, quantity, formula, published, value, explanation
        )


def _formula_sizes(
    estimate: CostEstimate, source: FormulaSource, tensor_parallel: int
) -> FormulaSizes:
    model = estimate.spec_or_model
    name = estimate.name
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise SpecError(
            f"the number of tensor-parallel devices must be at least 1, got {tensor_parallel!r}"
        )
    if isinstance(model, AttentionSpec):
        if source.needs_blocks:
            fact = f"the formulas of {source.name} are of whole blocks, and {name} is"
            raise SpecError(f"{fact} one attention layer; name a model")
        specs = [model]
        num_layers = 1
        width = model.model
        vocabulary = 0
    else:
        if len(model.stacks) > 1:
            fact = f"the formulas of {source.name} are of one stack, and {name} has"
            raise SpecError(f"{fact} {len(model.stacks)}; name a decoder")
        stack = next(iter(model.stacks))
        attentions = (block.attention_specs.get("attention") for block in stack.layers)
        specs = [spec for spec in attentions if spec]
        num_layers = len(stack.layers)
        width = stack.model
        vocabulary = stack.embedding.tokens if stack.embedding else 0
    if not specs:
        fact = f"the formulas of {source.name} need attention heads, and {name} has none"
        raise SpecError(f"{fact}; name a model with attention")
    return FormulaSizes(
        l=num_layers,
        h=width,
        a=specs[0].heads.q,
        d=specs[0].core.dim,
        V=vocabulary,
        b=estimate.workload.batch,
        s=estimate.full_call.tokens,
        n=estimate.workload.generate,
        N=estimate.parameters.total,
        t=tensor_parallel,
    )


def _attention_parameters(estimate: CostEstimate) -> int:
    is_layer = isinstance(estimate.spec_or_model, AttentionSpec)
    terms = estimate.parameters.terms
    return sum(term.value for term in terms if is_layer or ".attention." in term.name)


def _training_flops(estimate: CostEstimate) -> int | None:
    forward = estimate.counted_flops["prefill"]
    backward = estimate.counted_flops["backward"]
    return None if forward is None or backward is None else forward + backward


# headwise's value of each quantity.
HEADWISE_VALUES: dict[str, Callable[[CostEstimate], int | None]] = {
    "parameters": lambda estimate: estimate.parameters.total,
    "attention parameters": _attention_parameters,
    "forward FLOPs": lambda estimate: estimate.counted_flops["prefill"],
    "training FLOPs": _training_flops,
    "weight bytes": lambda estimate: estimate.parameters.total * 2,
    "optimiser bytes": lambda estimate: (
        estimate.parameters.total * OptimiserMemory.from_name("zero").bytes_per_parameter
    ),
    "activation bytes": lambda estimate: estimate.activation_bytes,
    "cache bytes": lambda estimate: (
        estimate.cache_bytes * 2 // dtype_bytes(estimate.workload.dtype)
    ),
}


# --- The formulas of each source ------------------------------------------------------------------

GPT = "the formula assumes a feed-forward of 4 h, biases, and a key head for every head"
MASKS = (
    "the formula assumes 2 bytes per number, dropout with masks of 1 byte, and saved scores, which "
    "fused attention does not save"
)
SIX_N = "6 N counts embedding tables, which are only looked up, and leaves out scores"


def _forward_flops(m: FormulaSizes) -> int:
    return m.l * (24 * m.b * m.s * m.h**2 + 4 * m.b * m.s**2 * m.h) + 2 * m.b * m.s * m.h * m.V


def activation_formula(
    m: FormulaSizes, whole: int, divided: int = 0, scores: int = 0, devices: int = 1
) -> int:
    """Bytes of l layers: `whole` for each channel and token on every device, and `divided` for each
    channel, `scores` for each weight among several devices.
    """
    channels = m.l * m.b * m.s * m.h
    shared = divided * channels + scores * m.l * m.a * m.b * m.s**2
    return whole * channels - (-shared // devices)


def _activations(
    text: str, whole: int, divided: int = 0, scores: int = 0, parallel: bool = False
) -> PublishedFormula:
    def evaluate(m: FormulaSizes) -> int:
        return activation_formula(m, whole, divided, scores, m.t if parallel else 1)

    return PublishedFormula("activation bytes", text, evaluate, MASKS)


def _rule_of_thumb(text: str, per_channel: int, difference: str) -> PublishedFormula:
    return _activations(text, per_channel)._replace(difference=difference)


ZHIHU = FormulaSource(
    "zhihu-624740065",
    "zhuanlan.zhihu.com/p/624740065, on the cost of decoder-only models",
    (
        PublishedFormula(
            "parameters",
            "l (12 h^2 + 13 h) + V h",
            lambda m: m.l * (12 * m.h**2 + 13 * m.h) + m.V * m.h,
            f"{GPT}; it leaves out positions and the final norm",
        ),
        PublishedFormula(
            "forward FLOPs", "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V", _forward_flops, GPT
        ),
        PublishedFormula("training FLOPs", "3 x forward", lambda m: 3 * _forward_flops(m), GPT),
        PublishedFormula("weight bytes", "2 N", lambda m: 2 * m.N, "16 bits per parameter"),
        PublishedFormula(
            "optimiser bytes",
            "20 N",
            lambda m: 20 * m.N,
            "it has gradients in 16 and in 32 bits; headwise assumes ZeRO's 16 bytes",
        ),
        _activations("l (34 b s h + 5 b s^2 a)", 34, scores=5),
        PublishedFormula(
            "cache bytes",
            "4 b l h (s + n)",
            lambda m: 4 * m.b * m.l * m.h * (m.s + m.n),
            "it assumes a key head for every head and no window; headwise does not cache the last "
            "generated token",
        ),
    ),
)
SEEDS = FormulaSource(
    "seeds",
    "the notes that this project began with: three projections per head, and an output projection",
    (
        PublishedFormula(
            "attention parameters",
            "l (3 a h d + h^2)",
            lambda m: m.l * (3 * m.a * m.h * m.d + m.h**2),
            "the formula assumes no biases, a key head for every head, and a d = h",
        ),
    ),
    needs_blocks=False,
)
PAPER = FormulaSource(
    "paper-2022",
    "Korthikanti and others, 2205.05198: bytes on each of t = 8 devices",
    (
        PublishedFormula(
            "training FLOPs",
            "72 b l s h^2 (1 + s / 6 h + V / 12 h l)",
            lambda m: 3 * _forward_flops(m),
            f"{GPT}; it leaves out recomputation",
        ),
        _activations("s b h l (34 + 5 a s / h)", 34, scores=5),
        _activations("s b h l (10 + 24/t + 5 a s / h t), tensor parallel", 10, 24, 5, True),
        _activations("s b h l (34 + 5 a s / h) / t, tensor and sequence parallel", 0, 34, 5, True),
        _activations("s b h l (10 + 24/t), tensor parallel, cores recomputed", 10, 24, 0, True),
        _activations(
            "34 s b h l / t, tensor and sequence parallel, cores recomputed", 0, 34, 0, True
        ),
        _activations("2 s b h l, blocks recomputed", 2),
    ),
)
PALM = FormulaSource(
    "palm",
    "2204.02311, appendix B, as in nanoGPT, times b s tokens",
    (
        PublishedFormula(
            "training FLOPs",
            "b s (6 N + 12 l a d s)",
            lambda m: m.b * m.s * (6 * m.N + 12 * m.l * m.a * m.d * m.s),
            "6 N counts biases, norms and embedding tables like matrix products",
        ),
    ),
    needs_blocks=False,
)
SCALING = FormulaSource(
    "scaling-book",
    "jax-ml.github.io/scaling-book: rules of thumb for short sequences",
    (
        PublishedFormula("training FLOPs", "6 N b s", lambda m: 6 * m.N * m.b * m.s, SIX_N),
        PublishedFormula(
            "training FLOPs",
            "8 N b s, blocks recomputed",
            lambda m: 8 * m.N * m.b * m.s,
            f"{SIX_N}; it includes a second forward pass",
        ),
        _rule_of_thumb("20 tensors of b s h per layer", 40, "a rule of thumb"),
        _rule_of_thumb(
            "7 tensors of b s h per layer, matrix products saved",
            14,
            "everything else is recomputed",
        ),
        _rule_of_thumb(
            "1 tensor of b s h per layer, blocks recomputed", 2, "everything is recomputed"
        ),
    ),
)
FORMULA_SOURCES = {source.name: source for source in (ZHIHU, SEEDS, PAPER, PALM, SCALING)}


# --- A published article: GPT-3 and LLaMA-65B -----------------------------------------------------

SECONDS_PER_DAY = 86_400
LONG_INTEGER = 10**18  # larger numbers are printed in scientific notation
ARTICLE = "624740065"
ARTICLE_SOURCE = (
    "zhuanlan.zhihu.com/p/624740065, on the parameters, FLOPs, memory and training time of "
    "decoder-only models: l layers of width h with a heads, a vocabulary of V tokens, b rows of s "
    "tokens and n generated ones"
)


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


def flops_per_trained_token(model: ModelSpec, length: int) -> float:
    """FLOPs that torch counts per token in training with recomputed blocks, for rows of this
    length.
    """
    workload = Workload(context=length)
    trained = _training_flops(estimate_cost(model, workload)) or 0
    recomputed = recompute_flops(model, workload, ActivationSettings(checkpoint="block")).total
    return (trained + recomputed) / length


def list_gpt3_rows() -> Iterator[ArticleRow]:
    """Yield the rows of GPT-3: 96 layers of width 12,288 with 96 heads."""
    model = read_model_spec("gpt3")
    length = 2048
    m = FormulaSizes(96, 12_288, 96, 128, 50_257, 1, length, 0, 0, 1)
    cost = estimate_cost(model, Workload(context=length))
    parameters = cost.parameters.total
    counted = cost.counted_flops["prefill"] or 0
    products = 12 * m.l * m.h**2
    run = GPT3_RUN
    yield ArticleRow(
        "GPT-3",
        "parameters",
        "12 l h^2",
        products,
        parameters,
        f"the article leaves out {parameters - products:,}: biases and norms l 13 h + 2 h, and "
        "tables of tokens and positions",
    )
    yield ArticleRow(
        "GPT-3",
        "FLOPs, forward pass of 2,048 tokens",
        "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V",
        _forward_flops(m),
        counted,
        "equal; the article calls it a training iteration, which has three times as many. Causal "
        f"attention requires {cost.required_flops['prefill']:,}, because half of the pairs are not "
        "allowed",
    )
    yield ArticleRow(
        "GPT-3",
        "FLOPs, training on 300 G tokens",
        "6 x tokens x parameters",
        6 * run.tokens * run.parameters,
        (_training_flops(cost) or 0) / length * run.tokens,
        "the article counts parameters of tables, which are looked up, and leaves out scores, s h "
        "per layer and token",
    )
    yield ArticleRow(
        "GPT-3",
        "days, training on 1,024 A100",
        "8 x tokens x parameters / (GPUs x peak x 0.45)",
        run.days(8 * run.parameters),
        run.days(flops_per_trained_token(model, length)),
        "headwise counts the products of one step with recomputed blocks instead of 8 per "
        "parameter",
    )
    yield from _gpt3_memory_rows(model, m, cost)


def _gpt3_memory_rows(
    model: ModelSpec, m: FormulaSizes, cost: CostEstimate
) -> Iterator[ArticleRow]:
    """Yield the rows of GPT-3 about bytes."""
    run = GPT3_RUN
    parameters = cost.parameters.total
    state = {
        name: OptimiserMemory.from_name(name).bytes_per_parameter
        for name in ("zhihu-624740065", "zero")
    }
    yield ArticleRow(
        "GPT-3",
        "bytes, training state",
        "20 x parameters",
        state["zhihu-624740065"] * run.parameters,
        state["zero"] * parameters,
        "the article keeps gradients in 16 and in 32 bits; headwise counts ZeRO's 16 bytes per "
        "parameter",
    )
    yield ArticleRow(
        "GPT-3",
        "bytes, weights for inference",
        "2 x parameters",
        2 * run.parameters,
        cost.weights_bytes,
        "the article rounds the parameters to 175 G",
    )
    yield ArticleRow(
        "GPT-3",
        "bytes, activations of 2,048 tokens",
        "l (34 b s h + 5 b s^2 a)",
        activation_formula(m, 34, scores=5),
        cost.activation_bytes or 0,
        "headwise counts fused attention without dropout, which saves no scores",
    )
    batch = 64
    served = estimate_cost(model, Workload(batch, 512, generate=32))
    yield ArticleRow(
        "GPT-3",
        "bytes, KV cache of 64 rows of 512 + 32",
        "4 b l h (s + n)",
        4 * batch * m.l * m.h * (512 + 32),
        served.cache_bytes,
        "the last generated token is never read again, so headwise does not cache it",
    )


def list_llama_rows() -> Iterator[ArticleRow]:
    """Yield the rows of LLaMA-65B: 80 layers of width 8,192."""
    model = read_model_spec("llama-65b")
    layers = 80
    width = 8192
    length = 2048
    feed = layers * (3 * width * 22_016 - 8 * width**2)
    tables = 2 * 32_000 * width
    run = LLAMA_RUN
    dense = run._replace(peak_flops=Device.from_name("a100").flops["bf16"])
    measured_days = run.tokens / 380 / run.gpus / SECONDS_PER_DAY
    yield ArticleRow(
        "LLaMA-65B",
        "parameters",
        "12 l h^2",
        12 * layers * width**2,
        estimate_cost(model, Workload(context=length)).parameters.total,
        f"the three matrices of h x 22,016 in each layer have {feed:,} more than 8 l h^2 together; "
        f"embedding and head have {tables:,}, and norms l 2 h + h",
    )
    yield ArticleRow(
        "LLaMA-65B",
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
        return [
            Table(
                f"{model} in {self.source}" if model == self.rows[0].model else model,
                (
                    "",
                    Column("article", format_article_number),
                    Column("headwise", format_article_number),
                ),
                [row[1:2] + row[3:5] for row in self.rows if row.model == model],
                [
                    f"{row.quantity} = {row.formula}: {row.explanation}"
                    for row in self.rows
                    if row.model == model
                ],
            )
            for model in dict.fromkeys(row.model for row in self.rows)
        ]


def format_article_number(number: float) -> str:
    """Format counts as integers with commas, very large ones in scientific notation, and days with
    one digit.

    >>> [format_article_number(number) for number in (173946175488, 3.15e23, 33.8118)]
    ['173,946,175,488', '3.150e+23', '33.8']
    """
    if number >= LONG_INTEGER:
        return f"{number:.3e}"
    return f"{int(number):,}" if number == int(number) else f"{number:,.1f}"
