"""transformers' models on headwise: an attention and its masks, which transformers knows under the name "headwise".

Importing `headwise.hub` registers both, at once where transformers is imported already, else as soon as it is; it never
imports transformers itself. Then `model.set_attn_implementation("headwise")` takes them.

A mask is what transformers' eager functions would be given, written out. So None hides nothing, whoever is asked; rows
that may read nothing read what eager rows read; and a model that does not ask the interface, or goes by the name of the
function it runs on, is as right as it is with eager. A mask that hides nothing but what is ahead carries a mark, and is
then not read: the fused call knows it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.core_interface import heads_to_rows, rows_to_heads
from ..inspect.adapters.transformers_interface import BACKEND_NAME, inputs_of_call
from ..inspect.hooks import AttentionInputs
from ..kernels import PagedDecodeOptions, attend_paged
from ..ops.linear import HAS_NUMBA

MIN_TRANSFORMERS = (5, 3)  # before, a config could make transformers run code from the Hub (CVE-2026-4372)
MODELS_MODULE = "transformers.modeling_utils"
CAUSAL_MARK = "_hides_what_is_ahead"


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **told: Any
) -> tuple[Tensor, Tensor | None]:
    """What each head reads, [B, T, heads, width], and the weights [B, heads, T, S] that `output_attentions` asks for.

    Weights are formed where something stands between the scores and their softmax, a cap or a sink; else torch's fused
    call is made, with the heads of a group as its rows where there is one query, or a kernel where that is faster.
    """
    seen = inputs_of_call(BACKEND_NAME, module, (query, key, value, attention_mask), told)
    queries, keys = query.shape[2], key.shape[2]
    if seen.unsupported:
        raise ValueError(f'{type(module).__name__} cannot run on "{BACKEND_NAME}": {seen.unsupported}; use "eager"')
    if seen.causal and queries != keys:
        raise ValueError(f"of {queries} queries and {keys} keys is_causal does not say who is ahead; give a mask")
    dropped = told.get("dropout", 0.0) if module.training else 0.0
    if seen.softcap is not None or seen.sinks is not None or told.get("output_attentions"):
        return _attend_with_weights(seen, (query, key, value), dropped)
    return _attend_sdpa(seen, (query, key, value), dropped), None


def make_mask(*sizes: Any, **told: Any) -> Tensor | None:
    """The mask [B, 1, T, S] that an eager function is given: 0 where a pair counts, the least number where not."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    fused = sdpa_mask(*sizes, **told)
    if fused is not None:
        return _mask_to_bias(fused, told.get("dtype", torch.float32))
    made = eager_mask(*sizes, **told)
    if made is not None and made.shape[2] in (1, made.shape[3]):
        setattr(made, CAUSAL_MARK, _tensor_version(made))
    return made


def register_backend() -> None:
    """Tell transformers of both, unless it is too old."""
    from transformers import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < MIN_TRANSFORMERS:
        return
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(BACKEND_NAME, attention_forward)
    AttentionMaskInterface.register(BACKEND_NAME, make_mask)


