"""What stands in the way of looking at an attention, of changing it, and of making it smaller: each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from ..site import Ability, Site
from .routes.base import SiteModule

PACKED_WEIGHT_NAMES = ("qweight", "qzeros", "weight_packed", "w_bit")  # what quantised layers keep in the place of a weight


def unhookable_reason(model: nn.Module, parts: Sequence[nn.Module]) -> str:
    """Why these parts of a model cannot be watched; nothing if they can."""
    if isinstance(model, nn.DataParallel):
        return "its replicas run in threads of their own; give model.module"
    if _is_compiled(model):
        return "it is compiled, and what was compiled cannot be watched; give the model as it was before"
    if any(tensor.is_meta for part in parts for tensor in part.parameters()):
        return "its weights are on the meta device, where nothing is computed; load them"
    return ""


def mark_unhookable(model: nn.Module, sites: Sequence[SiteModule]) -> Iterator[SiteModule]:
    """The same, where something stands in the way with the reason."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for one in sites:
        site, parts = one.site, [modules[one.site.path], one.module]
        if why := unhookable_reason(model, parts):
            no = Ability(False, why)
            site = replace(site, see=no if site.see.can else site.see, silence=no if site.silence.can else site.silence)
        if why := unprunable_reason(parts):
            site = replace(site, cut=Ability(False, why), share=Ability(False, why))
        yield one._replace(site=site)


def unprunable_reason(parts: Sequence[nn.Module]) -> str:
    """Why an attention cannot be made smaller as it is; nothing if it could be."""
    for module in chain.from_iterable(part.modules() for part in parts):
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            return "its weights have an adapter beside them (LoRA); merge it first"
        if any(type(tensor.data).__name__ == "DTensor" for tensor in module.parameters(recurse=False)):
            return "its weights are spread over several processes; cut the model before it is spread"
        if kind := _find_packed_weights(module):
            return f"its weights are quantised ({kind}); cut the model that was quantised, then quantise it again"
        if getattr(module, "is_kv_shared_layer", False):
            return "it reads the keys and values of another layer"
        if getattr(module, "store_full_length_kv", False):
            return "other layers read its keys and values"
    return ""


def _find_packed_weights(module: nn.Module) -> str:
    """What a module keeps in the place of floating-point weights; nothing if it keeps those."""
    if any(part in ("quantized", "bitsandbytes", "torchao") for part in type(module).__module__.split(".")):
        return type(module).__name__
    packed = [tensor for name, tensor in module.named_buffers(recurse=False) if name in PACKED_WEIGHT_NAMES]
    for tensor in [*module.parameters(recurse=False), *packed]:
        whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        if whole or tensor.dtype.itemsize == 1:  # floating-point numbers of one byte come with a scale beside them
            return str(tensor.dtype).removeprefix("torch.")
        if type(tensor.data) not in (Tensor, nn.Parameter):
            return type(tensor.data).__name__
    return ""


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile or TorchScript was here; the former goes by its name, for importing it is slow."""
    if type(model).__name__ == "OptimizedModule" or isinstance(model, torch.jit.ScriptModule):
        return True
    return any(module._compiled_call_impl is not None for module in model.modules())


def find_layers_without_attention(model: nn.Module, sites: Sequence[Site]) -> list[str]:
    """Layers that have no attention, of stacks in which others have one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    lists: dict[str, set[str]] = {}
    for site in sites:
        before, number = _split_at_number(site.path)
        if isinstance(modules.get(before), nn.ModuleList):
            lists.setdefault(before, set()).add(number)
    return [line for path, having in lists.items() if (line := _describe_missing(path, modules[path], having))]


def _split_at_number(path: str) -> tuple[str, str]:
    """What stands before the first number of a path, and that number."""
    parts = path.split(".")
    at = next((n for n, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:at]), parts[at]


def _describe_missing(path: str, layers: nn.Module, having: set[str]) -> str:
    """What to say of the layers of a list that are not among those having an attention."""
    named = dict(layers.named_children())
    usual = {_child_names(child) for name, child in named.items() if name in having}
    usual_kinds = frozenset(chain.from_iterable(usual))
    lacking = {name: _child_names(child) - usual_kinds for name, child in named.items() if name not in having}
    if not lacking:
        return ""
    kinds = sorted(set(chain.from_iterable(lacking.values())))
    instead = f" ({', '.join(kinds)} instead)" if kinds else ""
    return f"{len(lacking)} of {len(named)} layers have no attention{instead}: {path}.{','.join(lacking)}"


def _child_names(layer: nn.Module) -> frozenset[str]:
    """What the parts of a layer are called."""
    return frozenset(name for child in layer.children() if "Norm" not in (name := type(child).__name__))
