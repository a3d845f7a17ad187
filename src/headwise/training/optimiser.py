"""AdamW over named groups of parameters, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..blueprint import Model, Weight
from .recipe import Recipe

Groups = dict[str, dict[str, nn.Parameter]]
VECTORS = ("bias", "scale")  # ends of names that mean one vector for each head where there are two axes


def decays(weight: Weight, rule: str) -> bool:
    """Whether weight decay reaches a tensor: one stored as a matrix that is no bias, no scale and no part of a norm.

    That there is one for each expert makes no matrix. rule="maps" leaves out tables of tokens and positions.

    >>> from headwise.blueprint import Dense
    >>> {w.name: decays(w, "matrices") for w in Dense(7, bias="ud").weights(5, experts=3)}
    {'up': True, 'up_bias': False, 'down': True, 'down_bias': False}
    """
    dimensions = len(weight.shape) - ("expert" in weight.layout.axes)
    if dimensions < 2 or weight.role == "norm" or weight.name.endswith(VECTORS):
        return False
    return rule == "matrices" or weight.role != "embedding"


def grouped(named: Mapping[str, nn.Parameter], described: Model, rule: str) -> Groups:
    """The parameters by the name of their group, such as "feed, decayed"."""
    weights, groups = described.params(), Groups()
    for name, parameter in named.items():
        weight = weights[name]
        kind = "decayed" if decays(weight, rule) else "kept"
        groups.setdefault(f"{weight.role}, {kind}", {})[name] = parameter
    return groups


def named(key: str) -> str:
    """Which tensor a tensor of the state belongs to.

    >>> named("exp_avg decoder.norm.weight")
    'decoder.norm.weight'
    """
    return key.partition(" ")[2]


class Optimiser:
    """AdamW (1711.05101): m and v the means of g and g^2, w <- w - rate (decay w + m^ / (sqrt(v^) + eps)).

    Rates are given with each step; `groups` say which tensors decay.
    """

    def __init__(self, groups: Groups, recipe: Recipe) -> None:
        self._names = [name for group in groups.values() for name in group]
        rows = [
            {"params": list(group.values()), "weight_decay": recipe.weight_decay if "decayed" in name else 0.0}
            for name, group in groups.items()
        ]
        first, second = recipe.betas
        self._adamw = torch.optim.AdamW(rows, lr=recipe.lr, betas=(first, second), eps=recipe.eps, fused=True)

    def step(self, rate: float) -> None:
        """One step at this rate, then no gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.clear()

    def clear(self) -> None:
        """Forget every gradient."""
        self._adamw.zero_grad(set_to_none=True)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its state by name, as in "exp_avg NAME"; nothing before the first step."""
        states: dict[int, dict[str, Tensor]] = self._adamw.state_dict()["state"]
        return {f"{kind} {self._names[n]}": value for n, state in states.items() for kind, value in state.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from that state."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(" ")
            states.setdefault(self._names.index(name), {})[kind] = value
        self._adamw.load_state_dict({"state": states, "param_groups": self._adamw.state_dict()["param_groups"]})
