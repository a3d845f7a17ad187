"""AdamW, Muon and SGD by name: parameter groups by role, and optimisers whose state has the names
of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..models.model_spec import ModelSpec, WeightSpec
from ..util.errors import SpecError
from .recipe import Recipe

# --- Parameter groups -----------------------------------------------------------------------------


ParameterGroups = dict[str, dict[str, nn.Parameter]]
HIDDEN_ROLES = ("attention", "cross", "feed")  # roles of weights inside layers
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


# --- Optimisers -----------------------------------------------------------------------------------


class NamedOptimiser:
    """An optimiser of torch whose state tensors have the names of its parameters."""

    def __init__(self, optimiser: torch.optim.Optimizer, names: Iterable[str]) -> None:
        self._optimiser = optimiser
        self._names = list(names)

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


def make_param_groups(groups: ParameterGroups, recipe: Recipe) -> list[dict[str, Any]]:
    """Groups of torch; those with "decayed" in their name have weight decay."""
    decays = [recipe.weight_decay * ("decayed" in name) for name in groups]
    pairs = zip(groups.values(), decays, strict=True)
    return [{"params": list(group.values()), "weight_decay": decay} for group, decay in pairs]


class AdamWOptimiser(NamedOptimiser):
    """AdamW (1711.05101): w <- w - lr (weight_decay w + m^ / (sqrt(v^) + eps)), with running means
    m of g and v of g^2.
    """

    def __init__(self, groups: ParameterGroups, recipe: Recipe) -> None:
        first, second = recipe.betas
        param_groups = make_param_groups(groups, recipe)
        adamw = torch.optim.AdamW(
            param_groups, lr=recipe.lr, betas=(first, second), eps=recipe.eps, fused=True
        )
        super().__init__(adamw, chain(*groups.values()))


class SGDOptimiser(NamedOptimiser):
    """SGD with momentum: b <- momentum b + g + weight_decay w, then w <- w - lr b.

    Here weight decay is part of the gradient.
    """

    def __init__(self, groups: ParameterGroups, recipe: Recipe) -> None:
        param_groups = make_param_groups(groups, recipe)
        sgd = torch.optim.SGD(param_groups, lr=recipe.lr, momentum=recipe.momentum)
        super().__init__(sgd, chain(*groups.values()))


class MuonOptimiser:
    """Muon for the matrices of attention and feed-forward layers, AdamW for everything else.

    Muon orthogonalises the momentum of a matrix by five Newton-Schulz steps (Jordan, 2024). Its
    update is scaled by
    0.2 sqrt(max(rows, columns)), so that learning rate and weight decay are those of AdamW (2502.16982). In a layer
    of experts, each expert's matrix is orthogonalised for itself.
    """

    def __init__(self, groups: ParameterGroups, recipe: Recipe, model_spec: ModelSpec) -> None:
        weights = model_spec.params()
        self._matrices: dict[str, tuple[nn.Parameter, list[nn.Parameter]]] = {}
        others: ParameterGroups = {}
        views: ParameterGroups = {}  # of the matrices, by group
        for group_name, group in groups.items():
            for name, parameter in group.items():
                if is_hidden_matrix(weights[name]):
                    # The parameter itself, or one in the same memory for the matrix of each expert.
                    parts = [parameter]
                    if parameter.dim() > 2:
                        parts = [nn.Parameter(matrix) for matrix in parameter.data]
                    self._matrices[name] = (parameter, parts)
                    named = {f"{name} {n}": part for n, part in enumerate(parts)}
                    views.setdefault(group_name, {}).update(named)
                else:
                    others.setdefault(group_name, {})[name] = parameter
        if not views:
            raise SpecError(
                f"{model_spec.name} has no matrix in a layer for optimiser='muon'; use "
                "optimiser='adamw'"
            )
        self._adamw = AdamWOptimiser(others, recipe)
        self._muon = torch.optim.Muon(
            make_param_groups(views, recipe),
            lr=recipe.lr,
            momentum=recipe.momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    def step(self, lr: float) -> None:
        """Take one step with this learning rate and clear the gradients."""
        for group in self._muon.param_groups:
            group["lr"] = lr
        for parameter, views in self._matrices.values():
            for n, view in enumerate(views):
                if view is not parameter:
                    view.grad = None if parameter.grad is None else parameter.grad[n]
        self._muon.step()
        self._adamw.step(lr)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._adamw.zero_grad()
        for parameter, views in self._matrices.values():
            for tensor in (parameter, *views):
                tensor.grad = None

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """State tensors by name; the momentum of experts is one tensor, like their weights."""
        momenta: dict[str, Tensor] = {}
        for name, (parameter, views) in self._matrices.items():
            states = [self._muon.state[view] for view in views if view in self._muon.state]
            buffers = [state["momentum_buffer"] for state in states]
            if buffers:
                whole = buffers[0] if views[0] is parameter else torch.stack(buffers)
                momenta[f"momentum_buffer {name}"] = whole
        return momenta | self._adamw.state_tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load state tensors with the names of `state_tensors`."""
        rest: dict[str, Tensor] = {}
        for key, value in tensors.items():
            name = get_parameter_name(key)
            if name not in self._matrices:
                rest[key] = value
                continue
            parameter, views = self._matrices[name]
            parts: Iterable[Tensor] = [value] if views[0] is parameter else value
            for view, part in zip(views, parts, strict=True):
                self._muon.state[view]["momentum_buffer"] = part.to(view).clone()
        self._adamw.load_state(rest)


def is_hidden_matrix(weight: WeightSpec) -> bool:
    """Whether Muon updates a weight: a matrix of an attention or feed-forward layer, or one for
    each expert.

    >>> from headwise.models.model_spec import FeedForwardSpec
    >>> {
    ...     w.name: is_hidden_matrix(w)
    ...     for w in FeedForwardSpec(7, bias="ud").weights(5, num_experts=3)
    ... }
    {'up': False, 'up_bias': False, 'down': False, 'down_bias': False}
    """
    if weight.role not in HIDDEN_ROLES or not has_weight_decay(weight, "matrices"):
        return False
    return len(weight.shape) == 2 or (len(weight.shape) == 3 and weight.layout.axes[0] == "expert")


Optimiser = NamedOptimiser | MuonOptimiser


def make_optimiser(groups: ParameterGroups, recipe: Recipe, model_spec: ModelSpec) -> Optimiser:
    """The optimiser that a recipe names."""
    if recipe.optimiser == "muon":
        return MuonOptimiser(groups, recipe, model_spec)
    return {"sgd": SGDOptimiser, "adamw": AdamWOptimiser}[recipe.optimiser](groups, recipe)
