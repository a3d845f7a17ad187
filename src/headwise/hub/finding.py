"""Every attention of a model, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..site import Site, Sites
from .routes.base import Found
from .routes.interface import Interface
from .routes.ours import Ours

ROUTES = (Ours(), Interface())


def sites(model: nn.Module) -> Sites:
    """The attention layers of a model, and what may be done to each.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11})
    ... )
    >>> [site.name for site in sites(net)]
    ['decoder.0.attention']
    """
    return Sites([one.site for one in found(model)], type(model).__name__)


def found(model: nn.Module) -> list[Found]:
    """The same with the modules, each site under a name of its own."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give an nn.Module, or hw.load(folder)")
    seen = [one for route in ROUTES for one in route.find(model)]
    return list(_renamed(seen))


def _renamed(those: list[Found]) -> Iterator[Found]:
    """Where two sites would have one name, their stacks are called by their paths."""
    names = [one.site.name for one in those]
    first: dict[int, str] = {}
    for one in those:
        site = one.site
        if names.count(site.name) > 1:
            stack = _before(site)
            site = _with(site, stack)
        same = first.setdefault(id(one.module), site.name)
        yield one._replace(site=site if same == site.name else _shared(site, same))


def _before(site: Site) -> str:
    parts = site.path.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    return "_".join(parts[: numbers[0]] if numbers else parts)


def _with(site: Site, stack: str) -> Site:
    from dataclasses import replace

    return replace(site, stack=stack, name=f"{stack}.{site.layer}.{site.kind}")


def _shared(site: Site, same: str) -> Site:
    from dataclasses import replace

    return replace(site, same_as=same)
