"""Bytes that the components of a model save for the backward pass: norms, feed-forwards, experts,
heads, attention.

For attention they come from a run on meta tensors: `SavedTensorRecorder` lists the tensors that
autograd saves in a run, each storage once; `record_meta_run` does so for a layer, as if it ran on a
CPU or on CUDA. The other components have formulas of what torch's autograd saves for them; biases
and additions save nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..attention import backends
from ..attention.attention import Attention
from ..attention.backends import bf16_matmul, linear_attention, sdpa
from ..attention.backends.core_interface import CallSignature
from ..attention.backends.query_blocks import QUERY_BLOCK_SIZE
from ..attention.interfaces import Part
from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import (
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    NormSpec,
    OutputHeadSpec,
)
from ..util.errors import NoBackend, SpecError, suggest
from .flops import TORCH_DTYPES, CostBreakdown
from .weight_storage import dtype_bytes
from .workload import Workload

NamedBytes = Iterator[tuple[str, int]]
INT64_BYTES = 8


# Number of tensors that an activation function saves besides its output.
NUM_SAVED_BY_ACTIVATION = {
    **dict.fromkeys(("gelu", "gelu_tanh", "silu", "mish", "relu6"), 1),
    **dict.fromkeys(("relu", "tanh", "sigmoid", "linear"), 0),
    "relu2": 1,  # the output of relu, which is also the input of the square
    "quick_gelu": 2,  # x sigmoid(1.7 x): both factors
}
ACTIVATIONS_SAVING_OUTPUT = ("relu", "tanh", "sigmoid")
# Gate and up before and after clamping, the sigmoid, and the two products.
NUM_BOUNDED_ACTIVATION_TENSORS = 7


def num_saved_by_activation(name: str) -> int:
    """Return how many tensors the activation function with this name saves besides its output."""
    if name not in NUM_SAVED_BY_ACTIVATION:
        fact = f"cannot tell what activation {name!r} saves for the backward pass"
        raise SpecError(f"{fact}; {suggest(name, NUM_SAVED_BY_ACTIVATION)}")
    return NUM_SAVED_BY_ACTIVATION[name]


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
        num_tensors = num_saved_by_activation(feed.activation)
        if feed.form == "gated":
            # Both factors, and their product, which is the input of the down projection.
            num_tensors += 3
        else:
            # With dropout, the input of the down projection is another tensor than the output of
            # the activation.
            saves_output = feed.activation in ACTIVATIONS_SAVING_OUTPUT
            num_tensors += 1 + (saves_output and context.has_dropout)
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
        num_tensors = num_saved_by_activation(transform.activation) + bool(head.outputs)
        # The output of the activation is usually the input of the next operation, and saved once.
        has_own_output = not transform.norm and (head.scale != 1 or not head.outputs)
        num_tensors += has_own_output and transform.activation in ACTIVATIONS_SAVING_OUTPUT
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
    source_tokens = source or workload.context
    if checkpoint == "block":
        each = workload.batch * dtype_bytes(workload.dtype)
        inputs = [("input", each * workload.context * spec.model)]
        inputs += [("source", each * source_tokens * spec.source)] if spec.source else []
        return CostBreakdown.from_items(inputs)
    run = record_meta_run(spec, workload, source_tokens, profile)
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
    return CallSignature(spec, core, grad_enabled=True, training=True)


def check_checkpoint_mode(checkpoint: str) -> None:
    """Raise an error for an unknown kind of activation checkpointing."""
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(
            f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}"
        )


BACKENDS_PREFIX = f"{backends.__name__}."


@dataclass
class SavedTensor:
    """One saved storage: the step that saved it and its bytes.

    `in_core` is true if only the attention core saved it, that is, a backend between q, k, v and
    the head outputs.
    """

    step: str
    nbytes: int
    in_core: bool = False


class SavedTensorRecorder:
    """Context manager that records what autograd saves; the `owned` tensors (parameters, buffers)
    do not count.

    >>> import headwise as hw
    >>> layer, x = hw.Attention(hw.design(model=8, heads=2), backend="dense"), torch.randn(3, 5, 8)
    >>> with SavedTensorRecorder.for_module(layer) as recorder:
    ...     y = layer(x)
    >>> recorder.total_bytes == 4 * (
    ...     5 * 3 * 5 * 8 + 2 * 3 * 2 * 5 * 5
    ... ) + 2 * 5 * 5  # x, q, k, v, o; weights, masks
    True
    """

    def __init__(self, owned: Iterable[Tensor], steps: Mapping[int, str]) -> None:
        self.saved: dict[int, SavedTensor] = {}  # by address of the storage
        # Storages with a name that is better than the step that saved them.
        self._labels: dict[int, str] = {}
        self._owned = {storage_address(tensor): tensor for tensor in owned}
        self._core_inputs: Sequence[Tensor] = ()
        self._steps = steps
        # Referenced, so that no address is reused during the recording.
        self._alive: list[Tensor] = []
        self._hooks = saved_tensors_hooks(self._record, lambda tensor: tensor)

    @staticmethod
    def for_module(net: nn.Module, spec: AttentionSpec | None = None) -> SavedTensorRecorder:
        """Create a recorder for a module; with the spec of a layer, steps are named after its
        parts.
        """
        part_names = {} if spec is None else {id(part): name for name, part in spec.parts()}
        return SavedTensorRecorder([*net.parameters(), *net.buffers()], part_names)

    def __enter__(self) -> SavedTensorRecorder:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def total_bytes(self) -> int:
        """Total bytes of the saved storages."""
        return sum(saved.nbytes for saved in self.saved.values())

    def label_storage(self, tensor: Tensor, name: str) -> None:
        """Name the storage of a tensor, in place of the step that saves it."""
        self._labels[storage_address(tensor)] = name
        self._alive.append(tensor)

    def _record(self, tensor: Tensor) -> Tensor:
        address = storage_address(tensor)
        if address in self._owned:
            return tensor
        step, in_core = self._current_step()
        if address in self.saved:
            self.saved[address].in_core &= in_core
            return tensor
        self._alive.append(tensor)
        self.saved[address] = SavedTensor(step, tensor.untyped_storage().nbytes(), in_core)
        return tensor

    def tensors_by_step(self) -> list[SavedTensor]:
        """Return the saved tensors in the order of the forward pass, with their labels as steps if
        they have one.
        """
        for address, saved in self.saved.items():
            saved.step = self._labels.get(address, saved.step)
        return list(self.saved.values())

    def tensors_outside_core(self) -> list[SavedTensor]:
        """Return what would be saved if the core were recomputed: all but the core's own tensors,
        and its inputs.
        """
        self.tensors_by_step()
        outside = {address: saved for address, saved in self.saved.items() if not saved.in_core}
        inputs = {storage_address(tensor): tensor for tensor in self._core_inputs}
        return [
            *outside.values(),
            *(
                SavedTensor("core.inputs", tensor.untyped_storage().nbytes())
                for address, tensor in inputs.items()
                if address not in outside and address not in self._owned
            ),
        ]

    def _current_step(self) -> tuple[str, bool]:
        """Find the part and method that is running in the interpreter's frames, and whether a
        backend called it.
        """
        frame = sys._getframe(2)
        owner = None
        step = ""
        in_core = False
        while frame is not None:
            instance = frame.f_locals.get("self")
            if isinstance(instance, Part) and owner in (None, id(instance)):
                owner = id(instance)
                step = f"{self._steps.get(owner, type(instance).__name__)}.{frame.f_code.co_name}"
            if frame.f_globals.get("__name__", "").startswith(BACKENDS_PREFIX):
                in_core = True
                self._core_inputs = self._core_inputs or iter_tensors(frame.f_locals.get("inputs"))
            frame = frame.f_back
        return step or ("attend" if in_core else "layer"), in_core


def storage_address(tensor: Tensor) -> int:
    """Return a number that identifies a storage, also on the meta device, where data pointers are
    0.
    """
    return tensor.untyped_storage()._cdata


def iter_tensors(value: Any) -> list[Tensor]:
    """Return every tensor in a value, which may be nested tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    items = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    )
    return list(chain.from_iterable(map(iter_tensors, items)))


