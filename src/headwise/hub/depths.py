"""Modules that serve several depths of a model: one site for each, told apart by the order of calls in a forward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from .routes.base import SiteModule
from .routes.places import read_positive_int

# Where a layer stands in a group of layers that is run again and again, as ALBERT has it (arXiv:1909.11942).
GROUPED_LAYER = re.compile(r"_groups\.(\d+)\.\w*layers\.(\d+)\.")
DEPTH_KEYS = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


def split_shared_modules(model: nn.Module, sites: Sequence[SiteModule]) -> list[SiteModule]:
    """The same, each with which call of its module it is: by its config, or by the places at which the module stands.

    >>> import headwise as hw
    >>> one = hw.Attention(hw.design(model=8, heads=2))
    >>> [(site.name, site.same_as) for site in hw.sites(nn.Sequential(one, one))]
    [('model.0.attention', None), ('model.1.attention', 'model.0.attention')]
    """
    split = [turn for one in sites for turn in _calls_of_module(model, one)]
    calls, so_far = Counter(id(one.module) for one in split), Counter[int]()
    told = []
    for one in split:
        told.append(one._replace(call_index=so_far[id(one.module)], calls_per_forward=calls[id(one.module)]))
        so_far[id(one.module)] += 1
    return told


def _calls_of_module(model: nn.Module, one: SiteModule) -> Iterator[SiteModule]:
    place = GROUPED_LAYER.search(f"{one.site.path}.")
    sizes = _read_group_sizes(model, one.site.path)
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


def _read_group_sizes(model: nn.Module, path: str) -> tuple[int, int, int]:
    """How many runs, groups, and layers in a group: from the config nearest to a path; zeros if none says it."""
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:end])), "config", None)
        layers, groups, inner = (read_positive_int(config, (name,)) for name in DEPTH_KEYS)
        if layers and groups and inner:
            return layers, groups, inner
    return 0, 0, 0
