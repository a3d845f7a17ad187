"""Every attention of a model, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..site import Site, Sites
from .depths import by_depth
from .describing import Said
from .hindering import hindered, hindrance, without
from .routes.base import Found
from .routes.called import Called, Unclear, tried
from .routes.interface import Interface
from .routes.ours import Ours
from .routes.places import within
from .routes.projection import Projection
from .routes.torch_mha import TorchMHA

DONE = {"see": "seen", "silence": "silenced"}
ROUTES = (Ours(), Interface(), TorchMHA(), Called(), Projection())  # the first that leads to a module is taken


def sites(model: nn.Module, example: Any = None) -> Sites:
    """The attention layers of a model, and what may be done to each.

    With an `example`, a tensor or a tuple or dict of what the forward takes, the model runs on it once, and modules
    that are heard to compare are sites too.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11})
    ... )
    >>> [site.name for site in sites(net)]
    ['decoder.0.attention']
    """
    if example is not None:
        if why := hindrance(_checked(model), [model]):
            raise ValueError(f"{type(model).__name__} cannot be run on an example: {why}")
        tried(model, example)
    those = [one.site for one in found(model)]
    return Sites(those, type(model).__name__, without(model, those))


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give an nn.Module, or hw.load(folder)")
    return model


def found(model: nn.Module) -> list[Found]:
    """The same with the modules, each site under a name of its own."""
    _checked(model)
    seen: list[Found] = []
    for route in ROUTES:
        paths = [one.site.path for one in seen]
        seen += [one for one in route.find(model) if not any(_around(path, one.site.path) for path in paths)]
    paths = [one.site.path for one in seen]
    seen += [one for one in Unclear().find(model) if not any(within(one.site.path, path) for path in paths)]
    order = {path: n for n, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    said = Said.of(model)
    placed = [one._replace(site=said.placed(one.site)) for one in sorted(seen, key=lambda one: order[one.site.path])]
    renamed = _renamed(by_depth(model, placed))
    return list(hindered(model, [one._replace(site=said.added(one.site)) for one in renamed]))


def able(model: nn.Module, ability: str) -> list[Found]:
    """The sites of a model that is to be measured at which this can be done: "see" or "silence"."""
    every = found(model)
    those = [one for one in every if getattr(one.site, ability).can]
    if not those:
        why = getattr(every[0].site, ability).why if every else "hw.sites(model) says what it saw"
        raise ValueError(f"{type(model).__name__} has no attention that can be {DONE[ability]}: {why}")
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    return those


def _around(path: str, other: str) -> bool:
    """Whether one of two modules stands in the other."""
    return within(path, other) or within(other, path)


def _renamed(those: list[Found]) -> Iterator[Found]:
    """Where sites would have one name, their stacks are called by their paths; one module met twice says so."""
    places = [(one.site.stack, one.site.layer) for one in those]
    for how in (_before_first, _before_last, _whole):
        names = [_name(place, one.site) for place, one in zip(places, those, strict=True)]
        clash = [names.count(name) > 1 for name in names]
        places = [how(one.site) if again else place for again, place, one in zip(clash, places, those, strict=True)]
    first: dict[int, str] = {}
    for place, one in zip(places, those, strict=True):
        name = _name(place, one.site)
        same = first.setdefault(id(one.module), name)
        stack, layer = place
        site = replace(one.site, name=name, stack=stack, layer=layer, same_as=None if same == name else same)
        yield one._replace(site=site)


def _name(place: tuple[str, int], site: Site) -> str:
    stack, layer = place
    return f"{stack}.{layer}.{site.kind}"


def _before_first(site: Site) -> tuple[str, int]:
    """Its stack called by the path before the first number, or by all of it."""
    parts, numbers = _parts(site)
    return "_".join(parts[: numbers[0]] if numbers else parts), site.layer


def _before_last(site: Site) -> tuple[str, int]:
    """Its stack called by the path before the last number, which is then its layer."""
    parts, numbers = _parts(site)
    return ("_".join(parts[: numbers[-1]]), int(parts[numbers[-1]])) if numbers else ("_".join(parts), site.layer)


def _whole(site: Site) -> tuple[str, int]:
    """Its stack called by the whole path."""
    return "_".join(_parts(site)[0]), site.layer


def _parts(site: Site) -> tuple[list[str], list[int]]:
    parts = site.path.split(".")
    return parts, [n for n, part in enumerate(parts) if part.isdigit()]
