"""Bytes kept for the way back by what stands around attention: norms, feed-forwards, experts, embeddings, heads.

Each formula says what torch keeps of the plain operations that a blueprint stands for; biases and sums keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..backends import bf16_matmul, linear_attention, sdpa
from ..backends.core_interface import CallSignature
from ..backends.query_blocks import QUERY_BLOCK_SIZE
from ..errors import NoBackend, SpecError, suggest
from ..interfaces.core_types import Phase
from ..model_spec import BlockSpec, EmbeddingSpec, ExpertsSpec, FeedForwardSpec, NormSpec, OutputHeadSpec
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from .flops import CostBreakdown
from .roofline import dtype_bytes
from .saved_tensors import (
    TORCH_DTYPES,
    BytesByStep,
    CallSizes,
    SavedTensor,
    SavedTensorRun,
    SymbolicAxes,
    infer_formulas,
    record_meta_run,
    sum_bytes_by_step,
)
from .symbolic_int import SymbolicInt

if TYPE_CHECKING:
    from .cost_report import Workload

NamedBytes = Iterator[tuple[str, int]]
INT64_BYTES = 8  # bytes of an index


class SavedByActivation(NamedTuple):
    """What an activation keeps: so many tensors beside its output, and perhaps its output."""

    num_tensors: int
    saves_output: bool = False


SAVED_BY_ACTIVATION = {
    **dict.fromkeys(("gelu", "gelu_tanh", "silu", "mish", "relu6"), SavedByActivation(1)),
    **dict.fromkeys(("relu", "tanh", "sigmoid"), SavedByActivation(0, saves_output=True)),
    "relu2": SavedByActivation(1),  # relu keeps what it gives, and so does the square of it
    "quick_gelu": SavedByActivation(2),  # x sigmoid(1.7 x): both factors
    "linear": SavedByActivation(0),
}
NUM_BOUNDED_ACTIVATION_TENSORS = 7  # gate and up before and after their bounds, the sigmoid, and the two products


@dataclass(frozen=True)
class ActivationContext:
    """Where a piece runs: rows and tokens, bytes of a number, of a statistic and of a mask, with dropout or without."""

    rows: int
    tokens: int
    element_bytes: int
    statistic_bytes: int
    mask_bytes: int
    is_fused: bool
    has_dropout: bool

    @staticmethod
    def from_workload(load: Workload, tokens: int, profile: str, dropout: float) -> ActivationContext:
        """On CUDA statistics have 4 bytes and masks one; on the CPU both are what the numbers are."""
        each, fused = dtype_bytes(load.dtype), profile == "flash-cuda"
        rows = SymbolicInt.of(load.batch, "b")
        stat, mask = (4, 1) if fused else (each, each)
        return ActivationContext(rows, SymbolicInt.of(tokens, "s"), each, stat, mask, fused, dropout > 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.tokens

    def dropout_mask_bytes(self, count: int, width: int) -> int:
        """The mask of what is dropped, if anything is."""
        return self.mask_bytes * count * width if self.has_dropout else 0


def norm_bytes(described: NormSpec, width: int, count: int, context: ActivationContext) -> NamedBytes:
    """A norm of so many tokens: what it reads, and what it found of each.

    >>> import headwise as hw
    >>> at = ActivationContext.from_workload(hw.Workload(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> [
    ...     int(size) for _, size in norm_bytes(NormSpec(), 8, at.num_tokens, at)
    ... ]  # 4 b s d, and two numbers of each token
    [640, 160]
    """
    if described.kind in ("layer", "unbiased", "bare"):
        yield "input", context.element_bytes * count * width
        yield "statistics", 2 * context.statistic_bytes * count
        return
    # Composed of plain operations, it keeps x in single precision, and x over its rms too.
    yield "input", (context.element_bytes if context.is_fused else 8) * count * width
    yield "statistics", 4 * count
    if described.kind == "offset":
        yield "weight and one", context.element_bytes * width


def feed_forward_bytes(described: FeedForwardSpec, count: int, context: ActivationContext) -> NamedBytes:
    """A feed-forward on so many tokens, without what it reads.

    >>> import headwise as hw
    >>> at = ActivationContext.from_workload(hw.Workload(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> [
    ...     int(size) for _, size in feed_forward_bytes(FeedForwardSpec(32), at.num_tokens, at)
    ... ]  # before and behind the lookup_activation
    [5120]
    """
    wide = context.element_bytes * count * SymbolicInt.of(described.hidden, "hidden")
    yield "inside", _num_hidden_tensors(described, context) * wide
    if context.has_dropout:
        yield "mask", context.dropout_mask_bytes(count, SymbolicInt.of(described.hidden, "hidden"))


def _num_hidden_tensors(described: FeedForwardSpec, at: ActivationContext) -> int:
    """How many tensors as wide as its hidden layer are kept."""
    if described.activation.startswith("bounded_silu("):
        return NUM_BOUNDED_ACTIVATION_TENSORS
    act = lookup_activation(described.activation)
    if described.form == "gated":
        return act.num_tensors + 3  # both factors, and their product, which the last map reads
    return (
        act.num_tensors + 1 + (act.saves_output and at.has_dropout)
    )  # dropped, the output is another than the last map reads


def lookup_activation(name: str) -> SavedByActivation:
    """What the activation of this name keeps."""
    if name not in SAVED_BY_ACTIVATION:
        raise SpecError(f"what activation {name!r} keeps is not known; {suggest(name, SAVED_BY_ACTIVATION)}")
    return SAVED_BY_ACTIVATION[name]


def experts_bytes(described: ExpertsSpec, width: int, context: ActivationContext) -> NamedBytes:
    """A mixture whose tokens are sorted by expert, with what it reads; however they are spread, the sum is the same."""
    count, active = context.num_tokens, SymbolicInt.of(described.active, "active")
    each = SymbolicInt.of(described.count, "expert")
    exact = context.element_bytes == 4
    if exact or described.shared:
        yield "input", context.element_bytes * count * width
    if not exact:
        yield "router", 4 * count * width
        yield "router", 4 * each * width
    yield "scores", 4 * count * each
    yield "chosen", INT64_BYTES * count * active
    if described.scores == "chosen":
        yield "shares", 4 * count * active
    if described.scores == "sigmoid":
        yield "shares", 4 * count * active
        yield "shares", 4 * count
    yield "order", 2 * INT64_BYTES * count * active
    yield "tokens of experts", context.element_bytes * count * active * width
    yield from feed_forward_bytes(described.each, count * active, context)
    yield "outputs", context.element_bytes * count * active * width
    yield "shares", context.element_bytes * count * active
    if described.shared:
        yield from ((f"shared, {name}", size) for name, size in feed_forward_bytes(described.shared, count, context))


def embedding_bytes(described: EmbeddingSpec, width: int, context: ActivationContext) -> NamedBytes:
    """What enters a stack; ids and pixels are given, and nobody keeps them for it."""
    if described.positions and described.positions.kind == "learned":
        yield "positions", INT64_BYTES * context.tokens
    if described.types:
        yield "types", INT64_BYTES
    if described.norm:
        yield from norm_bytes(described.norm, width, context.num_tokens, context)
    if context.has_dropout:
        yield "mask", context.dropout_mask_bytes(context.num_tokens, width)


def head_bytes(described: OutputHeadSpec, width: int, context: ActivationContext) -> NamedBytes:
    """A head and the cross-entropy of what it says, a label for each of its rows."""
    whole = described.at == "each"
    count = context.num_tokens if whole else context.rows
    # A first or last token is kept as what it is a part of; a mean is a tensor of its own, and so is a multiple.
    scaled = described.scale != 1 and not described.transform
    read = context.rows * width if described.at == "mean" or (scaled and not whole) else context.num_tokens * width
    yield "input", context.element_bytes * read
    told = described.transform
    if told:
        hidden = SymbolicInt.of(told.hidden, "transform")
        act = lookup_activation(told.activation)
        # What an activation gives is most often what is read next, and then kept once.
        apart = act.saves_output and not told.norm and (described.scale != 1 or not described.outputs)
        yield "transform", context.element_bytes * (act.num_tensors + apart) * count * hidden
        if told.norm:
            yield from ((f"transform, {name}", size) for name, size in norm_bytes(told.norm, hidden, count, context))
        if described.outputs:
            yield "transform", context.element_bytes * count * hidden
    if not described.outputs:
        return
    outputs = SymbolicInt.of(described.outputs, "output")
    yield "capped", context.element_bytes * count * outputs if described.cap else 0
    yield "log-softmax", context.element_bytes * count * outputs
    yield "its weight", context.element_bytes


# --- Bytes kept for the way back as published ----------------------------------------------------------

FORMULA_PROFILES = ("paper-2022", "zhihu-624740065")


def formula_layer_bytes(spec: AttentionSpec, load: Workload, how: tuple[str, str]) -> NamedBytes:
    """The attention's part, 11 b s h + 5 b s^2 a; `how` is the profile, and what is computed anew.

    >>> import headwise as hw
    >>> told = dict(formula_layer_bytes(hw.design(model=12288, heads=96), hw.Workload(1, 2048), ("paper-2022", "none")))
    >>> sum(told.values()) == 11 * 2048 * 12288 + 5 * 2048**2 * 96
    True
    """
    check_formula_applies(spec, load, how[0])
    yield from _formula_attention_bytes(_symbolic_sizes(spec.model, spec.heads.q, load), how)


def formula_block_bytes(described: BlockSpec, model: int, load: Workload, how: tuple[str, str]) -> NamedBytes:
    """A whole block, 34 b s h + 5 b s^2 a: its attention, a feed-forward 4 h wide, two norms, dropout everywhere."""
    (profile, checkpoint), spec, feed = how, described.attention, described.feed
    if not isinstance(spec, AttentionSpec) or described.cross is not None:
        raise SpecError(f"profile {profile} is of blocks with one self-attention; use profile='sdpa'")
    check_formula_applies(spec, load, profile)
    plain = isinstance(feed, FeedForwardSpec) and (feed.form, feed.hidden) == ("plain", 4 * model)
    if not plain or described.norm.kind != "layer" or described.placement not in ("pre", "post"):
        raise SpecError(
            f"profile {profile} is of GPT blocks: two layer norms and a plain feed-forward of 4 x {model}; "
            "use profile='sdpa'"
        )
    sizes = b, s, h, _ = _symbolic_sizes(model, spec.heads.q, load)
    yield from _formula_attention_bytes(sizes, how)
    if checkpoint != "block":
        yield "feed-forward", 19 * b * s * h
        yield "norms", 4 * b * s * h


def check_formula_applies(spec: AttentionSpec, load: Workload, profile: str) -> None:
    """Refuse what the formulas were not written for."""
    heads = spec.heads
    plain = design(model=spec.model, heads=heads.q, dim=heads.dim, pattern=spec.pattern)
    alike = (spec.project.uses_head_dims, type(spec.similarity), type(spec.normaliser), type(spec.merge), spec.source)
    drops = all(modifier.phase is Phase.WEIGHTS and not modifier.params(spec) for modifier in spec.modifiers)
    usual = (True, type(plain.similarity), type(plain.normaliser), type(plain.merge), None)
    if (
        alike != usual
        or heads.kv != heads.q
        or heads.q * heads.dim != spec.model
        or heads.vdim != heads.dim
        or not drops
    ):
        raise SpecError(
            f"profile {profile} is of plain multi-head attention, as wide as its model; "
            "use profile='dense', 'sdpa' or 'flash-cuda'"
        )
    if load.dtype == "fp32":
        raise SpecError(f"profile {profile} is of numbers of 2 bytes, not fp32; use dtype='bf16' or 'fp16'")


def _symbolic_sizes(model: int, heads: int, load: Workload) -> tuple[int, int, int, int]:
    told = {"b": load.batch, "s": load.context, "h": model, "a": heads}
    b, s, h, a = (SymbolicInt.of(size, letter) for letter, size in told.items())
    return b, s, h, a


def _formula_attention_bytes(sizes: tuple[int, int, int, int], how: tuple[str, str]) -> NamedBytes:
    """2205.05198, section 4.1; the article keeps what goes into the softmax where the paper keeps what comes out."""
    (b, s, h, a), (profile, checkpoint) = sizes, how
    yield "input", 2 * b * s * h
    if checkpoint == "block":
        return
    yield "queries and keys", 4 * b * s * h
    yield "values", 2 * b * s * h
    if checkpoint == "none":
        side = "output" if profile == "paper-2022" else "input"
        yield f"softmax {side}", 2 * b * s**2 * a
        yield "softmax dropout mask", b * s**2 * a
        yield "dropped weights", 2 * b * s**2 * a
    yield "input of the projection", 2 * b * s * h
    yield "dropout mask", b * s * h


# --- Bytes that an attention layer keeps for the way back, by how it is run ----------------------------

# What runs the core, and on which kind of device; the published ones are formulas and run nothing.
BACKEND_PROFILES = {
    "dense": ("dense", "cpu"),
    "chunked": ("dense", "cpu"),
    "bf16_matmul": ("bf16_matmul", "cpu"),
    "sdpa": ("sdpa", "cpu"),
    "flash-cuda": ("sdpa", "cuda"),
}
CHECKPOINT_MODES = ("none", "block", "core")
SHORT_LENGTH, LONGER_LENGTH = 7, 11  # rows of the two runs
MAX_LENGTH = 2**22  # tokens of a run: what is longer follows from a shorter one of the same kind


def layer_activation_memory(
    spec: AttentionSpec, workload: Workload, profile: str = "", *, source: int | None = None, checkpoint: str = "none"
) -> CostBreakdown:
    """Bytes that one layer keeps from its forward pass in training for the way back, by the step that keeps them.

    profile="dense": every score in plain operations; "chunked": the same in blocks of queries, whose scores are formed
    once more backward; "bf16_matmul": whole products; "sdpa": torch's fused call on the CPU; "flash-cuda": the same
    on CUDA, derived from what its kernels keep and not measured; "paper-2022" (2205.05198) and "zhihu-624740065" as
    textbook. Without one, `usual` says which. `source` is how many tokens another sequence has, if not as many.

    >>> import headwise as hw
    >>> told = layer_activation_memory(hw.design(model=512, heads=8, bias="qkvo"), hw.Workload(2, 1000), "sdpa")
    >>> for term in told.terms:
    ...     print(*term)
    input 2 b s model 2048000
    keys 2 b s q dim 2048000
    queries 2 b s q dim 2048000
    values 2 b s q dim 2048000
    logsumexp 4 b s q 64000
    read 2 b s q dim 2048000
    """
    return CostBreakdown.from_items(
        iter(
            layer_activation_terms(
                spec, workload, (profile or default_profile(spec, workload), checkpoint), source
            ).items()
        )
    )


def layer_activation_terms(
    spec: AttentionSpec, workload: Workload, how: tuple[str, str], source: int | None = None
) -> BytesByStep:
    """The same as numbers that know their formulas, by step; `how` is profile and checkpoint."""
    profile, checkpoint = how
    _check_profile(profile, checkpoint)
    if profile in FORMULA_PROFILES:
        return dict(formula_layer_bytes(spec, workload, how))
    axes = symbolic_axes(spec, workload, source)
    if profile == "chunked" and checkpoint == "none" and workload.context > QUERY_BLOCK_SIZE:
        how = (profile, "core")
    if checkpoint == "block":
        rows, each = axes.load.batch, dtype_bytes(workload.dtype)
        held = {"input": each * rows * axes.load.tokens * SymbolicInt.of(spec.model, "model")}
        wide = spec.source and SymbolicInt.of(spec.source, "source")
        return held | ({"source": each * rows * axes.load.source * wide} if wide else {})
    return _infer_terms(spec, workload, axes, how)


def default_profile(spec: AttentionSpec, workload: Workload) -> str:
    """How a layer runs in training on the device of a load: fused where the spec can, else in blocks of queries.

    Sums over tokens, where a spec has them, are not among the profiles; such a one stands as dense.

    >>> import headwise as hw
    >>> [default_profile(hw.design(preset=name), hw.Workload()) for name in ("gqa", "dcmha", "linear")]
    ['flash-cuda', 'chunked', 'dense']
    """
    if fused_unsupported_reason(spec):
        return "chunked" if linear_attention.unsupported_reasons(_training_options(spec)) else "dense"
    if (
        workload.device == "cpu"
        and workload.dtype == "bf16"
        and not bf16_matmul.unsupported_reasons(_training_options(spec))
    ):
        return "bf16_matmul"
    return "sdpa" if workload.device in ("cpu", "m2-max") else "flash-cuda"


def fused_unsupported_reason(spec: AttentionSpec) -> list[str]:
    """Why the fused call cannot run a spec in training."""
    return sdpa.unsupported_reasons(_training_options(spec))


def _training_options(spec: AttentionSpec) -> CallSignature:
    return CallSignature(spec, spec.core_of(spec.projection_form(one=False)), needs_grad=True, training=True)


def is_fused_on_cpu(spec: AttentionSpec, dtype: str) -> bool:
    """Whether the fused call of the CPU really is one kernel: not where keys and values differ in width, say.

    >>> import headwise as hw
    >>> [is_fused_on_cpu(hw.design(preset=name), "fp32") for name in ("gqa", "mla")]
    [True, False]
    """
    return record_saved_tensors(
        spec, CallSizes(SHORT_LENGTH, SHORT_LENGTH, SHORT_LENGTH), "sdpa", dtype, "cpu"
    ).is_fused


def _check_profile(profile: str, checkpoint: str) -> None:
    if profile not in (known := [*BACKEND_PROFILES, *FORMULA_PROFILES]):
        raise SpecError(f"there is no profile {profile!r}; {suggest(profile, known)}")
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}")
    if checkpoint == "core" and profile in ("sdpa", "flash-cuda"):
        raise SpecError(f"profile {profile} keeps no scores to be computed anew; use checkpoint='none' or 'block'")


def symbolic_axes(spec: AttentionSpec, load: Workload, source: int | None) -> SymbolicAxes:
    """The sizes of a load by the letters and axes of a spec."""
    if source is not None and (spec.source is None or type(source) is not int or source < 1):
        told = "this spec reads no source" if spec.source is None else "give a whole number of at least 1"
        raise SpecError(f"source={source!r} is no length of a source; {told}")
    return SymbolicAxes(spec, CallSizes(load.batch, load.context, source or load.context))


def _infer_terms(spec: AttentionSpec, load: Workload, axes: SymbolicAxes, how: tuple[str, str]) -> BytesByStep:
    backend, device = BACKEND_PROFILES[how[0]]

    def kept(sizes: CallSizes) -> Sequence[SavedTensor]:
        told = record_saved_tensors(spec, sizes, backend, load.dtype, device)
        return told.outside_core if how[1] == "core" else told.saved

    wanted = CallSizes(*map(int, axes.load))
    here = CallSizes(min(wanted.batch, SHORT_LENGTH), min(wanted.tokens, MAX_LENGTH), min(wanted.source, MAX_LENGTH))
    first = kept(here)
    for other in _probe_sizes(here, spec.source is None):
        try:
            found = infer_formulas(first, kept(other), axes, (here, other))
        except (ValueError, RuntimeError):  # a layer may know no position beyond, or nothing of no tokens
            continue
        if found is not None:
            return found
    if here[1:] != wanted[1:]:
        raise SpecError(f"context={load.context} is another kind of call than any that can be tried; use {MAX_LENGTH}")
    return sum_bytes_by_step(kept(wanted))


def _probe_sizes(here: CallSizes, alone: bool) -> Iterator[CallSizes]:
    """Sizes of the same kind of call, near enough that no pattern has an edge between."""
    for more in (1, -1):
        tokens = here.tokens + more
        yield CallSizes(LONGER_LENGTH, tokens, tokens if alone else here.source + 2 * more)


def record_saved_tensors(
    spec: AttentionSpec, sizes: CallSizes, backend: str, dtype: str, device: str
) -> SavedTensorRun:
    """One run; what cannot run is refused in a line."""
    if dtype not in TORCH_DTYPES:
        raise SpecError(f"dtype={dtype!r} is nothing that layers train in; {suggest(dtype, TORCH_DTYPES)}")
    try:
        return record_meta_run(spec, sizes, backend, dtype, device)
    except NoBackend as error:
        raise SpecError(f"{error}; use profile='dense'") from None
    except RuntimeError as error:
        if "overflow" not in str(error) and "too large" not in str(error):
            raise
        raise SpecError(f"a layer of model={spec.model} is wider than any tensor can be; use less") from None
