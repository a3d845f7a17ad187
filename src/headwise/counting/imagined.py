"""A layer that runs without memory or numbers, and what autograd would keep of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..module import Attention
from ..spec import AttentionSpec
from .watching import SavedTensor, SavedTensorRecorder

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_FLASH_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CallSizes(NamedTuple):
    """Rows, tokens of a row, and tokens of a source, which are those of the row when it reads itself."""

    batch: int
    tokens: int
    source: int


class SavedTensorRun(NamedTuple):
    """What a run keeps, in order, and without the core's own; and whether a fused kernel read the values."""

    saved: Sequence[SavedTensor]
    outside_core: Sequence[SavedTensor]
    is_fused: bool


def record_meta_run(spec: AttentionSpec, sizes: CallSizes, backend: str, dtype: str, device: str = "cpu") -> SavedTensorRun:
    """A layer of this spec in training on tensors of these sizes, of which only the shapes are there.

    >>> import headwise as hw
    >>> told = record_meta_run(hw.design(model=4096, heads=32), CallSizes(16, 32768, 32768), "sdpa", "bf16")
    >>> [saved.step for saved in told.kept]
    ['input', 'keys', 'queries', 'values', 'logsumexp', 'read']
    """
    with torch.device("meta"):
        layer = Attention(spec, backend=backend).to(TORCH_DTYPES[dtype])
    like = {"dtype": TORCH_DTYPES[dtype], "device": "meta", "requires_grad": True}
    x = torch.empty(sizes.batch, sizes.tokens, spec.model, **like)
    z = None if spec.source is None else torch.empty(sizes.batch, sizes.source, spec.source, **like)
    watch = SavedTensorRecorder.for_module(layer, spec)
    watch.label_storage(x, "input")
    if z is not None:
        watch.label_storage(z, "source")
    kernels = DeviceKernelMode(watch, device)
    with watch, kernels:
        layer(x, source=z)
    return SavedTensorRun(watch.tensors_by_step(), watch.tensors_outside_core(), kernels.fused)


class DeviceKernelMode(TorchFunctionMode):
    """Runs what a device would run where tensors without memory do something else."""

    def __init__(self, watch: SavedTensorRecorder, device: str) -> None:
        super().__init__()
        self.watch, self.cuda, self.fused = watch, device == "cuda", False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self.cuda and func in _ON_CUDA:
            return _ON_CUDA[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        causal, scale, grouped = (how.get(name) for name in ("is_causal", "scale", "enable_gqa"))
        if not (self.cuda or _uses_fused_kernel((q, k, v), bias, bool(grouped))):
            return F.scaled_dot_product_attention(q, k, v, bias, **how)
        self.fused = True
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, -torch.inf).to(q.dtype)
        if self.cuda:
            o, lse = _FusedAttention.apply(q, k, v, bias)
        else:
            o, lse = CPU_FLASH_OP(q, k, v, 0.0, bool(causal), attn_mask=bias, scale=scale)
        named = {"queries": q, "keys": k, "values": v, "logsumexp": lse, "read": o}
        named |= {} if bias is None else {"bias": bias}
        for name, tensor in named.items():
            self.watch.label_storage(tensor, name)
        return o


def _uses_fused_kernel(qkv: Sequence[Tensor], bias: Tensor | None, grouped: bool) -> bool:
    """Whether torch would take the fused kernel of the CPU: asked of torch, about tensors of one token."""
    few = [torch.zeros(1, t.shape[1], 1, t.shape[-1], dtype=t.dtype, device="cpu") for t in qkv]
    few = [t.requires_grad_() for t in few]
    mask = None
    if bias is not None:
        mask = torch.zeros(1, 1, 1, 1, dtype=bias.dtype, device="cpu").requires_grad_(bias.requires_grad)
    return bool(torch.ops.aten._fused_sdp_choice(few[0], few[1], few[2], mask, enable_gqa=grouped))


class _FusedAttention(torch.autograd.Function):
    """What the fused kernels of CUDA keep, but for a few bytes of random state and the padding of some."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, _ = q.shape
        o = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)  # token by token, as the merge reads it
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, *(() if bias is None else (bias,)), lse, o)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("nothing without numbers goes back")


class _FusedRMSNorm(torch.autograd.Function):
    """What the fused RMSNorm of CUDA keeps: the input, one number a row, the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, over: int) -> Tensor:
        scale = x.new_empty(x.shape[: x.dim() - over], dtype=torch.float32)
        ctx.save_for_backward(x, scale, *(() if weight is None else (weight,)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("nothing without numbers goes back")


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _FusedRMSNorm.apply(x, weight, len(shape))  # pyright: ignore[reportReturnType] - of a Function pyright knows no more


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One byte for each element, where the CPU keeps one element for each."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


_ON_CUDA: dict[Any, Callable[..., Any]] = {F.rms_norm: _rms_norm, F.dropout: _dropout}
