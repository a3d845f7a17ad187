"""Where numbers first stopped being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .optimiser import Groups


def first_bad(net: nn.Module, groups: Groups, forward: Callable[[], Tensor]) -> str:
    """What went bad first: a weight; else, going forward once more, an output; else, going backward, a gradient."""
    owners = {name: group for group, named in groups.items() for name in named}
    for name, parameter in net.named_parameters():
        if not parameter.isfinite().all():
            return f"the weight {name} ({owners[name]}) is not finite"
    with torch.no_grad():
        if (module := _first_output(net, forward)) is not None:
            group = next((g for name, g in owners.items() if name.startswith(f"{module}.")), "no weights")
            return f"the output of {module} ({group}) is the first that is not finite"
    gradients = [name for name, p in net.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not gradients:
        return "every weight, output and gradient is finite, only their sum is not"
    return f"the gradient of {gradients[-1]} ({owners[gradients[-1]]}) is the first that is not finite"


def _first_output(net: nn.Module, forward: Callable[[], Tensor]) -> str | None:
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def seen(module: nn.Module, given: Any, out: Any) -> None:
            if isinstance(out, Tensor) and not out.isfinite().all():
                found.append(name)

        return seen

    handles = [module.register_forward_hook(look(name)) for name, module in net.named_modules() if name]
    try:
        loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    if not found and not loss.isfinite():
        return "the loss"
    return found[0] if found else None
