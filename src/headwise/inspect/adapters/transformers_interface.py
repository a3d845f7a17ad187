"""Attentions of transformers that go through its interface: two thirds of its model files do.

Their forward asks `AttentionInterface.get_interface` for a function, and calls it with queries, keys and values after
positions; what it returns is what each head read. While somebody watches, what is asked for comes wrapped: the model's
own choice of function, and the mask made for it, stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import (
    AttentionInputs,
    MethodPatch,
    SharedPatch,
    SiteAdapter,
    SiteModule,
    get_hooks,
    has_hooks,
    run_output_hooks,
)
from .module_attributes import make_site, read_head_sizes

INTERFACE_GETTER = "get_interface"
BACKEND_NAME = "headwise"  # under which transformers knows our own function
# What the function is told besides, and what that does to the scores; anything else is beyond what is computed again.
SUPPORTED_OPTIONS = frozenset(
    {"dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias"}
)
IGNORED_OPTIONS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "output_attentions",
        "use_cache",
        "cache_position",
        "deterministic",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "position_embeddings",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "past_key_values",
        "logits_to_keep",
        "token_type_ids",
    }
)
KNOWN_OPTIONS = {"query", "key", "value"} | SUPPORTED_OPTIONS | IGNORED_OPTIONS


class TransformersAdapter(SiteAdapter):
    """Modules whose forward asks the interface."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        if "transformers" not in sys.modules:
            return
        for path, module in model.named_modules(remove_duplicate=False):
            if uses_interface(type(module)):
                yield SiteModule(make_site(path, module, read_head_sizes(module)), module, self)

    def patches(self) -> list[SharedPatch]:
        return [_interface_patch()]

    def visible_tensors(self, module: nn.Module) -> str:
        return "scores"


def uses_interface(kind: type[nn.Module]) -> bool:
    """Whether the forward of this class asks the interface for a function."""
    code = getattr(unwrap(kind.forward), "__code__", None)
    return code is not None and INTERFACE_GETTER in code.co_names


_INTERFACE_PATCHES: list[MethodPatch] = []


def _interface_patch() -> MethodPatch:
    if not _INTERFACE_PATCHES:
        from transformers.modeling_utils import AttentionInterface

        _INTERFACE_PATCHES.append(MethodPatch(AttentionInterface, INTERFACE_GETTER, _wrap_getter))
    return _INTERFACE_PATCHES[0]


def _wrap_getter(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, name, default)
        return partial(_call_with_hooks, function, str(name)) if has_hooks() else function

    return get_interface


def _call_with_hooks(function: Callable[..., Any], name: str, module: nn.Module, *said: Any, **more: Any) -> Any:
    those = get_hooks(module)
    if not those:
        return function(module, *said, **more)
    if seers := [watcher for watcher in those if watcher.needs_call]:
        seen = inputs_of_call(name, module, said, more)
        for watcher in seers:
            watcher.on_call(seen)
    z, *rest = function(module, *said, **more)
    return run_output_hooks(those, z), *rest


def inputs_of_call(name: str, module: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> AttentionInputs:
    """What a call of the function of this name asks for."""
    told = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False)) | dict(options)
    q, k, v = (told[side].transpose(1, 2) for side in ("query", "key", "value"))
    mask = told.get("attention_mask")
    scale = told.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sinks = told.get("s_aux", getattr(module, "sinks", None))
    return AttentionInputs(
        q,
        k,
        v,
        float(scale),
        mask,
        _is_causal_call(name, module, told, q.shape[1]),
        told.get("position_bias"),
        told.get("softcap"),
        sinks if isinstance(sinks, Tensor) else None,
        _unsupported_options(name, told, mask),
    )


def _is_causal_call(name: str, module: nn.Module, told: Mapping[str, Any], queries: int) -> bool:
    """Whether the function takes causality as understood, as torch's fused one does without a mask."""
    if name == "eager" or told.get("attention_mask") is not None or queries == 1:
        return False
    said = told.get("is_causal")
    if name == BACKEND_NAME:  # every mask made for it is written out, so that only who asks for causality means it
        return bool(said)
    return bool(getattr(module, "is_causal", True) if said is None else said)


def _unsupported_options(name: str, told: Mapping[str, Any], mask: object) -> str:
    if strange := [key for key, value in told.items() if key not in KNOWN_OPTIONS and isinstance(value, torch.Tensor)]:
        return f"the layer is also told {', '.join(strange)}"
    if isinstance(mask, Tensor) and mask.dim() != 4:
        return f"its mask has {mask.dim()} axes"
    return "" if mask is None or isinstance(mask, Tensor) else f"its mask is a {type(mask).__name__}"
