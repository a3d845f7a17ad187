"""Everything that observing a model could leave behind on it, on its classes and in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module


def read_state(model: nn.Module) -> dict[str, Any]:
    """Attributes of every module, contents of its classes, hooks of torch, and the values of all
    tensors.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    return {
        "attributes": {path: _read_attributes(module) for path, module in model.named_modules()},
        "classes": {cls: dict(vars(cls)) for cls in classes},
        "tensors": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "hooks": [
            dict(getattr(torch_module, name))
            for name in dir(torch_module)
            if name.startswith("_global_") and isinstance(getattr(torch_module, name), dict)
        ],
        "modes": torch._C._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
    }


def _read_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module; the contents of its dictionaries, such as those of hooks."""
    return {
        name: {key: id(entry) for key, entry in value.items()}
        if isinstance(value, dict)
        else id(value)
        for name, value in vars(module).items()
    }