# --- Running a layer on meta tensors --------------------------------------------------------------

CPU_FLASH_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def record_meta_run(
    spec: AttentionSpec, workload: Workload, source_tokens: int, profile: str
) -> SavedTensorRecorder:
    """Run a layer of this spec on meta tensors, and record what it saves in training; refusals are
    `SpecError`.

    >>> import headwise as hw
    >>> run = record_meta_run(
    ...     hw.design(model=4096, heads=32), hw.Workload(16, 32768, "bf16"), 32768, "sdpa"
    ... )
    >>> [saved.step for saved in run.tensors_by_step()]
    ['input', 'keys', 'queries', 'values', 'logsumexp', 'outputs']
    """
    backend, device = BACKEND_PROFILES[profile]
    dtype = TORCH_DTYPES[workload.dtype]
    options = {"dtype": dtype, "device": "meta", "requires_grad": True}
    try:
        with torch.device("meta"):
            layer = Attention(spec, backend=backend).to(dtype)
        x = torch.empty(workload.batch, workload.context, spec.model, **options)
        recorder = SavedTensorRecorder.for_module(layer, spec)
        recorder.label_storage(x, "input")
        source = None
        if spec.source is not None:
            source = torch.empty(workload.batch, source_tokens, spec.source, **options)
            recorder.label_storage(source, "source")
        with recorder, DeviceKernelMode(recorder, device):
            layer(x, source=source)
    except NoBackend as error:
        raise SpecError(f"{error}; use profile='dense'") from None
    except (RuntimeError, OverflowError, TypeError) as error:
        words = ("overflow", "too large", "int64", "convert to")
        if not any(word in str(error) for word in words):
            raise
        raise SpecError(
            f"{workload.batch} rows of {workload.context} tokens of width {spec.model} make "
            "tensors larger than torch supports; use fewer"
        ) from None
    return recorder


