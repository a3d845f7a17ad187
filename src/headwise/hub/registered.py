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

from ..backends.bound import as_heads, as_rows
from ..kernels import Beside, decode
from ..products import KERNELS
from .routes.interface import NAME, reading
from .watching import Seen

SINCE = (5, 3)  # before, a config could make transformers run code from the Hub (CVE-2026-4372)
MODELS = "transformers.modeling_utils"
AHEAD = "_hides_what_is_ahead"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **told: Any
) -> tuple[Tensor, Tensor | None]:
    """What each head reads, [B, T, heads, width], and the weights [B, heads, T, S] that `output_attentions` asks for.

    Weights are formed where something stands between the scores and their softmax, a cap or a sink; else torch's fused
    call is made, with the heads of a group as its rows where there is one query, or a kernel where that is faster.
    """
    seen = reading(NAME, module, (query, key, value, attention_mask), told)
    queries, keys = query.shape[2], key.shape[2]
    if seen.odd:
        raise ValueError(f'{type(module).__name__} cannot run on "{NAME}": {seen.odd}; use "eager"')
    if seen.causal and queries != keys:
        raise ValueError(f"of {queries} queries and {keys} keys is_causal does not say who is ahead; give a mask")
    dropped = told.get("dropout", 0.0) if module.training else 0.0
    if seen.cap is not None or seen.sinks is not None or told.get("output_attentions"):
        return _weighed(seen, (query, key, value), dropped)
    return _fused(seen, (query, key, value), dropped), None


def mask(*sizes: Any, **told: Any) -> Tensor | None:
    """The mask [B, 1, T, S] that an eager function is given: 0 where a pair counts, the least number where not."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    fused = sdpa_mask(*sizes, **told)
    if fused is not None:
        return _as_scores(fused, told.get("dtype", torch.float32))
    made = eager_mask(*sizes, **told)
    if made is not None and made.shape[2] in (1, made.shape[3]):
        setattr(made, AHEAD, _version(made))
    return made


def register() -> None:
    """Tell transformers of both, unless it is too old."""
    from transformers import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < SINCE:
        return
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def register_once_imported() -> None:
    """Register now if transformers' models are imported, else when they are."""
    if MODELS in sys.modules:
        register()
    elif not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())


class Waiting(MetaPathFinder):
    """Waits for transformers' models to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == MODELS else None
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Loader) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            register()

        loader.exec_module = exec_module


def _fused(seen: Seen, qkv: tuple[Tensor, Tensor, Tensor], dropped: float) -> Tensor:
    q, k, v = qkv
    each, one = q.shape[1] // k.shape[1], q.shape[2] == 1
    causal, bias = seen.causal, None
    if seen.bias is None and _only_ahead(seen.mask):
        causal = not one
    elif seen.bias is not None or seen.mask is not None:
        causal, bias = False, _bias(seen)
    if one and not dropped and _has_kernel(q):
        return _by_kernel(qkv, bias, seen.scale)
    if one and each > 1:
        if bias is not None and bias.shape[1] > 1:
            bias = as_rows(bias, each)
        o = F.scaled_dot_product_attention(as_rows(q, each), k, v, bias, dropped, scale=seen.scale)
        return o.flatten(1, 2)[:, None]
    if each > 1 and bias is not None:  # torch's fused CUDA kernels take groups or a bias, not both
        k, v, each = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), 1
    o = F.scaled_dot_product_attention(q, k, v, bias, dropped, causal, scale=seen.scale, enable_gqa=each > 1)
    return o.transpose(1, 2).contiguous()


def _has_kernel(q: Tensor) -> bool:
    """Whether a kernel of ours reads faster than torch's fused call: bfloat16 on the CPU, one query in each row."""
    return q.is_cpu and q.dtype == torch.bfloat16 and not torch.is_grad_enabled() and KERNELS


def _by_kernel(qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, scale: float) -> Tensor:
    """[B, 1, heads, width]: every row reads all keys of a page of its own."""
    q, k, v = qkv
    beside = Beside() if bias is None else Beside(bias[:, :, 0])
    return decode(q[:, :, 0], k, v, None, scale=scale, beside=beside)[0][:, None]


def _weighed(seen: Seen, qkv: tuple[Tensor, Tensor, Tensor], dropped: float) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    each = q.shape[1] // k.shape[1]
    s = as_heads(as_rows(q, each) @ k.transpose(2, 3), each)
    s = s.to(torch.promote_types(s.dtype, torch.float32)) * seen.scale
    if seen.cap is not None:
        s = seen.cap * torch.tanh(s / seen.cap)
    if seen.bias is not None or seen.mask is not None or seen.causal:
        s = s + _bias(seen)
    if seen.sinks is not None:
        s = torch.cat([s, seen.sinks.to(s).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    w_BHTS = F.dropout(s.softmax(-1)[..., : k.shape[2]].to(v.dtype), dropped)
    o_BHTV = as_heads(as_rows(w_BHTS, each) @ v, each)
    return o_BHTV.transpose(1, 2).contiguous(), w_BHTS


def _bias(seen: Seen) -> Tensor:
    """All that is added to scores, in numbers that the fused call can compute with."""
    dtype = seen.q_BTHK.dtype
    shown = seen.mask
    if seen.causal:
        shown = seen.q_BTHK.new_ones(seen.q_BTHK.shape[1], seen.k_BSGK.shape[1], dtype=torch.bool).tril()[None, None]
    if shown is not None and shown.dtype == torch.bool:
        shown = _as_scores(shown, dtype)
    told = [part for part in (seen.bias, shown) if part is not None]
    added = told[0] if len(told) == 1 else told[0] + told[1]
    # The least number of one type may be minus infinity in another, and a row of these is no row any more.
    least = torch.finfo(_computed_in(seen.q_BTHK)).min
    if least > torch.finfo(added.dtype).min:
        added = added.clamp(min=least)
    return added.to(dtype)


def _computed_in(x: Tensor) -> torch.dtype:
    """What autocast, or nobody, makes of these numbers."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _as_scores(shown: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=shown.device)
    return torch.where(shown, zero, torch.finfo(dtype).min)


def _only_ahead(shown: Tensor | None) -> bool:
    """Whether a mask was marked, and not written to since."""
    return shown is not None and getattr(shown, AHEAD, None) == _version(shown)


def _version(shown: Tensor) -> int:
    """How often it was written to, as far as anybody counts."""
    return 0 if torch.compiler.is_compiling() or shown.is_inference() else shown._version
