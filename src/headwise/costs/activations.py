"""Bytes that the components of a model save for the backward pass: norms, feed-forwards, experts,
heads, attention.

For attention the bytes are inferred from two runs on meta tensors (`saved_tensors`). The other
components have formulas of what torch's autograd saves for them; biases and additions save nothing.
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
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    NormSpec,
    OutputHeadSpec,
    SequenceMixerSpec,
)
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
INT64_BYTES = 8


class SavedByActivation(NamedTuple):
    """Tensors that an activation function saves: a number of tensors besides its output, and
    possibly its output.
    """

    num_tensors: int
    saves_output: bool = False


SAVED_BY_ACTIVATION = {
    **dict.fromkeys(("gelu", "gelu_tanh", "silu", "mish", "relu6"), SavedByActivation(1)),
    **dict.fromkeys(("relu", "tanh", "sigmoid"), SavedByActivation(0, saves_output=True)),
    "relu2": SavedByActivation(1),  # the output of relu, which is also the input of the square
    "quick_gelu": SavedByActivation(2),  # x sigmoid(1.7 x): both factors
    "linear": SavedByActivation(0),
}
NUM_BOUNDED_ACTIVATION_TENSORS = (
    7  # gate and up before and after clamping, the sigmoid, and the two products
)


@dataclass(frozen=True)
class ActivationContext:
    """How a component runs: rows and tokens, bytes of an element, a norm statistic and a mask
    element, and dropout.
    """

    rows: int
    tokens: int
    element_bytes: int
    statistic_bytes: int
    mask_bytes: int
    is_fused: bool
    has_dropout: bool

    @staticmethod
    def from_workload(
        workload: Workload, tokens: int, profile: str, dropout: float
    ) -> ActivationContext:
        """Create from a workload; on CUDA, statistics have 4 bytes and masks 1, on the CPU those of
        the dtype.
        """
        element_bytes, is_fused = dtype_bytes(workload.dtype), profile == "flash-cuda"
        return ActivationContext(
            rows=SymbolicInt.of(workload.batch, "B"),
            tokens=SymbolicInt.of(tokens, "T"),
            element_bytes=element_bytes,
            statistic_bytes=4 if is_fused else element_bytes,
            mask_bytes=1 if is_fused else element_bytes,
            is_fused=is_fused,
            has_dropout=dropout > 0,
        )

    @property
    def num_tokens(self) -> int:
        """Total number of tokens, in all rows."""
        return self.rows * self.tokens

    def dropout_mask_bytes(self, count: int, width: int) -> int:
        """Bytes of the dropout mask of `count` tokens; 0 without dropout."""
        return self.mask_bytes * count * width if self.has_dropout else 0


def norm_bytes(norm: NormSpec, width: int, count: int, context: ActivationContext) -> NamedBytes:
    """Yield what a norm of `count` tokens saves: its input, and its statistics.

    >>> import headwise as hw
    >>> context = ActivationContext.from_workload(hw.Workload(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> [
    ...     int(size) for _, size in norm_bytes(NormSpec(), 8, context.num_tokens, context)
    ... ]  # 4 B T model; mean and variance
    [640, 160]
    """
    if norm.kind in ("layer", "unbiased", "bare"):
        yield "input", context.element_bytes * count * width
        yield "statistics", 2 * context.statistic_bytes * count
        return
    # An RMSNorm of plain operations saves x in single precision, and also x divided by its RMS.
    yield "input", (context.element_bytes if context.is_fused else 8) * count * width
    yield "statistics", 4 * count
    if norm.kind == "offset":
        yield "weight plus one", context.element_bytes * width


def feed_forward_bytes(feed: FeedForwardSpec, count: int, context: ActivationContext) -> NamedBytes:
    """Yield what a feed-forward on `count` tokens saves, except its input.

    >>> import headwise as hw
    >>> context = ActivationContext.from_workload(hw.Workload(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> feed = FeedForwardSpec(32)
    >>> [
    ...     int(size) for _, size in feed_forward_bytes(feed, context.num_tokens, context)
    ... ]  # before and after GELU
    [5120]
    """
    hidden_bytes = context.element_bytes * count * SymbolicInt.of(feed.hidden, "hidden")
    yield "hidden", _num_hidden_tensors(feed, context) * hidden_bytes
    if context.has_dropout:
        yield "mask", context.dropout_mask_bytes(count, SymbolicInt.of(feed.hidden, "hidden"))


def mixer_bytes(mixer: SequenceMixerSpec, width: int, context: ActivationContext) -> NamedBytes:
    """Yield what a recurrence or convolution saves, with its input if that is saved."""
    for name, vectors in mixer.saved_vectors.items():
        yield name, context.element_bytes * context.num_tokens * width * vectors


def _num_hidden_tensors(feed: FeedForwardSpec, context: ActivationContext) -> int:
    """Number of saved tensors that have the width of the hidden layer."""
    if feed.activation.startswith("bounded_silu("):
        return NUM_BOUNDED_ACTIVATION_TENSORS
    saved = lookup_activation(feed.activation)
    if feed.form == "gated":
        return (
            saved.num_tensors + 3
        )  # both factors, and their product, which is the input of the down projection
    # With dropout, the input of the down projection is a different tensor than the output of the
    # activation.
    return saved.num_tensors + 1 + (saved.saves_output and context.has_dropout)


def lookup_activation(name: str) -> SavedByActivation:
    """Return what the activation function with this name saves."""
    if name not in SAVED_BY_ACTIVATION:
        fact = f"cannot tell what activation {name!r} saves for the backward pass"
        raise SpecError(f"{fact}; {suggest(name, SAVED_BY_ACTIVATION)}")
    return SAVED_BY_ACTIVATION[name]


def experts_bytes(experts: ExpertsSpec, width: int, context: ActivationContext) -> NamedBytes:
    """Yield what a mixture of experts saves, including its input.

    Tokens are sorted by expert; the sum does not depend on how they are distributed over the
    experts. The router computes in float32.
    """
    count, active = context.num_tokens, SymbolicInt.of(experts.active, "active")
    num_experts = SymbolicInt.of(experts.count, "expert")
    is_fp32 = context.element_bytes == 4
    if is_fp32 or experts.shared:
        yield "input", context.element_bytes * count * width
    if not is_fp32:
        yield "router", 4 * count * width
        yield "router", 4 * num_experts * width
    yield "scores", 4 * count * num_experts
    yield "expert indices", INT64_BYTES * count * active
    if experts.scores == "chosen":
        yield "routing weights", 4 * count * active
    if experts.scores == "sigmoid":
        yield "routing weights", 4 * count * active
        yield "routing weights", 4 * count
    yield "sort order", 2 * INT64_BYTES * count * active
    yield "expert inputs", context.element_bytes * count * active * width
    yield from feed_forward_bytes(experts.each, count * active, context)
    yield "expert outputs", context.element_bytes * count * active * width
    yield "routing weights", context.element_bytes * count * active
    if experts.shared:
        yield from (
            (f"shared, {name}", size)
            for name, size in feed_forward_bytes(experts.shared, count, context)
        )


def embedding_bytes(embedding: EmbeddingSpec, width: int, context: ActivationContext) -> NamedBytes:
    """Yield what an embedding saves; token ids and pixels are inputs of the
    model and do not count.
    """
    if embedding.positions and embedding.positions.kind == "learned":
        yield "positions", INT64_BYTES * context.tokens
    if embedding.types:
        yield "types", INT64_BYTES
    if embedding.norm:
        yield from norm_bytes(embedding.norm, width, context.num_tokens, context)
    if context.has_dropout:
        yield "mask", context.dropout_mask_bytes(context.num_tokens, width)


def head_bytes(head: OutputHeadSpec, width: int, context: ActivationContext) -> NamedBytes:
    """Yield what an output head and its cross-entropy loss save, with one label for each scored
    token.
    """
    scores_all_tokens = head.at == "each"
    count = context.num_tokens if scores_all_tokens else context.rows
    # A first or last token is a view, which saves the memory of all tokens; a mean or a scaled
    # token is a new tensor.
    is_scaled = head.scale != 1 and not head.transform
    is_copy = head.at == "mean" or (is_scaled and not scores_all_tokens)
    yield "input", context.element_bytes * (context.rows if is_copy else context.num_tokens) * width
    transform = head.transform
    if transform:
        hidden = SymbolicInt.of(transform.hidden, "transform")
        saved = lookup_activation(transform.activation)
        # The output of the activation is usually the input of the next operation, and saved only
        # once.
        saves_extra_output = (
            saved.saves_output and not transform.norm and (head.scale != 1 or not head.outputs)
        )
        yield (
            "transform",
            context.element_bytes * (saved.num_tensors + saves_extra_output) * count * hidden,
        )
        if transform.norm:
            for name, size in norm_bytes(transform.norm, hidden, count, context):
                yield f"transform, {name}", size
        if head.outputs:
            yield "transform", context.element_bytes * count * hidden
    if not head.outputs:
        return
    outputs = SymbolicInt.of(head.outputs, "output")
    yield "soft-capped logits", context.element_bytes * count * outputs if head.cap else 0
    yield "log-softmax", context.element_bytes * count * outputs
    yield "total weight", context.element_bytes  # a scalar of torch's nll_loss


# --- Activation memory by published formulas ------------------------------------------------------

FORMULA_PROFILES = ("paper-2022", "zhihu-624740065")


def formula_layer_bytes(
    spec: AttentionSpec, workload: Workload, how: tuple[str, str]
) -> NamedBytes:
    """Yield the attention's part of the published formulas, 11 b s h + 5 b s^2 a; `how` is
    (profile, checkpoint).

    >>> import headwise as hw
    >>> spec = hw.design(model=12288, heads=96)
    >>> sizes = dict(formula_layer_bytes(spec, hw.Workload(1, 2048), ("paper-2022", "none")))
    >>> sum(sizes.values()) == 11 * 2048 * 12288 + 5 * 2048**2 * 96
    True
    """
    check_formula_applies(spec, workload, how[0])
    yield from _formula_attention_bytes(_symbolic_sizes(spec.model, spec.heads.q, workload), how)


def formula_block_bytes(
    block: BlockSpec, model: int, workload: Workload, how: tuple[str, str]
) -> NamedBytes:
    """Yield a block of the published formulas, 34 b s h + 5 b s^2 a.

    Such a block has attention, a feed-forward with 4 h hidden units, two norms, and dropout in
    every branch.
    """
    (profile, checkpoint), spec, feed = how, block.attention, block.feed
    if not isinstance(spec, AttentionSpec) or block.cross is not None:
        raise SpecError(
            f"profile {profile} supports only blocks with one self-attention; use profile='sdpa'"
        )
    check_formula_applies(spec, workload, profile)
    is_plain = isinstance(feed, FeedForwardSpec) and (feed.form, feed.hidden) == (
        "plain",
        4 * model,
    )
    if not is_plain or block.norm.kind != "layer" or block.placement not in ("pre", "post"):
        raise SpecError(
            f"profile {profile} supports only GPT blocks: two layer norms and a plain "
            f"feed-forward of 4 x {model}; "
            "use profile='sdpa'"
        )
    sizes = b, s, h, _ = _symbolic_sizes(model, spec.heads.q, workload)
    yield from _formula_attention_bytes(sizes, how)
    if checkpoint != "block":
        yield "feed-forward", 19 * b * s * h
        yield "norms", 4 * b * s * h


def check_formula_applies(spec: AttentionSpec, workload: Workload, profile: str) -> None:
    """Raise an error for specs and precisions that the published formulas do not cover."""
    heads = spec.heads
    plain = design(model=spec.model, heads=heads.q, dim=heads.dim, pattern=spec.pattern)
    kinds = (
        spec.project.uses_head_dims,
        type(spec.similarity),
        type(spec.normaliser),
        type(spec.merge),
        spec.source,
    )
    plain_kinds = (True, type(plain.similarity), type(plain.normaliser), type(plain.merge), None)
    only_dropout = all(
        modifier.phase is Phase.WEIGHTS and not modifier.params(spec) for modifier in spec.modifiers
    )
    if (
        kinds != plain_kinds
        or heads.kv != heads.q
        or heads.q * heads.dim != spec.model
        or heads.vdim != heads.dim
        or not only_dropout
    ):
        raise SpecError(
            f"profile {profile} supports only plain multi-head attention with heads x dim = model; "
            "use profile='dense', 'sdpa' or 'flash-cuda'"
        )
    if workload.dtype == "fp32":
        raise SpecError(
            f"profile {profile} supports only numbers of 2 bytes, not fp32; use dtype='bf16' or "
            "'fp16'"
        )


def _symbolic_sizes(model: int, heads: int, workload: Workload) -> tuple[int, int, int, int]:
    sizes = {"b": workload.batch, "s": workload.context, "h": model, "a": heads}
    b, s, h, a = (SymbolicInt.of(size, letter) for letter, size in sizes.items())
    return b, s, h, a


def _formula_attention_bytes(sizes: tuple[int, int, int, int], how: tuple[str, str]) -> NamedBytes:
    """Yield the terms of 2205.05198, section 4.1; the Zhihu article counts the softmax's input, not
    its output.
    """
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
    yield "input of the output projection", 2 * b * s * h
    yield "dropout mask", b * s * h


# --- Activation memory of an attention layer, by backend ------------------------------------------

# Backend and device type of each profile; those of FORMULA_PROFILES run nothing.
BACKEND_PROFILES = {
    "dense": ("dense", "cpu"),
    "chunked": ("dense", "cpu"),
    "bf16_matmul": ("bf16_matmul", "cpu"),
    "sdpa": ("sdpa", "cpu"),
    "flash-cuda": ("sdpa", "cuda"),
}
CHECKPOINT_MODES = ("none", "block", "core")
SHORT_LENGTH, LONGER_LENGTH = 7, 11  # batch sizes of the two runs
MAX_LENGTH = (
    2**22
)  # tokens of a run; the bytes of longer contexts follow from the formulas of shorter ones


def layer_activation_memory(
    spec: AttentionSpec,
    workload: Workload,
    profile: str = "",
    *,
    source: int | None = None,
    checkpoint: str = "none",
) -> CostBreakdown:
    """Bytes that one attention layer saves for the backward pass, by the step that saves them.

    The profile is how the layer runs:

    - "dense": all scores at once, in plain operations;
    - "chunked": in blocks of queries, whose scores are recomputed in the backward pass;
    - "bf16_matmul": bf16 matrix products on the CPU;
    - "sdpa": torch's fused attention on the CPU;
    - "flash-cuda": torch's fused attention on CUDA, derived from what its kernels save, not
      measured;
    - "paper-2022" (2205.05198) and "zhihu-624740065": published formulas.

    The default is `default_profile(spec, workload)`. `source` is the length of the source sequence,
    if it differs from the context.

    >>> import headwise as hw
    >>> memory = layer_activation_memory(
    ...     hw.design(model=512, heads=8, bias="qkvo"), hw.Workload(2, 1000), "sdpa"
    ... )
    >>> for term in memory.terms:
    ...     print(*term)
    input 2 B T model 2048000
    keys 2 B T q dim 2048000
    queries 2 B T q dim 2048000
    values 2 B T q dim 2048000
    logsumexp 4 B T q 64000
    outputs 2 B T q dim 2048000
    """
    profile = profile or default_profile(spec, workload)
    terms = layer_activation_terms(spec, workload, (profile, checkpoint), source)
    return CostBreakdown.from_items(iter(terms.items()))


def layer_activation_terms(
    spec: AttentionSpec, workload: Workload, how: tuple[str, str], source: int | None = None
) -> BytesByStep:
    """Like `layer_activation_memory`, but as symbolic integers by step; `how` is (profile,
    checkpoint).
    """
    profile, checkpoint = how
    _check_profile(profile, checkpoint)
    if profile in FORMULA_PROFILES:
        return dict(formula_layer_bytes(spec, workload, how))
    axes = symbolic_axes(spec, workload, source)
    if profile == "chunked" and checkpoint == "none" and workload.context > QUERY_BLOCK_SIZE:
        how = (profile, "core")
    if checkpoint == "block":
        rows, element_bytes = axes.sizes.batch, dtype_bytes(workload.dtype)
        terms = {
            "input": element_bytes * rows * axes.sizes.tokens * SymbolicInt.of(spec.model, "model")
        }
        if spec.source:
            source_width = SymbolicInt.of(spec.source, "source")
            terms["source"] = element_bytes * rows * axes.sizes.source * source_width
        return terms
    return _infer_terms(spec, workload, axes, how)


def default_profile(spec: AttentionSpec, workload: Workload) -> str:
    """Return how a layer runs in training on the device of a workload: fused if possible, else in
    blocks of queries.

    Linear attention has no profile of its own; it is treated as "dense".

    >>> import headwise as hw
    >>> [
    ...     default_profile(hw.design(preset=name), hw.Workload())
    ...     for name in ("gqa", "dcmha", "linear")
    ... ]
    ['flash-cuda', 'chunked', 'dense']
    """
    if fused_unsupported_reason(spec):
        return (
            "chunked" if linear_attention.unsupported_reasons(_training_options(spec)) else "dense"
        )
    if (
        workload.device == "cpu"
        and workload.dtype == "bf16"
        and not bf16_matmul.unsupported_reasons(_training_options(spec))
    ):
        return "bf16_matmul"
    return "sdpa" if workload.device in ("cpu", "m2-max") else "flash-cuda"


def fused_unsupported_reason(spec: AttentionSpec) -> list[str]:
    """Return the reasons why torch's fused attention cannot run a spec in training; empty if it
    can.
    """
    return sdpa.unsupported_reasons(_training_options(spec))


def _training_options(spec: AttentionSpec) -> CallSignature:
    return CallSignature(
        spec, spec.core_of(spec.projection_form(one=False)), needs_grad=True, training=True
    )


def is_fused_on_cpu(spec: AttentionSpec, dtype: str) -> bool:
    """Whether torch runs the spec in its fused CPU kernel, which needs keys and values of equal
    width, for example.

    >>> import headwise as hw
    >>> [is_fused_on_cpu(hw.design(preset=name), "fp32") for name in ("gqa", "mla")]
    [True, False]
    """
    sizes = CallSizes(SHORT_LENGTH, SHORT_LENGTH, SHORT_LENGTH)
    return record_saved_tensors(spec, sizes, "sdpa", dtype, "cpu").is_fused


def _check_profile(profile: str, checkpoint: str) -> None:
    if profile not in (profiles := [*BACKEND_PROFILES, *FORMULA_PROFILES]):
        raise SpecError(f"there is no profile {profile!r}; {suggest(profile, profiles)}")
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(
            f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}"
        )
    if checkpoint == "core" and profile in ("sdpa", "flash-cuda"):
        raise SpecError(
            f"profile {profile} saves no scores to recompute; use checkpoint='none' or 'block'"
        )


def symbolic_axes(spec: AttentionSpec, workload: Workload, source: int | None) -> SymbolicAxes:
    """Return the sizes of a workload and a spec as symbolic integers."""
    if source is not None and spec.source is None:
        raise SpecError(
            f"cannot set source={source!r}: this spec reads no source sequence; leave source out"
        )
    if source is not None and (type(source) is not int or source < 1):
        raise SpecError(f"source must be a whole number of at least 1, got {source!r}")
    return SymbolicAxes(
        spec, CallSizes(workload.batch, workload.context, source or workload.context)
    )


def _infer_terms(
    spec: AttentionSpec, workload: Workload, axes: SymbolicAxes, how: tuple[str, str]
) -> BytesByStep:
    """Infer the bytes of every step, with formulas, from two runs on meta tensors of slightly
    different sizes.

    If the two runs differ in kind, the bytes are those of one run of the full size, without
    formulas.
    """
    profile, checkpoint = how
    backend, device = BACKEND_PROFILES[profile]

    def saved_tensors(sizes: CallSizes) -> Sequence[SavedTensor]:
        run = record_saved_tensors(spec, sizes, backend, workload.dtype, device)
        return run.outside_core if checkpoint == "core" else run.saved

    full = CallSizes(*map(int, axes.sizes))
    base = CallSizes(
        min(full.batch, SHORT_LENGTH), min(full.tokens, MAX_LENGTH), min(full.source, MAX_LENGTH)
    )
    base_tensors = saved_tensors(base)
    for other in _probe_sizes(base, spec.source is None):
        try:
            terms = infer_formulas(base_tensors, saved_tensors(other), axes, (base, other))
        except (
            ValueError,
            RuntimeError,
        ):  # one token more may exceed the positions, and one less leave no token
            continue
        if terms is not None:
            return terms
    if base[1:] != full[1:]:
        fact = (
            f"cannot infer the activation memory of context={workload.context} from shorter "
            "contexts"
        )
        raise SpecError(f"{fact}; use context={MAX_LENGTH} or less")
    return sum_bytes_by_step(saved_tensors(full))


def _probe_sizes(base: CallSizes, is_self_attention: bool) -> Iterator[CallSizes]:
    """Yield sizes of calls of the same kind; one token more or less crosses no boundary of a
    pattern.
    """
    for difference in (1, -1):
        tokens = base.tokens + difference
        yield CallSizes(
            LONGER_LENGTH, tokens, tokens if is_self_attention else base.source + 2 * difference
        )


def record_saved_tensors(
    spec: AttentionSpec, sizes: CallSizes, backend: str, dtype: str, device: str
) -> SavedTensorRun:
    """Run a layer on meta tensors and record what it saves; errors of the run are raised as
    `SpecError`.
    """
    if dtype not in TORCH_DTYPES:
        raise SpecError(f"cannot train in dtype={dtype!r}; {suggest(dtype, TORCH_DTYPES)}")
    try:
        return record_meta_run(spec, sizes, backend, dtype, device)
    except NoBackend as error:
        raise SpecError(f"{error}; use profile='dense'") from None
    except RuntimeError as error:
        if "overflow" not in str(error) and "too large" not in str(error):
            raise
        raise SpecError(
            f"model={spec.model} makes tensors larger than torch supports; use a smaller model"
        ) from None
