"""Attention modules with other heads: parameters, sizes and configs of a changed copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..models.families.config_reader import HEAD_COUNT_KEYS, KV_COUNT_KEYS
from ..observe.inspect.adapters.declarations import OwnConfig, copy_declared, declare
from ..observe.inspect.adapters.output_projection import (
    GROUP_SIZE_NAMES,
    HEAD_DIM_NAMES,
    NUM_HEADS_NAMES,
    NUM_KV_HEADS_NAMES,
)
from ..observe.inspect.site import Site
from ..util.errors import SpecError
from .declared_projections import get_projections, list_projections
from .head_entries import EntryMap, list_head_tensors
from .model_outputs import ResultCheck
from .split_multihead import split_multihead


class HeadCounts(NamedTuple):
    """Numbers of query and key-value heads of a module."""

    heads: int
    kv_heads: int

    def without(self, name: str, removed: Iterable[int]) -> HeadCounts:
        """Return the counts without these query heads, and without the key-value heads that no
        other uses.

        >>> HeadCounts(6, 3).without("layer 0", {0, 1})
        HeadCounts(heads=4, kv_heads=2)
        """
        heads_left = sorted({*range(self.heads)} - set(removed))
        if not heads_left:
            raise SpecError(f"cannot remove all {self.heads} heads of {name}; keep at least one")
        counts = Counter(head * self.kv_heads // self.heads for head in heads_left)
        if len(set(counts.values())) > 1:
            shared = ", ".join(map(str, counts.values()))
            raise SpecError(
                f"cannot prune {name}: its key-value heads would be shared by {shared} query heads;"
                " keep the same number in each group, or remove whole groups"
            )
        return HeadCounts(len(heads_left), len(counts))

    @property
    def sizes(self) -> dict[str, int]:
        """Return the counts by what they count, with the query heads of a key-value head."""
        return {**self._asdict(), "group": self.heads // self.kv_heads}


SiteChange = tuple[Site, HeadCounts, HeadCounts, Mapping[str, EntryMap]]


def split_multiheads(model: nn.Module, sites: Sequence[Site]) -> nn.Module:
    """Return the model, or a copy in which an nn.MultiheadAttention at these sites has a projection
    for each of q, k and v.
    """
    modules = [model.get_submodule(site.path) for site in sites]
    if not any(isinstance(module, nn.MultiheadAttention) for module in modules):
        return model
    source = copy_declared(model)
    for site, module in zip(sites, modules, strict=True):
        if isinstance(module, nn.MultiheadAttention):
            projections = list_projections(model, site)[0]
            declare(split_multihead(source, site.path), projections)
    return source


def make_changed(
    model: nn.Module, changes: Mapping[str, SiteChange], check: ResultCheck
) -> tuple[nn.Module, float]:
    """Return a changed copy that passes the check, and its difference: the first for several
    interpretations of the integers that modules hold.
    """
    errors = list[SpecError]()
    for reading in range(len(READINGS)):
        after = copy_declared(model)
        try:
            for change in changes.values():
                _resize(after, change, READINGS[reading])
            return after, check.compare(after)
        except SpecError as error:
            errors.append(error)
    raise errors[0]


def _resize(model: nn.Module, change: SiteChange, reading: str) -> None:
    """Give a module the parameters and sizes of its new heads, and declare it again."""
    site, old, new, maps = change
    module = model.get_submodule(site.path)
    lengths = dict[int, int]()
    for name in sorted({*list_head_tensors(model, site)} & maps.keys()):
        path, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(path)
        tensor: Tensor = getattr(owner, leaf)
        smaller = maps[name].apply(tensor)
        lengths[tensor.shape[maps[name].axis]] = smaller.shape[maps[name].axis]
        if isinstance(tensor, nn.Parameter):
            smaller = nn.Parameter(smaller, requires_grad=tensor.requires_grad)
        setattr(owner, leaf, smaller)
        if isinstance(owner, nn.Linear) and leaf == "weight":
            owner.out_features, owner.in_features = smaller.shape
        elif type(owner).__name__ == "Conv1D" and leaf == "weight":
            cast(Any, owner).nx, cast(Any, owner).nf = smaller.shape
    numbers = read_new_numbers(module, old, new, lengths, reading)
    projections = get_projections(module)
    for name, value in numbers.items():
        setattr(module, name, value)
    config: Any = getattr(module, "config", None)
    counts = dict.fromkeys((*HEAD_COUNT_KEYS, *NUM_HEADS_NAMES), (old.heads, new.heads))
    counts |= dict.fromkeys((*KV_COUNT_KEYS, *NUM_KV_HEADS_NAMES), (old.kv_heads, new.kv_heads))
    values = {
        key: after
        for key, (before, after) in counts.items()
        if before != after and getattr(config, key, None) == before
    }
    if values:
        cast(Any, module).config = OwnConfig(config, values)
    shared = {*GROUP_SIZE_NAMES, *NUM_KV_HEADS_NAMES, *KV_COUNT_KEYS}
    declared = () if projections is None else projections.attributes.items()
    shared |= {name for name, size in declared if size == "kv_heads"}
    if new.heads == old.heads and not shared & {*numbers, *values}:
        # one head of keys may broadcast by chance, and only in some implementations
        raise SpecError(f"{type(module).__name__} reads no number of key-value heads")
    if projections is not None:
        declare(module, replace(projections, heads=new.heads, kv_heads=new.kv_heads))


# What integers of a module are taken for numbers of heads or channels of all heads.
READINGS = ("usual names", "equal widths", "equal numbers")


def read_new_numbers(
    module: nn.Module,
    old: HeadCounts,
    new: HeadCounts,
    lengths: Mapping[int, int],
    reading: str,
) -> dict[str, int]:
    """Return the integers of a module that change with its heads: those that are declared, numbers
    of heads by their usual names, and further ones equal to a width or a number that changes.
    """
    sizes = dict.fromkeys(NUM_KV_HEADS_NAMES, "kv_heads")
    sizes |= dict.fromkeys(NUM_HEADS_NAMES, "heads") | dict.fromkeys(GROUP_SIZE_NAMES, "group")
    values = dict[str, int | None]()
    counts = {count: new.sizes[size] for size, count in reversed(old.sizes.items())}
    for name, value in vars(module).items():
        is_number = type(value) is int and not name.startswith("_")
        if not is_number or name in HEAD_DIM_NAMES or name.endswith(("idx", "window")):
            continue
        if name in sizes:
            if value == old.sizes[sizes[name]]:
                values[name] = new.sizes[sizes[name]]
        elif reading != READINGS[0] and value in lengths:
            values[name] = lengths[value]
        elif reading == READINGS[2] and value in counts:
            values[name] = counts[value]
    projections = get_projections(module)
    for name, size in () if projections is None else projections.attributes.items():
        values[name] = new.sizes.get(size) or lengths.get(getattr(module, name)) or values.get(name)
    return {name: value for name, value in values.items() if value}


class SharedEntries(nn.Module):
    """Parametrization of a projection: entries of the heads in a group are stored once, as the
    mean of the group.

    >>> linear = nn.Linear(3, 4)
    >>> _ = parametrize.register_parametrization(linear, "weight", SharedEntries((0, 1, 0, 1)))
    >>> linear.weight.shape, linear.parametrizations.weight.original.shape
    (torch.Size([4, 3]), torch.Size([2, 3]))
    """

    stored_entry: Tensor

    def __init__(self, stored_entry: Sequence[int], axis: int = 0) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("stored_entry", torch.tensor(list(stored_entry)), persistent=False)

    def forward(self, stored: Tensor) -> Tensor:
        """All entries, from those that are stored."""
        return stored.index_select(self.axis, self.stored_entry)

    def right_inverse(self, entries: Tensor) -> Tensor:
        """The means that are stored for these entries."""
        stored = self.stored_entry
        groups = [(stored == n).nonzero().flatten().tolist() for n in range(int(stored.max()) + 1)]
        return EntryMap(self.axis, tuple(map(tuple, groups))).apply(entries)


def share_entries(model: nn.Module, shared: Mapping[str, SharedEntries]) -> nn.Module:
    """Return a copy whose tensors are computed from entries that are stored once."""
    after = copy_declared(model)
    for tensor_name, sharing in shared.items():
        owner, _, leaf = tensor_name.rpartition(".")
        linear: Any = after.get_submodule(owner)
        needs_grad = after.get_parameter(tensor_name).requires_grad
        parametrize.register_parametrization(linear, leaf, sharing)
        linear.parametrizations[leaf].original.requires_grad_(needs_grad)
    return after


def count_heads(model: nn.Module, site: Site) -> tuple[int, int]:
    """Return the numbers of query and key-value heads of a site, as declared or found."""
    declared = get_projections(model.get_submodule(site.path))
    if declared is not None:
        return declared.heads, declared.num_kv_heads
    return site.heads, site.kv or site.heads
