"""Every attention of a model, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..site import Site, Sites
from .depths import split_shared_modules
from .describing import ConfigSpecs
from .hindering import mark_unhookable, unhookable_reason, find_layers_without_attention
from .routes.base import SiteModule
from .routes.called import TracedAdapter, UnclearTraceAdapter, trace_example
from .routes.interface import TransformersAdapter
from .routes.ours import HeadwiseAdapter
from .routes.places import is_within
from .routes.projection import OutputProjectionAdapter
from .routes.torch_mha import TorchMHAAdapter

ABILITY_PARTICIPLES = {"see": "seen", "silence": "silenced"}
ADAPTERS = (HeadwiseAdapter(), TransformersAdapter(), TorchMHAAdapter(), TracedAdapter(), OutputProjectionAdapter())  # the first that leads to a module is taken


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
        if why := unhookable_reason(_check_model(model), [model]):
            raise ValueError(f"{type(model).__name__} cannot be run on an example: {why}")
        trace_example(model, example)
    those = [one.site for one in find_attention(model)]
    return Sites(those, type(model).__name__, find_layers_without_attention(model, those))


def _check_model(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give an nn.Module, or hw.load(folder)")
    return model


def find_attention(model: nn.Module) -> list[SiteModule]:
    """The same with the modules, each site under a name of its own."""
    _check_model(model)
    seen: list[SiteModule] = []
    for route in ADAPTERS:
        paths = [one.site.path for one in seen]
        seen += [one for one in route.find_sites(model) if not any(_contains(path, one.site.path) for path in paths)]
    paths = [one.site.path for one in seen]
    seen += [one for one in UnclearTraceAdapter().find_sites(model) if not any(is_within(one.site.path, path) for path in paths)]
    order = {path: n for n, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    said = ConfigSpecs.from_model(model)
    placed = [one._replace(site=said.with_stack(one.site)) for one in sorted(seen, key=lambda one: order[one.site.path])]
    renamed = _rename_duplicates(split_shared_modules(model, placed))
    return list(mark_unhookable(model, [one._replace(site=said.with_spec(one.site)) for one in renamed]))


def require_ability(model: nn.Module, ability: str) -> list[SiteModule]:
    """The sites of a model that is to be measured at which this can be done: "see" or "silence"."""
    every = find_attention(model)
    those = [one for one in every if getattr(one.site, ability).can]
    if not those:
        why = getattr(every[0].site, ability).why if every else "hw.sites(model) says what it saw"
        raise ValueError(f"{type(model).__name__} has no attention that can be {ABILITY_PARTICIPLES[ability]}: {why}")
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    return those


def _contains(path: str, other: str) -> bool:
    """Whether one of two modules stands in the other."""
    return is_within(path, other) or is_within(other, path)


def _rename_duplicates(those: list[SiteModule]) -> Iterator[SiteModule]:
    """Where sites would have one name, their stacks are called by their paths; one module met twice says so."""
    places = [(one.site.stack, one.site.layer) for one in those]
    for how in (_stack_before_first, _stack_before_last, _stack_full_path):
        names = [_site_name(place, one.site) for place, one in zip(places, those, strict=True)]
        clash = [names.count(name) > 1 for name in names]
        places = [how(one.site) if again else place for again, place, one in zip(clash, places, those, strict=True)]
    first: dict[int, str] = {}
    for place, one in zip(places, those, strict=True):
        name = _site_name(place, one.site)
        same = first.setdefault(id(one.module), name)
        stack, layer = place
        site = replace(one.site, name=name, stack=stack, layer=layer, same_as=None if same == name else same)
        yield one._replace(site=site)


def _site_name(place: tuple[str, int], site: Site) -> str:
    stack, layer = place
    return f"{stack}.{layer}.{site.kind}"


def _stack_before_first(site: Site) -> tuple[str, int]:
    """Its stack called by the path before the first number, or by all of it."""
    parts, numbers = _split_path(site)
    return "_".join(parts[: numbers[0]] if numbers else parts), site.layer


def _stack_before_last(site: Site) -> tuple[str, int]:
    """Its stack called by the path before the last number, which is then its layer."""
    parts, numbers = _split_path(site)
    return ("_".join(parts[: numbers[-1]]), int(parts[numbers[-1]])) if numbers else ("_".join(parts), site.layer)


def _stack_full_path(site: Site) -> tuple[str, int]:
    """Its stack called by the whole path."""
    return "_".join(_split_path(site)[0]), site.layer


def _split_path(site: Site) -> tuple[list[str], list[int]]:
    parts = site.path.split(".")
    return parts, [n for n, part in enumerate(parts) if part.isdigit()]
