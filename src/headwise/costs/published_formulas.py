"""Formulas that others publish, beside ours: what each says of a model, and why the two are not the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import SpecError, suggest
from ..spec.attention_spec import AttentionSpec
from .cost_report import CostEstimate
from .roofline import dtype_bytes
from .training_memory import OptimiserMemory


class FormulaSizes(NamedTuple):
    """What published formulas speak of: layers l, width h, heads a of d channels, V tokens, b rows of s, n written
    behind them, N parameters, t tensor-parallel ways."""

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
    """One formula: of what, as it is written, itself, and why ours is another number."""

    quantity: str
    formula: str
    evaluate: Callable[[FormulaSizes], int]
    difference: str


@dataclass(frozen=True)
class FormulaSource:
    """Formulas of one source; `scope` is "block" where they speak of whole blocks, "layer" where of any layer."""

    name: str
    source: str
    formulas: tuple[PublishedFormula, ...]
    scope: str = "block"

    @staticmethod
    def from_name(name: str) -> FormulaSource:
        """The formulas of this name."""
        if name not in FORMULA_SOURCES:
            raise SpecError(f"no formulas are known as {name!r}; {suggest(name, FORMULA_SOURCES)}")
        return FORMULA_SOURCES[name]


class FormulaComparison(NamedTuple):
    """One published number and ours; ours is None where nothing here says it."""

    name: str
    beside: str
    quantity: str
    formula: str
    theirs: int
    ours: int | None
    why: str


def compare_formulas(
    estimate: CostEstimate, source: FormulaSource, tensor_parallel: int = 8
) -> Iterator[FormulaComparison]:
    """Every formula of a source with the same quantity of a price; `ways` are those of tensor parallelism."""
    sizes = _formula_sizes(estimate, source, tensor_parallel)
    for row in source.formulas:
        theirs, ours = row.evaluate(sizes), HEADWISE_VALUES[row.quantity](estimate)
        why = "equal" if theirs == ours else row.difference
        yield FormulaComparison(estimate.name, source.name, row.quantity, row.formula, theirs, ours, why)


def _formula_sizes(price: CostEstimate, published: FormulaSource, ways: int) -> FormulaSizes:
    model, load, name = price.spec_or_model, price.workload, published.name
    if type(ways) is not int or ways < 1:
        raise SpecError(f"ways={ways!r} is no number of devices; give 1 or more")
    if isinstance(model, AttentionSpec):
        if published.scope == "block":
            raise SpecError(f"{name} speaks of whole blocks, and {price.name} is one attention; name a model")
        specs, layers, width, tokens = [model], 1, model.model, 0
    else:
        if len(model.stacks) > 1:
            raise SpecError(f"{name} speaks of one stack, and {price.name} has {len(model.stacks)}; name a decoder")
        stack = next(iter(model.stacks))
        specs = [block.attention_specs["attention"] for block in stack.layers if "attention" in block.attention_specs]
        layers, width = len(stack.layers), stack.model
        tokens = stack.embedding.tokens if stack.embedding else 0
    if not specs:
        raise SpecError(f"{name} speaks of heads, and {price.name} has none; name a model with attention")
    heads, core = specs[0].heads, specs[0].core
    written, known = load.generate, price.parameters.total
    return FormulaSizes(
        layers, width, heads.q, core.dim, tokens, load.batch, price.full_call.tokens, written, known, ways
    )


def _attention_parameters(price: CostEstimate) -> int:
    """Learned numbers of every attention."""
    alone = isinstance(price.spec_or_model, AttentionSpec)
    return sum(t.value for t in price.parameters.terms if alone or ".attention." in t.name)


def _training_flops(price: CostEstimate) -> int | None:
    ahead, back = price.counted_flops["prefill"], price.counted_flops["backward"]
    return None if ahead is None or back is None else ahead + back


HEADWISE_VALUES: dict[str, Callable[[CostEstimate], int | None]] = {
    "parameters": lambda price: price.parameters.total,
    "parameters of attention": _attention_parameters,
    "forward, FLOP": lambda price: price.counted_flops["prefill"],
    "training, FLOP": _training_flops,
    "weights, bytes": lambda price: price.parameters.total * 2,
    "training state, bytes": lambda price: (
        price.parameters.total * OptimiserMemory.from_name("zero").bytes_per_parameter
    ),
    "activations, bytes": lambda price: price.activation_bytes,
    "cache, bytes": lambda price: price.cache_bytes * 2 // dtype_bytes(price.workload.dtype),
}

_GPT_ASSUMPTIONS = "a feed-forward of 4 h, biases and a key head for every head are taken for granted"
_TABLE_ASSUMPTIONS = f"{_GPT_ASSUMPTIONS}; positions and the last norm are left out"
_MASK_ASSUMPTIONS = "numbers of 2 bytes, dropout with masks of 1, and all scores kept, which a fused core does not keep"
_SIX_N_ASSUMPTIONS = "6 N counts tables that are only looked up, and no scores"


def _ceil_div(number: int, ways: int) -> int:
    """Shared among devices, the last of which may have less."""
    return -(-number // ways)


def _forward_flops(m: FormulaSizes) -> int:
    return m.l * (24 * m.b * m.s * m.h**2 + 4 * m.b * m.s**2 * m.h) + 2 * m.b * m.s * m.h * m.V


def _score_flops(m: FormulaSizes) -> int:
    return 5 * m.a * m.b * m.s**2


def _bytes_per_channel(m: FormulaSizes, each: int) -> int:
    """So many bytes of every channel of every token, in all layers."""
    return m.l * each * m.b * m.s * m.h


ZHIHU = FormulaSource(
    "zhihu-624740065",
    "zhuanlan.zhihu.com/p/624740065, on the cost of decoders",
    (
        PublishedFormula(
            "parameters",
            "l (12 h^2 + 13 h) + V h",
            lambda m: m.l * (12 * m.h**2 + 13 * m.h) + m.V * m.h,
            _TABLE_ASSUMPTIONS,
        ),
        PublishedFormula("forward, FLOP", "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V", _forward_flops, _GPT_ASSUMPTIONS),
        PublishedFormula("training, FLOP", "3 of these", lambda m: 3 * _forward_flops(m), _GPT_ASSUMPTIONS),
        PublishedFormula("weights, bytes", "2 N", lambda m: 2 * m.N, "16 bits each"),
        PublishedFormula(
            "training state, bytes",
            "20 N",
            lambda m: 20 * m.N,
            "gradients twice, in 16 and 32 bits; ours are ZeRO's 16",
        ),
        PublishedFormula(
            "activations, bytes",
            "l (34 b s h + 5 b s^2 a)",
            lambda m: _bytes_per_channel(m, 34) + m.l * _score_flops(m),
            _MASK_ASSUMPTIONS,
        ),
        PublishedFormula(
            "cache, bytes",
            "4 b l h (s + n)",
            lambda m: 4 * m.b * m.l * m.h * (m.s + m.n),
            "every head keeps its keys and values, for ever; the last token written is never remembered here",
        ),
    ),
)
SEEDS = FormulaSource(
    "seeds",
    "the notes that this project began with: three projections of every head, and one of all",
    (
        PublishedFormula(
            "parameters of attention",
            "l (3 a h d + h^2)",
            lambda m: m.l * (3 * m.a * m.h * m.d + m.h**2),
            "no biases, as many key heads as heads, and heads that fill the width are taken for granted",
        ),
    ),
    scope="layer",
)
PAPER = FormulaSource(
    "paper-2022",
    "Korthikanti and others, 2205.05198: bytes on each of t devices",
    (
        PublishedFormula(
            "training, FLOP",
            "72 b l s h^2 (1 + s / 6 h + V / 12 h l)",
            lambda m: 3 * _forward_flops(m),
            f"{_GPT_ASSUMPTIONS}; what is recomputed is left out",
        ),
        *(
            PublishedFormula("activations, bytes", formula, theirs, _MASK_ASSUMPTIONS)
            for formula, theirs in {
                "s b h l (34 + 5 a s / h)": lambda m: _bytes_per_channel(m, 34) + m.l * _score_flops(m),
                "s b h l (10 + 24/t + 5 a s / h t), tensor parallel": lambda m: (
                    _bytes_per_channel(m, 10) + _ceil_div(_bytes_per_channel(m, 24) + m.l * _score_flops(m), m.t)
                ),
                "s b h l (34 + 5 a s / h) / t, and sequence parallel": lambda m: _ceil_div(
                    _bytes_per_channel(m, 34) + m.l * _score_flops(m), m.t
                ),
                "s b h l (10 + 24/t), tensor parallel, cores recomputed": lambda m: (
                    _bytes_per_channel(m, 10) + _ceil_div(_bytes_per_channel(m, 24), m.t)
                ),
                "34 s b h l / t, both, cores recomputed": lambda m: _ceil_div(_bytes_per_channel(m, 34), m.t),
                "2 s b h l, all recomputed": lambda m: _bytes_per_channel(m, 2),
            }.items()
        ),
    ),
)
PALM = FormulaSource(
    "palm",
    "2204.02311, appendix B, as in nanoGPT: for each of b s tokens",
    (
        PublishedFormula(
            "training, FLOP",
            "b s (6 N + 12 l a d s)",
            lambda m: m.b * m.s * (6 * m.N + 12 * m.l * m.a * m.d * m.s),
            "6 N counts biases, norms and tables that are only looked up as if they were multiplied",
        ),
    ),
    scope="layer",
)
SCALING = FormulaSource(
    "scaling-book",
    "jax-ml.github.io/scaling-book: rules of thumb for short rows",
    (
        PublishedFormula("training, FLOP", "6 N b s", lambda m: 6 * m.N * m.b * m.s, _SIX_N_ASSUMPTIONS),
        PublishedFormula(
            "training, FLOP",
            "8 N b s, blocks recomputed",
            lambda m: 8 * m.N * m.b * m.s,
            f"{_SIX_N_ASSUMPTIONS}; a third forward",
        ),
        PublishedFormula(
            "activations, bytes",
            "20 tensors of b s h a layer",
            lambda m: _bytes_per_channel(m, 40),
            "a count by the thumb",
        ),
        PublishedFormula(
            "activations, bytes",
            "7 of them, products kept",
            lambda m: _bytes_per_channel(m, 14),
            "the rest is recomputed",
        ),
        PublishedFormula(
            "activations, bytes",
            "1 of them, blocks recomputed",
            lambda m: _bytes_per_channel(m, 2),
            "all is recomputed",
        ),
    ),
)
FORMULA_SOURCES: dict[str, FormulaSource] = {one.name: one for one in (ZHIHU, SEEDS, PAPER, PALM, SCALING)}