class DeviceKernelMode(TorchFunctionMode):
    """Replaces functions that run other kernels on the meta device than on the device to be
    simulated.
    """

    def __init__(self, recorder: SavedTensorRecorder, device: str) -> None:
        super().__init__()
        self.recorder = recorder
        self.is_cuda = device == "cuda"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self.is_cuda and func in _CUDA_REPLACEMENTS:
            return _CUDA_REPLACEMENTS[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        causal, scale, grouped = (
            options.get(name) for name in ("is_causal", "scale", "enable_gqa")
        )
        if not (self.is_cuda or _uses_fused_kernel((q, k, v), bias, bool(grouped))):
            return F.scaled_dot_product_attention(q, k, v, bias, **options)
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, -torch.inf).to(q.dtype)
        if self.is_cuda:
            o, lse = _FusedAttention.apply(q, k, v, bias)
        else:
            o, lse = CPU_FLASH_OP(q, k, v, 0.0, bool(causal), attn_mask=bias, scale=scale)
        labels = {"queries": q, "keys": k, "values": v, "logsumexp": lse, "outputs": o}
        labels |= {} if bias is None else {"bias": bias}
        for name, tensor in labels.items():
            self.recorder.label_storage(tensor, name)
        return o


def _uses_fused_kernel(qkv: Sequence[Tensor], bias: Tensor | None, grouped: bool) -> bool:
    """Ask torch, with CPU tensors of one token, whether it would run its fused CPU kernel."""
    small = [
        torch.zeros(1, t.shape[1], 1, t.shape[-1], dtype=t.dtype, device="cpu").requires_grad_()
        for t in qkv
    ]
    mask = None
    if bias is not None:
        mask = torch.zeros(1, 1, 1, 1, dtype=bias.dtype, device="cpu").requires_grad_(
            bias.requires_grad
        )
    return bool(
        torch.ops.aten._fused_sdp_choice(small[0], small[1], small[2], mask, enable_gqa=grouped)
    )


class _FusedAttention(torch.autograd.Function):
    """Saves what the fused kernels of CUDA save, except a few bytes of random state and the padding
    of some.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, _ = q.shape
        o = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(
            1, 2
        )  # contiguous as BTHD, as the merge reads it
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, *(() if bias is None else (bias,)), lse, o)
        ctx.mark_non_differentiable(lse)
        return o, lse


class _FusedRMSNorm(torch.autograd.Function):
    """Saves what the fused RMSNorm of CUDA saves: the input, one number per token, the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_axes: int) -> Tensor:
        scale = x.new_empty(x.shape[: x.dim() - num_axes], dtype=torch.float32)
        ctx.save_for_backward(x, scale, *(() if weight is None else (weight,)))
        return torch.empty_like(x)


# CUDA's dropout has a mask of one byte per element; the CPU's mask has the input's dtype.
_CUDA_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.rms_norm: lambda x, shape, weight=None, eps=None: _FusedRMSNorm.apply(x, weight, len(shape)),
    F.dropout: lambda x, p=0.5, training=True, inplace=False: (
        torch.native_dropout(x, p, True)[0] if training and p else x
    ),
}
