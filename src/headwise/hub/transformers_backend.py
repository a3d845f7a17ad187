"""Register headwise as an attention implementation of transformers, with its mask function.

Importing `headwise.hub` registers both, immediately if transformers is imported already, else when
it is imported; it never imports transformers itself. `model.set_attn_implementation("headwise")`
then selects them.

Masks are explicit, as for transformers' eager functions. So None always means no mask, fully masked
rows behave as in eager attention, and models that do not use the interface, or compare the
implementation's name, are as correct as with eager. Purely causal masks carry a mark and are not
read, because the fused call has `is_causal`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.backends.core_interface import heads_to_rows, rows_to_heads
from ..kernels import PagedDecodeOptions, attend_paged
from ..kernels.launch import has_kernels
from ..observe.inspect.adapters.known_interfaces import BACKEND_NAME, inputs_of_call
from ..observe.inspect.site import AttentionInputs

MIN_TRANSFORMERS = (
    5,
    3,
)  # before, a config could make transformers run code from the Hub (CVE-2026-4372)
MODELS_MODULE = "transformers.modeling_utils"
# from here on, float32 rounds scores so much that gradients of fused attention are off by 1e-5
LARGE_BIAS = 100
CAUSAL_MARK = "_hides_what_is_ahead"
EVERY_QUERY_MARK = "_gives_every_query_a_key"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers: head outputs [B, T, heads, head_dim], and weights if
    `output_attentions`.

    Computes the weights [B, heads, T, S] explicitly with a soft cap or sinks; else calls torch's
    fused function, with the heads of a KV group as rows if there is a single query, or a headwise
    kernel where that is faster.
    """
    inputs = inputs_of_call(BACKEND_NAME, module, (query, key, value, attention_mask), options)
    queries = query.shape[2]
    keys = key.shape[2]
    if inputs.unsupported:
        raise ValueError(
            f'{type(module).__name__} cannot run on "{BACKEND_NAME}": {inputs.unsupported}; use '
            '"eager"'
        )
    if inputs.causal and queries != keys:
        raise ValueError(
            f"is_causal is ambiguous for {queries} queries and {keys} keys; give a mask"
        )
    dropout = options.get("dropout", 0.0) if module.training else 0.0
    if inputs.softcap is not None or inputs.sinks is not None or options.get("output_attentions"):
        return _attend_with_weights(inputs, (query, key, value), dropout)
    return _attend_sdpa(inputs, (query, key, value), dropout), None


def make_mask(*sizes: Any, **options: Any) -> Tensor | None:
    """Make the mask for transformers: [B, 1, T, S] as for eager attention, 0 or the minimum of the
    dtype.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    boolean_mask = sdpa_mask(*sizes, **options)
    if boolean_mask is not None:
        return _mask_to_bias(boolean_mask, options.get("dtype", torch.float32))
    mask = eager_mask(*sizes, **options)
    if mask is not None and mask.shape[2] in (1, mask.shape[3]):
        setattr(mask, CAUSAL_MARK, _tensor_version(mask))
    return mask


def register_backend() -> None:
    """Register attention and mask function with transformers, unless it is too old."""
    from transformers import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < MIN_TRANSFORMERS:
        return
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(BACKEND_NAME, attention_forward)
    AttentionMaskInterface.register(BACKEND_NAME, make_mask)


class ImportHook(MetaPathFinder):
    """Import hook that calls `register` once, after `module` was imported."""

    def __init__(self, module: str, register: Callable[[], None]) -> None:
        self.module = module
        self.register = register

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self.module else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                self.register()

            spec.loader.exec_module = exec_module
        return spec


def register_after_import(module: str, register: Callable[[], None]) -> None:
    """Register now if the module is imported already, else when it is imported."""
    hooks = [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]
    if module in sys.modules:
        register()
    elif all(hook.module != module for hook in hooks):
        sys.meta_path.insert(0, ImportHook(module, register))


def _attend_sdpa(
    inputs: AttentionInputs, qkv: tuple[Tensor, Tensor, Tensor], dropout: float
) -> Tensor:
    q, k, v = qkv
    group_size = q.shape[1] // k.shape[1]
    is_single_query = q.shape[2] == 1
    causal = inputs.causal
    bias = None
    uniform_rows = None
    mask = inputs.mask
    if inputs.bias is None and mask is not None and _has_mark(mask, CAUSAL_MARK):
        causal = not is_single_query
    elif inputs.bias is not None or inputs.mask is not None:
        causal = False
        bias = _score_bias(inputs)
    is_fast = is_single_query and not dropout and q.is_cpu and q.dtype == torch.bfloat16
    if is_fast and not torch.is_grad_enabled() and has_kernels():  # one page per row
        options = PagedDecodeOptions() if bias is None else PagedDecodeOptions(bias[:, :, 0])
        o = attend_paged(q[:, :, 0], k, v, None, scale=inputs.scale, options=options)[0]
        return o[:, None]
    if bias is not None and torch.is_grad_enabled() and not _gives_every_query_a_key(inputs, bias):
        bias, uniform_rows = _split_masked_rows(bias)
    if uniform_rows is not None and dropout:
        return _attend_with_weights(inputs, qkv, dropout)[0]
    if is_single_query and group_size > 1:
        if bias is not None and bias.shape[1] > 1:
            bias = heads_to_rows(bias, group_size)
        o = F.scaled_dot_product_attention(
            heads_to_rows(q, group_size), k, v, bias, dropout, scale=inputs.scale
        )
        o = rows_to_heads(o, group_size)
    else:
        repeats = (
            1 if bias is None else group_size
        )  # torch's fused CUDA kernels take groups or a bias, not both
        if repeats > 1:
            k = k.repeat_interleave(repeats, 1)
            v = v.repeat_interleave(repeats, 1)
        has_groups = group_size > repeats
        o = F.scaled_dot_product_attention(
            q, k, v, bias, dropout, causal, scale=inputs.scale, enable_gqa=has_groups
        )
    if uniform_rows is not None:
        o = torch.where(uniform_rows, _attend_uniformly(qkv, inputs.scale).to(o.dtype), o)
    return o.transpose(1, 2).contiguous()


def _gives_every_query_a_key(inputs: AttentionInputs, bias: Tensor) -> bool:
    """True if the largest bias of every row is small, so that no row is fully masked; False in a
    compiled call, which cannot read it.

    A mask that is the whole bias is read once, and marked for the next layers, because a GPU waits
    for each reading.
    """
    if torch.compiler.is_compiling():
        return False
    mask = inputs.mask if inputs.bias is None else None
    if mask is not None and mask.is_inference():  # changes of such tensors are not counted
        mask = None
    if mask is not None and _has_mark(mask, EVERY_QUERY_MARK):
        return True
    is_small = bool((bias.detach().amax(-1).abs() < LARGE_BIAS).all())
    if is_small and mask is not None:
        setattr(mask, EVERY_QUERY_MARK, _tensor_version(mask))
    return is_small


def _split_masked_rows(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bias with the same softmax, and the rows [B, H or 1, T, 1] with equal weights.

    The backward pass of fused attention recomputes each weight as exp(score - lse). If the largest
    score of a row is -1e9, its log-sum-exp is rounded to that score, and every weight becomes 1. So
    the largest bias of each row is subtracted. Below `-64 / eps` a bias rounds all scores to
    itself, and eager attention has equal weights.
    """
    top = bias.detach().amax(-1, keepdim=True)
    eps = torch.finfo(torch.promote_types(bias.dtype, torch.float32)).eps
    uniform_rows = (top <= -64 / eps) & (top > -torch.inf)
    return bias - top.clamp(min=torch.finfo(bias.dtype).min), uniform_rows


