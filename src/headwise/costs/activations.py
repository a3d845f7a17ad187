"""Bytes that the components of a model save for the backward pass: norms, feed-forwards, experts,
heads, attention.

For attention they come from a run on meta tensors (`saved_tensors`). The other components have
formulas of what torch's autograd saves for them; biases and additions save nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..attention.backends import bf16_matmul, linear_attention, sdpa
from ..attention.backends.core_interface import CallSignature
from ..attention.backends.query_blocks import QUERY_BLOCK_SIZE
from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import (
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    NormSpec,
    OutputHeadSpec,
)
from ..util.errors import NoBackend, SpecError, suggest
from .flops import CostBreakdown
from .saved_tensors import CallSizes, SavedTensorRecorder, record_meta_run
from .weight_storage import dtype_bytes
from .workload import Workload

NamedBytes = Iterator[tuple[str, int]]
INT64_BYTES = 8


class SavedByActivation(NamedTuple):
    """Tensors that an activation function saves besides its output, and whether it saves that."""

    num_tensors: int
    saves_output: bool = False


SAVED_BY_ACTIVATION = {
    **dict.fromkeys(("gelu", "gelu_tanh", "silu", "mish", "relu6"), SavedByActivation(1)),
    **dict.fromkeys(("relu", "tanh", "sigmoid"), SavedByActivation(0, saves_output=True)),
    "relu2": SavedByActivation(1),  # the output of relu, which is also the input of the square
    "quick_gelu": SavedByActivation(2),  # x sigmoid(1.7 x): both factors
    "linear": SavedByActivation(0),
}
# Gate and up before and after clamping, the sigmoid, and the two products.
NUM_BOUNDED_ACTIVATION_TENSORS = 7


def lookup_activation(name: str) -> SavedByActivation:
    """Return what the activation function with this name saves."""
    if name not in SAVED_BY_ACTIVATION:
        fact = f"cannot tell what activation {name!r} saves for the backward pass"
        raise SpecError(f"{fact}; {suggest(name, SAVED_BY_ACTIVATION)}")
    return SAVED_BY_ACTIVATION[name]


@dataclass(frozen=True)
class ActivationContext:
    """How a component runs: rows, tokens of a row, bytes of an element, and dropout.

    On CUDA, statistics of norms have 4 bytes and dropout masks 1; on the CPU, the dtype's bytes.
    """

    rows: int
    tokens: int
    element_bytes: int
    is_cuda: bool
    has_dropout: bool

    @staticmethod
    def from_workload(
        workload: Workload, tokens: int, profile: str, dropout: float
    ) -> ActivationContext:
        """Create from a workload and the profile of its attention layers."""
        element_bytes = dtype_bytes(workload.dtype)
        return ActivationContext(
            workload.batch, tokens, element_bytes, profile == "flash-cuda", dropout > 0
        )

    @property
    def num_tokens(self) -> int:
        """Total number of tokens, in all rows."""
        return self.rows * self.tokens

    def tensor_bytes(self, *sizes: int) -> int:
        """Count the bytes of a tensor of these sizes."""
        total = self.element_bytes
        for size in sizes:
            total *= size
        return total

    def mask_bytes(self, count: int, width: int) -> int:
        """Count the bytes of the dropout mask of `count` tokens; 0 without dropout."""
        each = 1 if self.is_cuda else self.element_bytes
        return each * count * width if self.has_dropout else 0


def norm_bytes(norm: NormSpec, width: int, count: int, context: ActivationContext) -> NamedBytes:
    """Yield what a norm of `count` tokens saves: its input, and its statistics.

    >>> import headwise as hw
    >>> context = ActivationContext.from_workload(hw.Workload(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> list(norm_bytes(NormSpec(), 8, context.num_tokens, context))  # mean and variance
    [('input', 640), ('statistics', 160)]
    """
    if norm.kind in ("layer", "layer_no_bias", "layer_no_affine"):
        yield "input", context.tensor_bytes(count, width)
        yield "statistics", 2 * count * (4 if context.is_cuda else context.element_bytes)
        return
    # An RMSNorm of plain operations saves x in single precision, and also x divided by its RMS.
    yield "input", (context.element_bytes if context.is_cuda else 8) * count * width
    yield "statistics", 4 * count
    if norm.kind == "rms_unit_offset":
        yield "weight plus one", context.tensor_bytes(width)


def feed_forward_bytes(feed: FeedForwardSpec, count: int, context: ActivationContext) -> NamedBytes:
    """Yield what a feed-forward on `count` tokens saves, except its input."""
    if feed.activation.startswith("bounded_silu("):
        num_tensors = NUM_BOUNDED_ACTIVATION_TENSORS
    else:
        saved = lookup_activation(feed.activation)
        num_tensors = saved.num_tensors
        if feed.form == "gated":
            # Both factors, and their product, which is the input of the down projection.
            num_tensors += 3
        else:
            # With dropout, the input of the down projection is another tensor than the output of
            # the activation.
            num_tensors += 1 + (saved.saves_output and context.has_dropout)
    yield "hidden", num_tensors * context.tensor_bytes(count, feed.hidden)
    yield "mask", context.mask_bytes(count, feed.hidden)


def experts_bytes(experts: ExpertsSpec, width: int, context: ActivationContext) -> NamedBytes:
    """Yield what a mixture of experts saves, including its input.

    Tokens are sorted by expert; the sum does not depend on how they are distributed over the
    experts. The router computes in float32.
    """
    count = context.num_tokens
    routed = count * experts.top_k
    is_fp32 = context.element_bytes == 4
    if is_fp32 or experts.shared:
        yield "input", context.tensor_bytes(count, width)
    if not is_fp32:
        yield "router", 4 * width * (count + experts.count)
    yield "scores", 4 * count * experts.count
    yield "expert indices", INT64_BYTES * routed
    if experts.scores in ("softmax_of_top_k", "sigmoid"):
        yield "routing weights", 4 * routed
    if experts.scores == "sigmoid":
        yield "routing weights", 4 * count
    yield "sort order", 2 * INT64_BYTES * routed
    yield "expert inputs", context.tensor_bytes(routed, width)
    yield from feed_forward_bytes(experts.expert, routed, context)
    yield "expert outputs", context.tensor_bytes(routed, width)
    yield "routing weights", context.tensor_bytes(routed)
    if experts.shared:
        for name, size in feed_forward_bytes(experts.shared, count, context):
            yield f"shared, {name}", size


def embedding_bytes(embedding: EmbeddingSpec, width: int, context: ActivationContext) -> NamedBytes:
    """Yield what an embedding saves; token ids and pixels are inputs of the model and do not
    count.
    """
    if embedding.positions and embedding.positions.kind == "learned":
        yield "positions", INT64_BYTES * context.tokens
    if embedding.types:
        yield "types", INT64_BYTES
    if embedding.norm:
        yield from norm_bytes(embedding.norm, width, context.num_tokens, context)
    yield "mask", context.mask_bytes(context.num_tokens, width)


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
    yield "input", context.tensor_bytes(context.rows if is_copy else context.num_tokens, width)
    transform = head.transform
    if transform:
        saved = lookup_activation(transform.activation)
        # The output of the activation is usually the input of the next operation, and saved once.
        saves_extra_output = (
            saved.saves_output and not transform.norm and (head.scale != 1 or not head.outputs)
        )
        num_tensors = saved.num_tensors + saves_extra_output + bool(head.outputs)
        yield "transform", num_tensors * context.tensor_bytes(count, transform.hidden)
        if transform.norm:
            for name, size in norm_bytes(transform.norm, transform.hidden, count, context):
                yield f"transform, {name}", size
    if not head.outputs:
        return
    logits = context.tensor_bytes(count, head.outputs)
    yield "soft-capped logits", logits if head.cap else 0
    yield "log-softmax", logits
    yield "total weight", context.element_bytes  # a scalar of torch's nll_loss


# --- Activation memory of an attention layer, by backend ------------------------------------------

# Backend and device type of each profile.
BACKEND_PROFILES = {
    "dense": ("dense", "cpu"),
    "chunked": ("dense", "cpu"),
    "bf16_matmul": ("bf16_matmul", "cpu"),
    "sdpa": ("sdpa", "cpu"),
    "flash-cuda": ("sdpa", "cuda"),
}
CHECKPOINT_MODES = ("none", "block")


def layer_activation_memory(
    spec: AttentionSpec,
    workload: Workload,
    profile: str = "",
    *,
    source: int | None = None,
    checkpoint: str = "none",
) -> CostBreakdown:
    """Count the bytes that one attention layer saves for the backward pass, by the step that saves
    them.

    The profile is how the layer runs:

    - "dense": all scores at once, in plain operations;
    - "chunked": in blocks of queries, with scores recomputed in the backward pass;
    - "bf16_matmul": bf16 matrix products on the CPU;
    - "sdpa": torch's fused attention on the CPU;
    - "flash-cuda": torch's fused attention on CUDA, derived from what its kernels save, not
      measured.

    The default is `default_profile(spec, workload)`. `source` is the length of the source sequence,
    if it differs from the context.

    >>> import headwise as hw
    >>> memory = layer_activation_memory(
    ...     hw.design(model=512, heads=8, bias="qkvo"), hw.Workload(2, 1000), "sdpa"
    ... )
    >>> {term.name: term.value for term in memory.terms}["logsumexp"]  # 4 b s a
    64000
    >>> memory.total == 5 * 2048000 + 64000  # input, keys, queries, values, outputs
    True
    """
    profile = profile or default_profile(spec, workload)
    if profile not in BACKEND_PROFILES:
        raise SpecError(f"there is no profile {profile!r}; {suggest(profile, BACKEND_PROFILES)}")
    check_checkpoint_mode(checkpoint)
    if source is not None and spec.source is None:
        raise SpecError(
            f"cannot set source={source!r}: this spec reads no source sequence; leave source out"
        )
    sizes = CallSizes(workload.batch, workload.context, source or workload.context)
    if checkpoint == "block":
        each = workload.batch * dtype_bytes(workload.dtype)
        inputs = [("input", each * sizes.tokens * spec.model)]
        inputs += [("source", each * sizes.source * spec.source)] if spec.source else []
        return CostBreakdown.from_items(inputs)
    run = _record_saved_tensors(spec, sizes, *BACKEND_PROFILES[profile], workload.dtype)
    recomputes_core = profile == "chunked" and workload.context > QUERY_BLOCK_SIZE
    saved = run.tensors_outside_core() if recomputes_core else run.tensors_by_step()
    return CostBreakdown.from_sums((tensor.step, tensor.nbytes) for tensor in saved)


def default_profile(spec: AttentionSpec, workload: Workload) -> str:
    """Return how a layer runs in training on the device of a workload: fused if possible, else in
    blocks of queries.

    Linear attention has no separate profile; it is treated as "dense".

    >>> import headwise as hw
    >>> [
    ...     default_profile(hw.design(preset=name), hw.Workload())
    ...     for name in ("gqa", "dcmha", "linear")
    ... ]
    ['flash-cuda', 'chunked', 'dense']
    """
    signature = training_signature(spec)
    if sdpa.unsupported_reasons(signature):
        return "chunked" if linear_attention.unsupported_reasons(signature) else "dense"
    is_bf16_on_cpu = (workload.device, workload.dtype) == ("cpu", "bf16")
    if is_bf16_on_cpu and not bf16_matmul.unsupported_reasons(signature):
        return "bf16_matmul"
    return "sdpa" if workload.device in ("cpu", "m2-max") else "flash-cuda"


def training_signature(spec: AttentionSpec) -> CallSignature:
    """Return the call of a training step, by which backends are chosen."""
    core = spec.core_of(spec.projection_form(one=False))
    return CallSignature(spec, core, needs_grad=True, training=True)


def check_checkpoint_mode(checkpoint: str) -> None:
    """Raise an error for an unknown kind of activation checkpointing."""
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(
            f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}"
        )


def _record_saved_tensors(
    spec: AttentionSpec, sizes: CallSizes, backend: str, device: str, dtype: str
) -> SavedTensorRecorder:
    """Run a layer on meta tensors and record what it saves; refusals are `SpecError`."""
    try:
        return record_meta_run(spec, sizes, backend, dtype, device)
    except NoBackend as error:
        raise SpecError(f"{error}; use profile='dense'") from None
    except (RuntimeError, OverflowError, TypeError) as error:
        words = ("overflow", "too large", "int64", "convert to")
        if not any(word in str(error) for word in words):
            raise
        raise SpecError(
            f"{sizes.batch} rows of {sizes.tokens} tokens of width {spec.model} make tensors "
            "larger than torch supports; use fewer"
        ) from None