def register_on_import() -> None:
    """Register now if transformers' models are imported, else when they are."""
    if MODELS_MODULE in sys.modules:
        register_backend()
    elif not any(isinstance(finder, TransformersImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, TransformersImportHook())


class TransformersImportHook(MetaPathFinder):
    """Waits for transformers' models to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == MODELS_MODULE else None
        if spec is not None and spec.loader is not None:
            self._register_after(spec.loader)
        return spec

    def _register_after(self, loader: Loader) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            register_backend()

        loader.exec_module = exec_module


def _attend_sdpa(seen: AttentionInputs, qkv: tuple[Tensor, Tensor, Tensor], dropped: float) -> Tensor:
    q, k, v = qkv
    each, one = q.shape[1] // k.shape[1], q.shape[2] == 1
    causal, bias = seen.causal, None
    if seen.bias is None and _is_causal_mask(seen.mask):
        causal = not one
    elif seen.bias is not None or seen.mask is not None:
        causal, bias = False, _score_bias(seen)
    if one and not dropped and _can_use_kernel(q):
        return _attend_kernel(qkv, bias, seen.scale)
    if one and each > 1:
        if bias is not None and bias.shape[1] > 1:
            bias = heads_to_rows(bias, each)
        o = F.scaled_dot_product_attention(heads_to_rows(q, each), k, v, bias, dropped, scale=seen.scale)
        return o.flatten(1, 2)[:, None]
    if each > 1 and bias is not None:  # torch's fused CUDA kernels take groups or a bias, not both
        k, v, each = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), 1
    o = F.scaled_dot_product_attention(q, k, v, bias, dropped, causal, scale=seen.scale, enable_gqa=each > 1)
    return o.transpose(1, 2).contiguous()


def _can_use_kernel(q: Tensor) -> bool:
    """Whether a kernel of ours reads faster than torch's fused call: bfloat16 on the CPU, one query in each row."""
    return q.is_cpu and q.dtype == torch.bfloat16 and not torch.is_grad_enabled() and HAS_NUMBA


def _attend_kernel(qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, scale: float) -> Tensor:
    """[B, 1, heads, width]: every row reads all keys of a page of its own."""
    q, k, v = qkv
    beside = PagedDecodeOptions() if bias is None else PagedDecodeOptions(bias[:, :, 0])
    return attend_paged(q[:, :, 0], k, v, None, scale=scale, options=beside)[0][:, None]


def _attend_with_weights(
    seen: AttentionInputs, qkv: tuple[Tensor, Tensor, Tensor], dropped: float
) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    each = q.shape[1] // k.shape[1]
    s = rows_to_heads(heads_to_rows(q, each) @ k.transpose(2, 3), each)
    s = s.to(torch.promote_types(s.dtype, torch.float32)) * seen.scale
    if seen.softcap is not None:
        s = seen.softcap * torch.tanh(s / seen.softcap)
    if seen.bias is not None or seen.mask is not None or seen.causal:
        s = s + _score_bias(seen)
    if seen.sinks is not None:
        s = torch.cat([s, seen.sinks.to(s).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    w_BHTS = F.dropout(s.softmax(-1)[..., : k.shape[2]].to(v.dtype), dropped)
    o_BHTV = rows_to_heads(heads_to_rows(w_BHTS, each) @ v, each)
    return o_BHTV.transpose(1, 2).contiguous(), w_BHTS


def _score_bias(seen: AttentionInputs) -> Tensor:
    """All that is added to scores, in numbers that the fused call can compute with."""
    dtype = seen.q_BTHK.dtype
    shown = seen.mask
    if seen.causal:
        shown = seen.q_BTHK.new_ones(seen.q_BTHK.shape[1], seen.k_BSGK.shape[1], dtype=torch.bool).tril()[None, None]
    if shown is not None and shown.dtype == torch.bool:
        shown = _mask_to_bias(shown, dtype)
    told = [part for part in (seen.bias, shown) if part is not None]
    added = told[0] if len(told) == 1 else told[0] + told[1]
    # The least number of one type may be minus infinity in another, and a row of these is no row any more.
    least = torch.finfo(_compute_dtype(seen.q_BTHK)).min
    if least > torch.finfo(added.dtype).min:
        added = added.clamp(min=least)
    return added.to(dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What autocast, or nobody, makes of these numbers."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _mask_to_bias(shown: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=shown.device)
    return torch.where(shown, zero, torch.finfo(dtype).min)


def _is_causal_mask(shown: Tensor | None) -> bool:
    """Whether a mask was marked, and not written to since."""
    return shown is not None and getattr(shown, CAUSAL_MARK, None) == _tensor_version(shown)


def _tensor_version(shown: Tensor) -> int:
    """How often it was written to, as far as anybody counts."""
    return 0 if torch.compiler.is_compiling() or shown.is_inference() else shown._version