def _attend_uniformly(qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """Return the mean value for each query, [B, heads, T, V], with the gradients of a softmax of
    equal scores.

    Query and key gradients use the first-order expansion of the softmax, which needs no scores in
    memory: o = mean(v) + scale * q (k^T (v - mean(v))) / S.
    """
    q, k, v = qkv
    group_size = q.shape[1] // k.shape[1]
    mean = v.mean(2, keepdim=True)
    slopes = k.transpose(2, 3) @ (v - mean).detach() * (scale / k.shape[2])
    change = rows_to_heads(heads_to_rows(q, group_size) @ slopes, group_size)
    return mean.repeat_interleave(group_size, 1) + (change - change.detach())


def _attend_with_weights(
    inputs: AttentionInputs, qkv: tuple[Tensor, Tensor, Tensor], dropout: float
) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    group_size = q.shape[1] // k.shape[1]
    scores = rows_to_heads(heads_to_rows(q, group_size) @ k.transpose(2, 3), group_size)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.bias is not None or inputs.mask is not None or inputs.causal:
        scores = scores + _score_bias(inputs)
    if inputs.sinks is not None:
        scores = torch.cat(
            [scores, inputs.sinks.to(scores).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1
        )
    w_BHTS = F.dropout(scores.softmax(-1)[..., : k.shape[2]].to(v.dtype), dropout)
    o_BHTV = rows_to_heads(heads_to_rows(w_BHTS, group_size) @ v, group_size)
    return o_BHTV.transpose(1, 2).contiguous(), w_BHTS


def _score_bias(inputs: AttentionInputs) -> Tensor:
    """Combine mask and bias into one tensor to add to scores, in the dtype of the queries."""
    dtype = inputs.q_BTHK.dtype
    mask = inputs.mask
    if inputs.causal:
        mask = inputs.q_BTHK.new_ones(
            inputs.q_BTHK.shape[1], inputs.k_BSGK.shape[1], dtype=torch.bool
        ).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = _mask_to_bias(mask, dtype)
    parts = [part for part in (inputs.bias, mask) if part is not None]
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    # The minimum of one dtype can become -inf in a narrower one, and a row of -inf gives NaN.
    minimum = torch.finfo(_compute_dtype(inputs.q_BTHK)).min
    if minimum > torch.finfo(total.dtype).min:
        total = total.clamp(min=minimum)
    return total.to(dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the autocast dtype, or else the dtype of `x`."""
    device_type = x.device.type
    return (
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    )


def _mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _has_mark(mask: Tensor, mark: str) -> bool:
    """True if a mask carries this mark and was not modified since."""
    return getattr(mask, mark, None) == _tensor_version(mask)


def _tensor_version(tensor: Tensor) -> int:
    """Return the version counter of a tensor; 0 if torch has none (compiling, inference mode)."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version
