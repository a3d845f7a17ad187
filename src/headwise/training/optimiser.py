"""AdamW with parameter groups by role, and its state as named tensors for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..model_spec import ModelSpec, WeightSpec
from .recipe import Recipe

ParameterGroups = dict[str, dict[str, nn.Parameter]]
VECTOR_NAMES = ("bias", "scale")  # suffixes of weights that are vectors, one per head, although they have two axes


def has_weight_decay(weight: WeightSpec, rule: str) -> bool:
    """Whether weight decay applies to a weight: a matrix that is not a bias, a scale, or part of a norm.

    The expert axis does not count, so one vector per expert is not a matrix. rule="maps" also excludes token and
    position embeddings.

    >>> from headwise.model_spec import FeedForwardSpec
    >>> {w.name: has_weight_decay(w, "matrices") for w in FeedForwardSpec(7, bias="ud").weights(5, num_experts=3)}
    {'up': True, 'up_bias': False, 'down': True, 'down_bias': False}
    """
    dimensions = len(weight.shape) - ("expert" in weight.layout.axes)
    if dimensions < 2 or weight.role == "norm" or weight.name.endswith(VECTOR_NAMES):
        return False
    return rule == "matrices" or weight.role != "embedding"


def group_parameters(parameters: Mapping[str, nn.Parameter], model_spec: ModelSpec, rule: str) -> ParameterGroups:
    """Parameters by group; a group is named after role and weight decay, such as "feed, decayed" or "norm, kept"."""
    weights, groups = model_spec.params(), ParameterGroups()
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


class AdamWOptimiser:
    """AdamW (1711.05101): w <- w - lr (weight_decay w + m^ / (sqrt(v^) + eps)), with running means m of g and v of g^2.

    The learning rate is passed to each step. Groups with "decayed" in their name have weight decay.
    """

    def __init__(self, groups: ParameterGroups, recipe: Recipe) -> None:
        self._names = [name for group in groups.values() for name in group]
        param_groups = [
            {"params": list(group.values()), "weight_decay": recipe.weight_decay if "decayed" in name else 0.0}
            for name, group in groups.items()
        ]
        first, second = recipe.betas
        self._adamw = torch.optim.AdamW(param_groups, lr=recipe.lr, betas=(first, second), eps=recipe.eps, fused=True)

    def step(self, lr: float) -> None:
        """Take one step with this learning rate and clear the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """State tensors by name, such as "exp_avg decoder.norm.weight"; empty before the first step."""
        states: dict[int, dict[str, Tensor]] = self._adamw.state_dict()["state"]
        return {f"{kind} {self._names[n]}": value for n, state in states.items() for kind, value in state.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load state tensors with the names of `state_tensors`."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(" ")
            states.setdefault(self._names.index(name), {})[kind] = value
        self._adamw.load_state_dict({"state": states, "param_groups": self._adamw.state_dict()["param_groups"]})
