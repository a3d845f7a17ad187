"""Why a layer cannot be observed, ablated, pruned or converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .adapters.output_projection import overlaps

PACKED_WEIGHT_NAMES = ("qweight", "qzeros", "weight_packed", "w_bit")  # buffers of quantised layers
QUANTISERS = {"quantized", "bitsandbytes", "torchao"}
PLAIN_TENSORS = (Tensor, nn.Parameter)  # other classes hold packed weights


def unhookable_reason(model: nn.Module, parts: Sequence[nn.Module]) -> str:
    """Explain why these modules of a model cannot be observed; "" if they can."""
    if isinstance(model, nn.DataParallel):
        return "its replicas run in separate threads; give model.module"
    if is_compiled(model):
        return (
            "it is compiled, and compiled models cannot be observed; give the model from "
            "before torch.compile"
        )
    unloaded = {
        module
        for module in chain.from_iterable(map(nn.Module.modules, parts))
        if any(tensor.is_meta for tensor in module.parameters(recurse=False))
    }
    if unloaded and not unloaded <= set(_list_offloaded(model)):
        return "its weights are on the meta device, where nothing is computed; load them"
    return ""


def _list_offloaded(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose parameters accelerate loads for each call; between calls they are on
    the meta device.
    """
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):  # a SequentialHook has several
            if getattr(each, "offload", False):
                yield from module.modules() if each.place_submodules else (module,)


def unprunable_reason(parts: Sequence[nn.Module]) -> str:
    """Explain why heads of these modules cannot be pruned or converted; "" if they can."""
    for module in chain.from_iterable(part.modules() for part in parts):
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            return "its weights have an adapter (LoRA); merge it first"
        kinds = {type(tensor.data).__name__ for tensor in module.parameters(recurse=False)}
        if "DTensor" in kinds:
            return (
                "its weights are sharded over several processes; prune the model before it is "
                "sharded"
            )
        kind = _find_packed_weights(module)
        if kind:
            return (
                f"its weights are quantised ({kind}); prune the unquantised model, then "
                "quantise it again"
            )
    return ""


def kv_sharing_reason(parts: Sequence[nn.Module]) -> str:
    """Explain why key-value heads of these modules cannot change; "" if they can."""
    for module in chain.from_iterable(part.modules() for part in parts):
        if getattr(module, "is_kv_shared_layer", False):
            return "it reads the keys and values of another layer"
        if getattr(module, "store_full_length_kv", False):
            return "other layers read its keys and values"
    return ""


def _find_packed_weights(module: nn.Module) -> str:
    """Return the type of a quantised module's packed weights; "" for floating-point tensors."""
    if QUANTISERS & set(type(module).__module__.split(".")):
        return type(module).__name__
    buffers = dict(module.named_buffers(recurse=False))
    packed = [buffers[name] for name in PACKED_WEIGHT_NAMES if name in buffers]
    for tensor in [*module.parameters(recurse=False), *packed]:
        is_integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        if is_integer or tensor.dtype.itemsize == 1:  # float8 weights come with a separate scale
            return str(tensor.dtype).removeprefix("torch.")
        if type(tensor.data) not in PLAIN_TENSORS:
            return type(tensor.data).__name__
    return ""


def is_compiled(module: nn.Module) -> bool:
    """Return True for torch.compile and TorchScript.

    Compares a class name, because importing torch._dynamo is slow.
    """
    if type(module).__name__ == "OptimizedModule" or isinstance(module, torch.jit.ScriptModule):
        return True
    is_decorated = getattr(type(module).forward, "_torchdynamo_orig_callable", None) is not None
    return is_decorated or module._compiled_call_impl is not None


def compiled_part_reason(modules: Mapping[str, nn.Module], path: str) -> str:
    """Explain why the module at `path` cannot be observed; "" if it can.

    It is compiled, or inside or around a compiled module.
    """
    for other, module in modules.items():
        if overlaps(path, other) and is_compiled(module):
            part = "it" if other == path else f"{other} ({type(module).__name__})"
            return (
                f"{part} is compiled, and compiled modules cannot be observed; compile it "
                "after the analysis"
            )
    return ""
