"""Modules that serve several depths of a model: one site for each, told apart by the order of calls in a forward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from .routes.base import Found
from .routes.places import number

# Where a layer stands in a group of layers that is run again and again, as ALBERT has it (arXiv:1909.11942).
PLACE = re.compile(r"_groups\.(\d+)\.\w*layers\.(\d+)\.")
SAID = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


def by_depth(model: nn.Module, those: Sequence[Found]) -> list[Found]:
    """The same, each with which call of its module it is: by its config, or by the places at which the module stands.

    >>> import headwise as hw
    >>> one = hw.Attention(hw.design(model=8, heads=2))
    >>> [(site.name, site.same_as) for site in hw.sites(nn.Sequential(one, one))]
    [('model.0.attention', None), ('model.1.attention', 'model.0.attention')]
    """
    split = [turn for one in those for turn in _turns(model, one)]
    calls, so_far = Counter(id(one.module) for one in split), Counter[int]()
    told = []
    for one in split:
        told.append(one._replace(call=so_far[id(one.module)], calls=calls[id(one.module)]))
        so_far[id(one.module)] += 1
    return told


def _turns(model: nn.Module, one: Found) -> Iterator[Found]:
    place = PLACE.search(f"{one.site.path}.")
    sizes = _sizes(model, one.site.path)
    if place is None or not all(sizes):
        yield one
        return
    layers, groups, inner = sizes
    group, within = int(place[1]), int(place[2])
    for run in range(layers):
        if int(run / (layers / groups)) == group:
            depth, site = run * inner + within, one.site
            name = f"{site.stack}.{depth}.{site.kind}"
            yield one._replace(site=replace(site, layer=depth, name=name))


def _sizes(model: nn.Module, path: str) -> tuple[int, int, int]:
    """How many runs, groups, and layers in a group: from the config nearest to a path; zeros if none says it."""
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:end])), "config", None)
        layers, groups, inner = (number(config, (name,)) for name in SAID)
        if layers and groups and inner:
            return layers, groups, inner
    return 0, 0, 0
