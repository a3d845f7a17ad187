"""Published cost formulas, evaluated for a model and compared with headwise's numbers, with reasons for differences."""

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
    """The variables of published formulas: l layers of width h with a heads of d channels, a vocabulary of V tokens,
    b rows of s tokens and n generated ones, N parameters, t tensor-parallel devices."""

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
    """One formula: the quantity, the formula as text and as a function, and why headwise's number may differ."""

    quantity: str
    formula: str
    evaluate: Callable[[FormulaSizes], int]
    difference: str


@dataclass(frozen=True)
class FormulaSource:
    """Formulas of one source; `scope` is "block" if they need whole blocks, "layer" if they apply to any attention."""

    name: str
    source: str
    formulas: tuple[PublishedFormula, ...]
    scope: str = "block"

    @staticmethod
    def from_name(name: str) -> FormulaSource:
        """Return the source with this name."""
        if name not in FORMULA_SOURCES:
            raise SpecError(f"there are no published formulas {name!r}; {suggest(name, FORMULA_SOURCES)}")
        return FORMULA_SOURCES[name]


class FormulaComparison(NamedTuple):
    """One published number (`theirs`) and headwise's (`ours`), which is None if headwise does not estimate it."""

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
    """Compare every formula of a source with an estimate; `tensor_parallel` is the number of devices."""
    sizes = _formula_sizes(estimate, source, tensor_parallel)
    for row in source.formulas:
        theirs, ours = row.evaluate(sizes), HEADWISE_VALUES[row.quantity](estimate)
        why = "equal" if theirs == ours else row.difference
        yield FormulaComparison(estimate.name, source.name, row.quantity, row.formula, theirs, ours, why)


def _formula_sizes(estimate: CostEstimate, source: FormulaSource, tensor_parallel: int) -> FormulaSizes:
    model, load = estimate.spec_or_model, estimate.workload
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise SpecError(f"the number of tensor-parallel devices must be at least 1, got {tensor_parallel!r}")
    if isinstance(model, AttentionSpec):
        if source.scope == "block":
            fact = f"the formulas of {source.name} are of whole blocks, and {estimate.name} is one attention layer"
            raise SpecError(f"{fact}; name a model")
        specs, num_layers, width, vocabulary = [model], 1, model.model, 0
    else:
        if len(model.stacks) > 1:
            fact = f"the formulas of {source.name} are of one stack, and {estimate.name} has {len(model.stacks)}"
            raise SpecError(f"{fact}; name a decoder")
        stack = next(iter(model.stacks))
        specs = [block.attention_specs["attention"] for block in stack.layers if "attention" in block.attention_specs]
        num_layers, width = len(stack.layers), stack.model
        vocabulary = stack.embedding.tokens if stack.embedding else 0
    if not specs:
        fact = f"the formulas of {source.name} need attention heads, and {estimate.name} has none"
        raise SpecError(f"{fact}; name a model with attention")
    return FormulaSizes(
        l=num_layers,
        h=width,
        a=specs[0].heads.q,
        d=specs[0].core.dim,
        V=vocabulary,
        b=load.batch,
        s=estimate.full_call.tokens,
        n=load.generate,
        N=estimate.parameters.total,
        t=tensor_parallel,
    )


def _attention_parameters(estimate: CostEstimate) -> int:
    is_layer = isinstance(estimate.spec_or_model, AttentionSpec)
    return sum(term.value for term in estimate.parameters.terms if is_layer or ".attention." in term.name)


def _training_flops(estimate: CostEstimate) -> int | None:
    forward, backward = estimate.counted_flops["prefill"], estimate.counted_flops["backward"]
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
    "cache bytes": lambda estimate: estimate.cache_bytes * 2 // dtype_bytes(estimate.workload.dtype),
}

_GPT_ASSUMPTIONS = "the formula assumes a feed-forward of 4 h, biases, and a key head for every head"
_TABLE_ASSUMPTIONS = f"{_GPT_ASSUMPTIONS}; it leaves out positions and the final norm"
_MASK_ASSUMPTIONS = (
    "the formula assumes 2 bytes per number, dropout with masks of 1 byte, and saved scores, which fused attention "
    "does not save"
)
_SIX_N_ASSUMPTIONS = "6 N counts embedding tables, which are only looked up, and leaves out scores"


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _forward_flops(m: FormulaSizes) -> int:
    return m.l * (24 * m.b * m.s * m.h**2 + 4 * m.b * m.s**2 * m.h) + 2 * m.b * m.s * m.h * m.V


def _score_flops(m: FormulaSizes) -> int:
    return 5 * m.a * m.b * m.s**2


