"""Adapter for transformers models that use its `AttentionInterface`, as two thirds of its model
files do.

Their forward gets a function from `AttentionInterface.get_interface`, and calls it with queries,
keys and values after position encoding; it returns the head outputs. While hooks are active, that
function is wrapped: the model's choice of function, and the mask made for it, stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import SiteModule, get_hooks, run_call_hooks
from ..method_patches import Function, SharedPatch, patch_method
from ..observed_call import AttentionInputs
from ..site import Ability
from .declarations import get_declaration
from .output_path import INTERFACE_GETTER, edit_behind_function, edit_place, projection_overrides
from .output_projection import make_site, read_head_sizes

BACKEND_NAME = "headwise"  # name of headwise's attention function in transformers
# Functions whose mask has all pairs that are hidden, so that they ignore `sliding_window` and
# packed positions.
MASK_BASED = ("eager", "sdpa", "flex_attention", BACKEND_NAME)
# Options of the function that are applied when weights are recomputed, and options that do not
# affect scores. A tensor under any other name makes the call unsupported.
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


def find_interface_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the sites of modules whose forward uses transformers' attention interface."""
    if "transformers" not in sys.modules:
        return
    for path, module in model.named_modules(remove_duplicate=False):
        declaration = get_declaration(module)
        has_declared_heads = declaration is not None and declaration.projections is None
        if uses_interface(type(module)) and not has_declared_heads:
            sizes = read_head_sizes(module)
            reason = edit_place(module).reason
            site = make_site(path, module, sizes, observe=Ability(not reason, reason))
            overrides = projection_overrides(module, sizes.num_heads)
            yield SiteModule(
                site, module, "transformers", patches=(_interface_patch(),), overrides=overrides
            )


def uses_interface(kind: type[nn.Module]) -> bool:
    """True if the forward of this class uses the attention interface."""
    code = getattr(unwrap(kind.forward), "__code__", None)
    return code is not None and INTERFACE_GETTER in code.co_names


@cache
def _interface_patch() -> SharedPatch:
    from transformers.modeling_utils import AttentionInterface

    return patch_method(AttentionInterface, INTERFACE_GETTER, _wrap_getter)


def _wrap_getter(original: Function) -> Function:
    def get_interface(self: Any, name: str | None, default: Function) -> Function:
        return partial(_call_with_hooks, original(self, name, default), str(name))

    return get_interface


def _call_with_hooks(
    function: Function, name: str, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    hooks = get_hooks(module)
    if not hooks:
        return function(module, *args, **kwargs)
    run_call_hooks(hooks, partial(inputs_of_call, name, module, args, kwargs))
    z, *rest = function(module, *args, **kwargs)
    return edit_behind_function(module, hooks, z), *rest


def inputs_of_call(
    name: str, module: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]
) -> AttentionInputs:
    """Attention inputs from the arguments of the attention function called `name`."""
    arguments = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False)) | dict(
        options
    )
    q, k, v = (arguments[side].transpose(1, 2) for side in ("query", "key", "value"))
    mask = arguments.get("attention_mask")
    scale = arguments.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sinks = arguments.get("s_aux", getattr(module, "sinks", None))
    is_causal = _is_causal_call(name, module, arguments, q.shape[1])
    unsupported = _unsupported_options(name, arguments, mask)
    if mask is None and not _is_mask_based(name):
        mask = _flash_mask(arguments, is_causal)
        is_causal = is_causal and mask is None
    return AttentionInputs(
        q,
        k,
        v,
        float(scale),
        mask,
        is_causal,
        arguments.get("position_bias"),
        arguments.get("softcap"),
        sinks if isinstance(sinks, Tensor) else None,
        unsupported,
    )


def _is_causal_call(
    name: str, module: nn.Module, arguments: Mapping[str, Any], queries: int
) -> bool:
    """Whether the function applies a causal mask on its own, as the SDPA function does without a
    mask.
    """
    if name == "eager" or arguments.get("attention_mask") is not None or queries == 1:
        return False
    is_causal = arguments.get("is_causal")
    if name == BACKEND_NAME:  # gets explicit masks, so only is_causal=True counts
        return bool(is_causal)
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _is_mask_based(name: str) -> bool:
    """True if the function gets a mask of pairs, because it is one of these or is registered with
    their mask.
    """
    from transformers.masking_utils import AttentionMaskInterface

    masks = AttentionMaskInterface()
    return name in MASK_BASED or (
        name in masks and masks[name] in [masks.get(other) for other in MASK_BASED]
    )


def _flash_mask(arguments: Mapping[str, Any], is_causal: bool) -> Tensor | None:
    """Mask [1, 1, queries, keys] of a call of FlashAttention without a mask; None if `is_causal`
    says it all.

    The last query is at the position of the last key. `sliding_window` is the number of keys up to
    the query's own, and, without causality, also from it.
    """
    query = arguments["query"]
    key = arguments["key"]
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    window = arguments.get("sliding_window") or 0
    has_window = 0 < window < num_keys
    if not has_window and (not is_causal or num_queries == num_keys):
        return None
    positions = torch.arange(num_keys, device=query.device)
    distance = positions[num_keys - num_queries :, None] - positions
    allowed = distance.abs() < window if has_window else torch.ones_like(distance, dtype=torch.bool)
    return (allowed & (distance >= 0) if is_causal else allowed)[None, None]


def _is_packed(arguments: Mapping[str, Any]) -> bool:
    """True if FlashAttention separates several texts in one row, by their lengths or by positions
    that start again.
    """
    if arguments.get("cu_seq_lens_q") is not None:
        return True
    positions = arguments.get("position_ids")
    is_one_row = (
        isinstance(positions, Tensor) and positions.dim() == 2 and len(arguments["query"]) == 1
    )
    return is_one_row and bool((torch.as_tensor(positions).diff() != 1).any())


def _unsupported_options(name: str, arguments: Mapping[str, Any], mask: object) -> str:
    unknown = [
        key
        for key, value in arguments.items()
        if key not in KNOWN_OPTIONS and isinstance(value, torch.Tensor)
    ]
    if unknown:
        return f"the layer also gets {', '.join(unknown)}"
    if arguments.get("cache") is not None:
        return "its keys and values are in the paged cache of continuous batching"
    if mask is None and not _is_mask_based(name) and _is_packed(arguments):
        return "its texts are packed into one row"
    if isinstance(mask, Tensor) and mask.dim() != 4:
        return f"its mask has {mask.dim()} axes"
    return (
        "" if mask is None or isinstance(mask, Tensor) else f"its mask is a {type(mask).__name__}"
    )
