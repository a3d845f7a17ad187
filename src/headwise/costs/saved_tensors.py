"""Record the tensors that autograd saves for the backward pass.

`SavedTensorRecorder` lists the saved tensors of a run, each storage once. `record_meta_run` does so
for a layer on meta tensors, as if it ran on a CPU or on CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..attention import backends
from ..attention.attention import Attention
from ..attention.interfaces import Part
from ..attention.spec.attention_spec import AttentionSpec
from .flops import TORCH_DTYPES

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
        self._labels: dict[
            int, str
        ] = {}  # storages with a name that is better than the step that saved them
        self._owned = {storage_address(tensor): tensor for tensor in owned}
        self._core_inputs: Sequence[Tensor] = ()
        self._steps = steps
        self._alive: list[
            Tensor
        ] = []  # referenced, so that no address is reused during the recording
        self._hooks = saved_tensors_hooks(self._record, _identity)

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


def _identity(tensor: Tensor) -> Tensor:
    return tensor


# --- Running a layer on meta tensors --------------------------------------------------------------

CPU_FLASH_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CallSizes(NamedTuple):
    """Batch size, tokens per row, and tokens of the source (the same number in self-attention)."""

    batch: int
    tokens: int
    source: int


def record_meta_run(
    spec: AttentionSpec, sizes: CallSizes, backend: str, dtype: str, device: str = "cpu"
) -> SavedTensorRecorder:
    """Run a layer of this spec on meta tensors of these sizes, and record what it saves in
    training.

    >>> import headwise as hw
    >>> run = record_meta_run(
    ...     hw.design(model=4096, heads=32), CallSizes(16, 32768, 32768), "sdpa", "bf16"
    ... )
    >>> [saved.step for saved in run.tensors_by_step()]
    ['input', 'keys', 'queries', 'values', 'logsumexp', 'outputs']
    """
    with torch.device("meta"):
        layer = Attention(spec, backend=backend).to(TORCH_DTYPES[dtype])
    options = {"dtype": TORCH_DTYPES[dtype], "device": "meta", "requires_grad": True}
    x = torch.empty(sizes.batch, sizes.tokens, spec.model, **options)
    source = (
        None
        if spec.source is None
        else torch.empty(sizes.batch, sizes.source, spec.source, **options)
    )
    recorder = SavedTensorRecorder.for_module(layer, spec)
    recorder.label_storage(x, "input")
    if source is not None:
        recorder.label_storage(source, "source")
    kernels = DeviceKernelMode(recorder, device)
    with recorder, kernels:
        layer(x, source=source)
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


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return cast(Tensor, _FusedRMSNorm.apply(x, weight, len(shape)))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA's dropout, with a mask of one byte per element; the CPU's mask has the input's dtype."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


_CUDA_REPLACEMENTS: dict[Any, Callable[..., Any]] = {F.rms_norm: _rms_norm, F.dropout: _dropout}