def _hidden_state_bytes(m: FormulaSizes, bytes_per_channel: int) -> int:
    """Bytes of all layers with this number of bytes per channel and token."""
    return m.l * bytes_per_channel * m.b * m.s * m.h


ZHIHU = FormulaSource(
    "zhihu-624740065",
    "zhuanlan.zhihu.com/p/624740065, on the cost of decoder-only models",
    (
        PublishedFormula(
            "parameters",
            "l (12 h^2 + 13 h) + V h",
            lambda m: m.l * (12 * m.h**2 + 13 * m.h) + m.V * m.h,
            _TABLE_ASSUMPTIONS,
        ),
        PublishedFormula("forward FLOPs", "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V", _forward_flops, _GPT_ASSUMPTIONS),
        PublishedFormula("training FLOPs", "3 x forward", lambda m: 3 * _forward_flops(m), _GPT_ASSUMPTIONS),
        PublishedFormula("weight bytes", "2 N", lambda m: 2 * m.N, "16 bits per parameter"),
        PublishedFormula(
            "optimiser bytes",
            "20 N",
            lambda m: 20 * m.N,
            "it has gradients in 16 and in 32 bits; headwise assumes ZeRO's 16 bytes",
        ),
        PublishedFormula(
            "activation bytes",
            "l (34 b s h + 5 b s^2 a)",
            lambda m: _hidden_state_bytes(m, 34) + m.l * _score_flops(m),
            _MASK_ASSUMPTIONS,
        ),
        PublishedFormula(
            "cache bytes",
            "4 b l h (s + n)",
            lambda m: 4 * m.b * m.l * m.h * (m.s + m.n),
            "it assumes a key head for every head and no window; headwise does not cache the last generated token",
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
    scope="layer",
)
PAPER = FormulaSource(
    "paper-2022",
    "Korthikanti and others, 2205.05198: bytes on each of t devices",
    (
        PublishedFormula(
            "training FLOPs",
            "72 b l s h^2 (1 + s / 6 h + V / 12 h l)",
            lambda m: 3 * _forward_flops(m),
            f"{_GPT_ASSUMPTIONS}; it leaves out recomputation",
        ),
        *(
            PublishedFormula("activation bytes", formula, evaluate, _MASK_ASSUMPTIONS)
            for formula, evaluate in {
                "s b h l (34 + 5 a s / h)": lambda m: _hidden_state_bytes(m, 34) + m.l * _score_flops(m),
                "s b h l (10 + 24/t + 5 a s / h t), tensor parallel": lambda m: (
                    _hidden_state_bytes(m, 10) + _ceil_div(_hidden_state_bytes(m, 24) + m.l * _score_flops(m), m.t)
                ),
                "s b h l (34 + 5 a s / h) / t, tensor and sequence parallel": lambda m: _ceil_div(
                    _hidden_state_bytes(m, 34) + m.l * _score_flops(m), m.t
                ),
                "s b h l (10 + 24/t), tensor parallel, cores recomputed": lambda m: (
                    _hidden_state_bytes(m, 10) + _ceil_div(_hidden_state_bytes(m, 24), m.t)
                ),
                "34 s b h l / t, tensor and sequence parallel, cores recomputed": lambda m: _ceil_div(
                    _hidden_state_bytes(m, 34), m.t
                ),
                "2 s b h l, blocks recomputed": lambda m: _hidden_state_bytes(m, 2),
            }.items()
        ),
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
    scope="layer",
)
SCALING = FormulaSource(
    "scaling-book",
    "jax-ml.github.io/scaling-book: rules of thumb for short sequences",
    (
        PublishedFormula("training FLOPs", "6 N b s", lambda m: 6 * m.N * m.b * m.s, _SIX_N_ASSUMPTIONS),
        PublishedFormula(
            "training FLOPs",
            "8 N b s, blocks recomputed",
            lambda m: 8 * m.N * m.b * m.s,
            f"{_SIX_N_ASSUMPTIONS}; it includes a second forward pass",
        ),
        PublishedFormula(
            "activation bytes",
            "20 tensors of b s h per layer",
            lambda m: _hidden_state_bytes(m, 40),
            "a rule of thumb",
        ),
        PublishedFormula(
            "activation bytes",
            "7 tensors of b s h per layer, matrix products saved",
            lambda m: _hidden_state_bytes(m, 14),
            "everything else is recomputed",
        ),
        PublishedFormula(
            "activation bytes",
            "1 tensor of b s h per layer, blocks recomputed",
            lambda m: _hidden_state_bytes(m, 2),
            "everything is recomputed",
        ),
    ),
)
FORMULA_SOURCES: dict[str, FormulaSource] = {source.name: source for source in (ZHIHU, SEEDS, PAPER, PALM, SCALING)}
