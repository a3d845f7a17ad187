"""AdamW over named groups of parameters, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..model_spec import ModelSpec, WeightSpec
from .recipe import Recipe

ParameterGroups = dict[str, dict[str, nn.Parameter]]
VECTOR_NAMES = ("bias", "scale")  # ends of names that mean one vector for each head where there are two axes


def has_weight_decay(weight: WeightSpec, rule: str) -> bool:
    """Whether weight decay reaches a tensor: one stored as a matrix that is no bias, no scale and no part of a norm.

    That there is one for each expert makes no matrix. rule="maps" leaves out tables of tokens and positions.

    >>> from headwise.model_spec import FeedForwardSpec
    >>> {w.name: has_weight_decay(w, "matrices") for w in FeedForwardSpec(7, bias="ud").weights(5, num_experts=3)}
    {'up': True, 'up_bias': False, 'down': True, 'down_bias': False}
    """
    dimensions = len(weight.shape) - ("expert" in weight.layout.axes)
    if dimensions < 2 or weight.role == "norm" or weight.name.endswith(VECTOR_NAMES):
        return False
    return rule == "matrices" or weight.role != "embedding"


def group_parameters(parameters: Mapping[str, nn.Parameter], model_spec: ModelSpec, rule: str) -> ParameterGroups:
    """The parameters by the name of their group, such as "feed, decayed"."""
    weights, groups = model_spec.params(), ParameterGroups()
    for name, parameter in parameters.items():
        weight = weights[name]
        kind = "decayed" if has_weight_decay(weight, rule) else "kept"
        groups.setdefault(f"{weight.role}, {kind}", {})[name] = parameter
    return groups


def get_parameter_name(key: str) -> str:
    """Which tensor a tensor of the state belongs to.

    >>> get_parameter_name("exp_avg decoder.norm.weight")
    'decoder.norm.weight'
    """
    return key.partition(" ")[2]


class AdamWOptimiser:
    """AdamW (1711.05101): m and v the means of g and g^2, w <- w - rate (decay w + m^ / (sqrt(v^) + eps)).

    Rates are given with each step; `groups` say which tensors decay.
    """

    def __init__(self, groups: ParameterGroups, recipe: Recipe) -> None:
        self._names = [name for group in groups.values() for name in group]
        rows = [
            {"params": list(group.values()), "weight_decay": recipe.weight_decay if "decayed" in name else 0.0}
            for name, group in groups.items()
        ]
        first, second = recipe.betas
        self._adamw = torch.optim.AdamW(rows, lr=recipe.lr, betas=(first, second), eps=recipe.eps, fused=True)

    def step(self, lr: float) -> None:
        """One step at this rate, then no gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget every gradient."""
        self._adamw.zero_grad(set_to_none=True)

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """Its state by name, as in "exp_avg NAME"; nothing before the first step."""
        states: dict[int, dict[str, Tensor]] = self._adamw.state_dict()["state"]
        return {f"{kind} {self._names[n]}": value for n, state in states.items() for kind, value in state.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from that state."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(" ")
            states.setdefault(self._names.index(name), {})[kind] = value
        self._adamw.load_state_dict({"state": states, "param_groups": self._adamw.state_dict()["param_groups"]})
