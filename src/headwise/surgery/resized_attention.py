"""Attention modules with other heads: parameters, sizes and configs of a changed copy, and torch's
MultiheadAttention with a projection of its own for each of q, k and v.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
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
from .head_entries import EntryMap, get_projections, list_head_tensors, list_projections
from .verification.model_comparison import ResultCheck


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


# --- nn.MultiheadAttention with a projection for each side ----------------------------------------


CALL = signature(nn.MultiheadAttention.forward)


class SplitMultiheadAttention(nn.Module):
    """Multi-head attention that is called like nn.MultiheadAttention, with one nn.Linear for each
    of q, k, v and out.

    It takes the place of an nn.MultiheadAttention, also inside nn.Transformer, when heads are
    removed.

    >>> attention = nn.MultiheadAttention(6, 3, batch_first=True).eval()
    >>> split, x = SplitMultiheadAttention(attention), torch.randn(2, 5, 6)
    >>> bool(torch.allclose(split(x, x, x)[0], attention(x, x, x)[0], atol=1e-6))
    True
    """

    # nn.TransformerEncoderLayer reads these before its fused kernel; a layer without them takes its
    # usual steps.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        if original.bias_k is not None or original.add_zero_attn:
            raise SpecError(
                "cannot prune nn.MultiheadAttention with bias_kv or add_zero_attn; build it "
                "without them"
            )
        self.embed_dim = original.embed_dim
        self.num_heads = original.num_heads
        self.batch_first = original.batch_first
        self.dropout = original.dropout
        weights = (
            original.in_proj_weight.chunk(3)
            if original.in_proj_weight is not None
            else (original.q_proj_weight, original.k_proj_weight, original.v_proj_weight)
        )
        biases = (None,) * 3 if original.in_proj_bias is None else original.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(_make_linear, weights, biases)
        self.out_proj = _make_linear(original.out_proj.weight, original.out_proj.bias)
        self.train(original.training)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Outputs and weights for the arguments of nn.MultiheadAttention; `is_causal` needs an
        `attn_mask`.
        """
        call = CALL.bind(self, *args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        is_batched = options["query"].dim() == 3
        if options["is_causal"] and options["attn_mask"] is None:
            raise ValueError("is_causal=True needs attn_mask; give the causal mask")
        q = self._project(self.q_proj, options["query"])
        k = self._project(self.k_proj, options["key"])
        v = self._project(self.v_proj, options["value"])
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self._bias(scores, options["attn_mask"], options["key_padding_mask"], is_batched)
        weights = (scores + bias).softmax(-1)
        heads = F.dropout(weights, self.dropout, self.training) @ v
        y = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not is_batched:
            y = y[0]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        if not options["need_weights"]:
            return y, None
        weights = weights.mean(1) if options["average_attn_weights"] else weights
        return y, weights if is_batched else weights[0]

    def _project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """[B, heads, T, dim] of a projected input."""
        y = linear(x)
        if x.dim() == 2:
            y = y[None]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _bias(
        self, scores: Tensor, attn_mask: Tensor | None, padding: Tensor | None, is_batched: bool
    ) -> Tensor:
        """Both masks as one tensor to add to the scores; True in a boolean mask forbids a pair."""
        bias = scores.new_zeros(())
        if attn_mask is not None:
            mask = _to_bias(attn_mask, scores)
            if mask.dim() == 3:  # one for each row and head
                if mask.shape[0] != scores.shape[0] * self.num_heads:
                    raise ValueError(
                        f"attn_mask has {mask.shape[0]} masks for {scores.shape[0]} rows of "
                        f"{self.num_heads} heads; give one for each row and head that is left"
                    )
                mask = mask.unflatten(0, (scores.shape[0], self.num_heads))
            bias = bias + mask
        if padding is not None:
            mask = _to_bias(padding, scores)
            bias = bias + (mask[:, None, None] if is_batched else mask)
        return bias


def _to_bias(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))


def _make_linear(weight: Any, bias: Any) -> nn.Linear:
    """An nn.Linear with copies of these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    return linear


def split_multihead(model: nn.Module, path: str) -> nn.Module:
    """Replace the nn.MultiheadAttention at a path of a model, and return the new module; other
    modules stay.
    """
    module = model.get_submodule(path)
    if not isinstance(module, nn.MultiheadAttention):
        return module
    if not path:
        raise SpecError(
            "cannot prune nn.MultiheadAttention in place; put it into an nn.Sequential, or "
            "another module"
        )
    parent, _, name = path.rpartition(".")
    new = SplitMultiheadAttention(module)
    setattr(model.get_submodule(parent), name, new)
    for other in model.modules():
        if isinstance(other, nn.TransformerEncoder) and new in other.modules():
            other.use_nested_tensor = False  # only torch's fused layers take nested tensors
    return new
