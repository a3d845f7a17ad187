"""Where numbers first stopped being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..spread.holding import Holding
from .optimiser import ParameterGroups


def find_first_non_finite(sharded_model: Holding, groups: ParameterGroups, forward: Callable[[], Tensor]) -> str:
    """What went bad first: a weight; else, going forward once more, an output; else, going backward, a gradient.

    Ranks look side by side and end together: the first that finds something names it.
    """
    owners = {name: group for group, named in groups.items() for name in named}
    first = sharded_model.world.first
    if name := first(next((n for n, p in sharded_model.own.items() if not p.isfinite().all()), None)):
        return f"the weight {name[0]} ({owners[name[0]]}) is not finite{name[1]}"
    with torch.no_grad():
        module = first(_find_first_output(sharded_model.net, forward))
    if module:
        group = next((g for name, g in owners.items() if name.startswith(f"{module[0]}.")), "no weights")
        return f"the output of {module[0]} ({group}) is the first that is not finite{module[1]}"
    gradients = [name for name, p in sharded_model.own.items() if p.grad is not None and not p.grad.isfinite().all()]
    if not (name := first(gradients[-1] if gradients else None)):
        return "every weight, output and gradient is finite, only their sum is not"
    return f"the gradient of {name[0]} ({owners[name[0]]}) is the first that is not finite{name[1]}"


def _find_first_output(net: nn.Module, forward: Callable[[], Tensor]) -> str | None:
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
