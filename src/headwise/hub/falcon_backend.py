"""Register "headwise" with Falcon, whose attention in transformers does not use the attention interface.

Falcon chooses its attention by a table of classes when a model is built, and by the config in each forward call. The
table gets an entry, and `FalconAttention.forward` runs headwise's attention function while the config says "headwise".
Keys and values stay those of the key-value heads: transformers repeats them for all query heads of the new
architecture, also in its cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..inspect.adapters.transformers_interface import BACKEND_NAME
from ..inspect.hooks import has_hooks
from .transformers_backend import ModuleImportHook, attention_forward

FALCON_MODULE = "transformers.models.falcon.modeling_falcon"
DYNAMIC_IMPLEMENTATIONS = ("eager", "sdpa", BACKEND_NAME)  # those that one class of Falcon's attention can run


class FalconImportHook(ModuleImportHook):
    """Import hook that registers the backend when the models of Falcon are imported."""

    @property
    def module(self) -> str:
        return FALCON_MODULE

    def register(self) -> None:
        register_falcon()


def register_falcon_on_import() -> None:
    """Register with Falcon now if its models are imported already, else when they are imported."""
    if FALCON_MODULE in sys.modules:
        register_falcon()
    elif not any(isinstance(finder, FalconImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, FalconImportHook())


def register_falcon() -> None:
    """Let Falcon's models be built with, and set to, the implementation "headwise"; a second call changes nothing."""
    falcon: Any = sys.modules[FALCON_MODULE]
    if BACKEND_NAME in falcon.FALCON_ATTENTION_CLASSES:
        return
    falcon.FALCON_ATTENTION_CLASSES[BACKEND_NAME] = falcon.FalconAttention
    falcon.FalconAttention.forward = _wrap_forward(falcon.FalconAttention.forward, falcon.apply_rotary_pos_emb)
    setter = falcon.FalconPreTrainedModel.set_attn_implementation
    falcon.FalconPreTrainedModel.set_attn_implementation = _wrap_setter(setter)


def _wrap_setter(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def set_attn_implementation(self: Any, attn_implementation: Any, **options: Any) -> None:
        current = self.config._attn_implementation
        if BACKEND_NAME in (attn_implementation, current) and attn_implementation in DYNAMIC_IMPLEMENTATIONS:
            self.config._attn_implementation_internal = attn_implementation
        else:
            original(self, attn_implementation, **options)

    return set_attn_implementation


def _wrap_forward(original: Callable[..., Any], rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    call_signature = signature(original)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation != BACKEND_NAME:
            return original(self, *args, **kwargs)
        call = call_signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        return _attend(self, rotate, call.arguments)

    return forward


def _attend(
    module: Any, rotate: Callable[..., tuple[Tensor, Tensor]], arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Forward of FalconAttention; the mask contains the position biases of `alibi` already."""
    alibi, attention_mask = arguments["alibi"], arguments["attention_mask"]
    q, k, v = _split_heads(module, module.query_key_value(arguments["hidden_states"]))
    if alibi is None:
        q, k = rotate(q, k, *arguments["position_embeddings"])
    if arguments["layer_past"] is not None:
        k, v = arguments["layer_past"].update(k, v, module.layer_idx)
    dropout = module.attention_dropout.p if alibi is not None and module.training else 0.0
    if has_hooks():  # the functions that sites trace, with all heads
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = (q @ k.transpose(2, 3) * module.inv_norm_factor).float()
        weights = F.softmax(scores if attention_mask is None else scores + attention_mask, dim=-1).to(v.dtype)
        o = (F.dropout(weights, dropout) @ v).transpose(1, 2)
    else:
        options = {"scaling": module.inv_norm_factor, "dropout": dropout, "is_causal": False}
        options["output_attentions"] = arguments["output_attentions"]
        o, weights = attention_forward(module, q, k, v, attention_mask, **options)
    return module.dense(o.flatten(2)), weights


def _split_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, heads, T, dim], keys and values [B, kv_heads, T, dim] of a fused projection.

    The rows lie by key-value head: its query heads, its key and its value. With one key-value head, or one for each
    query head, this is the order of the older architectures.
    """
    kv_heads = module.num_kv_heads
    group = module.num_heads // kv_heads
    rows = fused.unflatten(-1, (kv_heads, group + 2, module.head_dim))  # [B, T, kv_heads, group + 2, dim]
    q, k, v = rows[..., :group, :].flatten(2, 3), rows[..., group, :], rows[..., group + 1, :]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
