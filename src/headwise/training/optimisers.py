"""Parameter groups by role, and AdamW, whose state has the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..models.model_spec import ModelSpec, WeightSpec
from .recipe import Recipe

# --- Parameter groups -----------------------------------------------------------------------------


ParameterGroups = dict[str, dict[str, nn.Parameter]]
# Suffixes of weights that are vectors, one per head, although they have two axes.
VECTOR_NAMES = ("bias", "scale")


def has_weight_decay(weight: WeightSpec, rule: str) -> bool:
    """Whether weight decay applies to a weight: a matrix that is not a bias, a scale, or part of a
    norm.

    The expert axis does not count, so one vector per expert is not a matrix. rule="non-embeddings"
    also excludes token and position embeddings.

    >>> from headwise.models.model_spec import FeedForwardSpec
    >>> {
    ...     w.name: has_weight_decay(w, "matrices")
    ...     for w in FeedForwardSpec(7, bias="ud").weights(5, num_experts=3)
    ... }
    {'up': True, 'up_bias': False, 'down': True, 'down_bias': False}
    """
    dimensions = len(weight.shape) - ("expert" in weight.layout.axes)
    if dimensions < 2 or weight.role == "norm" or weight.name.endswith(VECTOR_NAMES):
        return False
    return rule == "matrices" or weight.role != "embedding"


def group_parameters(
    parameters: Mapping[str, nn.Parameter], model_spec: ModelSpec, rule: str
) -> ParameterGroups:
    """Parameters by group; a group is named after role and weight decay, such as "feed, decayed" or
    "norm, kept".
    """
    weights = model_spec.params()
    groups = ParameterGroups()
    for name, parameter in parameters.items():
        weight = weights[name]
        kind = "decayed" if has_weight_decay(weight, rule) else "kept"
        groups.setdefault(f"{weight.role}, {kind}", {})[name] = parameter
    return groups


def get_parameter_name(key: str) -> str:
    """Name of the parameter that an optimiser state tensor belongs to.

    >>> get_parameter_name("exp_avg decoder.norm.weight")
    'decoder.norm.weight'
    """
    return key.partition(" ")[2]


# --- AdamW ----------------------------------------------------------------------------------------


class AdamWOptimiser:
    """AdamW (1711.05101): w <- w - lr (weight_decay w + m^ / (sqrt(v^) + eps)), with running means
    m of g and v of g^2. Its state tensors have the names of the parameters.
    """

    def __init__(self, groups: ParameterGroups, recipe: Recipe) -> None:
        self._names = list(chain(*groups.values()))
        param_groups: list[dict[str, Any]] = []
        for name, group in groups.items():
            decay = recipe.weight_decay * ("decayed" in name)
            param_groups.append({"params": list(group.values()), "weight_decay": decay})
        first, second = recipe.betas
        self._optimiser = torch.optim.AdamW(
            param_groups, lr=recipe.lr, betas=(first, second), eps=recipe.eps, fused=True
        )

    def step(self, lr: float) -> None:
        """Take one step with this learning rate and clear the gradients."""
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        self._optimiser.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._optimiser.zero_grad(set_to_none=True)

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """State tensors by name, such as "exp_avg decoder.norm.weight"; empty before the first
        step.
        """
        states: dict[int, dict[str, Tensor | None]] = self._optimiser.state_dict()["state"]
        named: dict[str, Tensor] = {}
        for n, state in states.items():
            for kind, value in state.items():
                if value is not None:
                    named[f"{kind} {self._names[n]}"] = value
        return named

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load state tensors with the names of `state_tensors`."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(" ")
            states.setdefault(self._names.index(name), {})[kind] = value
        groups = self._optimiser.state_dict()["param_groups"]
        self._optimiser.load_state_dict({"state": states, "param_groups": groups})
