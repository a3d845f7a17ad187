"""Published cost formulas beside headwise's numbers, and a check of both against a small layer that
runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .. import costs
from ..backends import CallSignature, sdpa
from ..errors import SpecError, suggest
from ..interfaces.core_types import CallSize
from ..nn.attention import Attention
from ..spec.attention_spec import AttentionSpec
from . import flops
from .activations import fused_unsupported_reason, is_fused_on_cpu, layer_activation_memory
from .cost_report import CostEstimate, Workload
from .roofline import dtype_bytes
from .saved_tensors import SavedTensorRecorder
from .training_memory import OptimiserMemory, fused_backward_flops


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
    """Formulas of one source; `scope` is "block" if they need whole blocks, "layer" if they apply
    to any attention.
    """

    name: str
    source: str
    formulas: tuple[PublishedFormula, ...]
    scope: str = "block"

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
    for row in source.formulas:
        published, value = row.evaluate(sizes), HEADWISE_VALUES[row.quantity](estimate)
        explanation = "equal" if published == value else row.difference
        yield FormulaComparison(
            estimate.name, source.name, row.quantity, row.formula, published, value, explanation
        )


def _formula_sizes(
    estimate: CostEstimate, source: FormulaSource, tensor_parallel: int
) -> FormulaSizes:
    model, workload = estimate.spec_or_model, estimate.workload
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise SpecError(
            f"the number of tensor-parallel devices must be at least 1, got {tensor_parallel!r}"
        )
    if isinstance(model, AttentionSpec):
        if source.scope == "block":
            fact = (
                f"the formulas of {source.name} are of whole blocks, and {estimate.name} is "
                "one attention layer"
            )
            raise SpecError(f"{fact}; name a model")
        specs, num_layers, width, vocabulary = [model], 1, model.model, 0
    else:
        if len(model.stacks) > 1:
            fact = (
                f"the formulas of {source.name} are of one stack, and {estimate.name} has "
                f"{len(model.stacks)}"
            )
            raise SpecError(f"{fact}; name a decoder")
        stack = next(iter(model.stacks))
        specs = [
            block.attention_specs["attention"]
            for block in stack.layers
            if "attention" in block.attention_specs
        ]
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
        b=workload.batch,
        s=estimate.full_call.tokens,
        n=workload.generate,
        N=estimate.parameters.total,
        t=tensor_parallel,
    )


def _attention_parameters(estimate: CostEstimate) -> int:
    is_layer = isinstance(estimate.spec_or_model, AttentionSpec)
    return sum(
        term.value for term in estimate.parameters.terms if is_layer or ".attention." in term.name
    )


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
    "cache bytes": lambda estimate: (
        estimate.cache_bytes * 2 // dtype_bytes(estimate.workload.dtype)
    ),
}

_GPT_ASSUMPTIONS = (
    "the formula assumes a feed-forward of 4 h, biases, and a key head for every head"
)
_TABLE_ASSUMPTIONS = f"{_GPT_ASSUMPTIONS}; it leaves out positions and the final norm"
_MASK_ASSUMPTIONS = (
    "the formula assumes 2 bytes per number, dropout with masks of 1 byte, and saved scores, "
    "which fused attention "
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
        PublishedFormula(
            "forward FLOPs",
            "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V",
            _forward_flops,
            _GPT_ASSUMPTIONS,
        ),
        PublishedFormula(
            "training FLOPs", "3 x forward", lambda m: 3 * _forward_flops(m), _GPT_ASSUMPTIONS
        ),
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
                "s b h l (34 + 5 a s / h)": lambda m: (
                    _hidden_state_bytes(m, 34) + m.l * _score_flops(m)
                ),
                "s b h l (10 + 24/t + 5 a s / h t), tensor parallel": lambda m: (
                    _hidden_state_bytes(m, 10)
                    + _ceil_div(_hidden_state_bytes(m, 24) + m.l * _score_flops(m), m.t)
                ),
                "s b h l (34 + 5 a s / h) / t, tensor and sequence parallel": lambda m: _ceil_div(
                    _hidden_state_bytes(m, 34) + m.l * _score_flops(m), m.t
                ),
                "s b h l (10 + 24/t), tensor parallel, cores recomputed": lambda m: (
                    _hidden_state_bytes(m, 10) + _ceil_div(_hidden_state_bytes(m, 24), m.t)
                ),
                "34 s b h l / t, tensor and sequence parallel, cores recomputed": lambda m: (
                    _ceil_div(_hidden_state_bytes(m, 34), m.t)
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
        PublishedFormula(
            "training FLOPs", "6 N b s", lambda m: 6 * m.N * m.b * m.s, _SIX_N_ASSUMPTIONS
        ),
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
FORMULA_SOURCES: dict[str, FormulaSource] = {
    source.name: source for source in (ZHIHU, SEEDS, PAPER, PALM, SCALING)
}

# --- Checks against measurements ------------------------------------------------------------------

BATCH, TOKENS = 2, 11
PRODUCT_OPERATION = re.compile(
    r"attention|transformer|(^|_)(mm|bmm|addmm|baddbmm|addbmm|matmul|mv|addmv|dot|vdot|ger|addr|linear|bilinear"
    r"|convolution)(_|$)"
)


class UncountedOperation(ValueError):
    """An operation multiplies matrices, but neither torch nor this module has a FLOP formula for
    it.
    """


def _sdpa_forward_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (dim + v[-1])


def _backward_flops(
    grad: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """FLOPs of recomputed scores and of gradients of queries, keys (3 dim), weights and values (2
    vdim).
    """
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (3 * dim + 2 * v[-1])


_ATEN = torch.ops.aten
# Operations that torch's counter has no formula for: the CPU's flash attention and its backward
# pass.
FUSED_FLOPS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


class UncountedGuard(TorchDispatchMode):
    """Raises an error for operations that look like a matrix product but have no FLOP formula.

    Counting such an operation as zero would look like a saving.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet = func._overloadpacket
        if (
            PRODUCT_OPERATION.search(packet.__name__)
            and packet not in flop_registry
            and packet not in FUSED_FLOPS
        ):
            raise UncountedOperation(
                f"{packet} multiplies but has no formula; add one to "
                "headwise.costs.published_formulas.FUSED_FLOPS"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """torch's `FlopCounterMode` extended by the CPU's flash attention; it raises an error for
    uncounted products.

    >>> import torch.nn.functional as F
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with flop_counter() as counter:
    ...     _ = F.scaled_dot_product_attention(q, q, q)
    >>> counter.get_total_flops()  # 2 products of 5 x 5 x 8 for each of 2 heads
    1600
    """
    missing = {
        packet: formula for packet, formula in FUSED_FLOPS.items() if packet not in flop_registry
    }
    with UncountedGuard(), FlopCounterMode(display=False, custom_mapping=missing) as counter:
        yield counter


class FormulaCheck(NamedTuple):
    """One quantity: its name, the value of the formula, and the measured value."""

    what: str
    formula: int
    measured: int

    @property
    def holds(self) -> bool:
        """Whether the two values are exactly equal."""
        return self.formula == self.measured


def check_formulas(spec: AttentionSpec) -> list[FormulaCheck]:
    """Compare every formula with a small layer of this spec: parameters, FLOPs, saved tensors and
    cache.

    The layer runs with the dense backend, whose operations torch's counter sees one by one, and
    with `sdpa` if that supports the spec.

    >>> import headwise as hw
    >>> all(check.holds for check in check_formulas(hw.design(preset="mla")))
    True
    """
    spec = shrink_spec(spec)
    layer = Attention(spec, backend="dense")
    checks = [
        FormulaCheck(
            "parameters", costs.count_parameters(spec), sum(p.numel() for p in layer.parameters())
        ),
        FormulaCheck(
            "constants", costs.count_constants(spec), sum(b.numel() for b in layer.buffers())
        ),
        *_check_training_step(spec, layer, "dense"),
    ]
    if not fused_unsupported_reason(spec):
        checks += _check_training_step(spec, Attention(spec, backend="sdpa"), "sdpa")
    if spec.pattern.tokens_before_decode == 0 and spec.source is None:
        checks += _check_decoding(spec)
    return checks


def shrink_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec with the smallest head dimensions that its parts allow, and a model dimension
    of at most 24.
    """
    heads = spec.heads
    for dim in (4, 8, 16, 32, 64):
        try:
            small_heads = replace(heads, dim=dim, vdim=max(1, heads.vdim * dim // heads.dim))
            for _, part in spec.parts():
                small_heads = part.widen_heads(small_heads)
            source = spec.source and min(spec.source, 20)
            return replace(spec, model=min(spec.model, 24), heads=small_heads, source=source)
        except SpecError:
            continue
    return spec


def _check_training_step(
    spec: AttentionSpec, layer: Attention, profile: str
) -> Iterator[FormulaCheck]:
    """Run one training step; check the FLOPs of both passes and the bytes saved between them."""
    x, source = _inputs(spec)
    keys = TOKENS if source is None else TOKENS + 2
    work = CallSize(BATCH, TOKENS, keys, keys)
    with flop_counter() as counter, SavedTensorRecorder.for_module(layer) as recorder:
        y = layer(x, source=source)
        measured_forward = counter.get_total_flops()
        y.sum().backward()
    forward, backward = _expected_flops(spec, work, profile)
    saved = layer_activation_memory(
        spec,
        Workload(BATCH, TOKENS, "fp32", "cpu"),
        profile,
        source=None if source is None else keys,
    )
    suffix = "" if profile == "dense" else f", {profile}"
    yield FormulaCheck(f"forward FLOPs{suffix}", forward, measured_forward)
    yield FormulaCheck(
        f"backward FLOPs{suffix}", backward, counter.get_total_flops() - measured_forward
    )
    yield FormulaCheck(f"saved bytes{suffix}", saved.total, recorder.total_bytes)


def _inputs(spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(BATCH, TOKENS, spec.model, requires_grad=True)
    if spec.source is None:
        return x, None
    return x, torch.randn(BATCH, TOKENS + 2, spec.source, requires_grad=True)


def _expected_flops(spec: AttentionSpec, work: CallSize, profile: str) -> tuple[int, int]:
    """FLOPs of the forward and backward pass by formula; with `sdpa`, an attention sink is one more
    key.
    """
    if profile == "dense":
        return flops.forward_flops(spec, work).total, flops.backward_flops(spec, work).total
    signature = CallSignature(
        spec, spec.core_of(spec.projection_form(one=False)), needs_grad=True, training=True
    )
    forward = costs.executed_flops(spec, work, sdpa.executed_flops(signature, work))
    sink_flops = forward - flops.forward_flops(spec, work).total
    if is_fused_on_cpu(spec, "fp32"):
        return forward, fused_backward_flops(spec, work).total
    return forward, flops.backward_flops(spec, work).total + 2 * sink_flops


def _check_decoding(spec: AttentionSpec) -> Iterator[FormulaCheck]:
    """Decode token by token; check the bytes of the cache and the FLOPs of the last step."""
    layer, x = Attention(spec), torch.randn(BATCH, 1, spec.model)
    cache = layer.cache(batch=BATCH, capacity=TOKENS)
    yield FormulaCheck(
        "cache bytes", costs.cache_bytes(spec, batch=BATCH, capacity=TOKENS), cache.nbytes
    )
    if spec.is_recurrent:
        return  # updates of a recurrent state are elementwise, which torch's counter does not count
    layer.backend_name = "dense"
    with torch.no_grad(), flop_counter() as counter:
        for _ in range(TOKENS):
            before = counter.get_total_flops()
            layer(x, cache=cache)
    first, last = spec.pattern.retention
    slots = TOKENS if last is None else min(TOKENS, first + last)
    step = flops.forward_flops(spec, CallSize(BATCH, 1, 1, slots)).total
    yield FormulaCheck("decode step FLOPs", step, counter.get_total_flops() - before)
