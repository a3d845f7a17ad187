"""Entries of parameters that belong to heads, found by gradients instead of names and layouts.

An entry of a parameter belongs to removed heads if the outputs depend on it, but not while these
heads are ablated. An entry belongs to a key-value head if its keys or values depend on it and
those of other heads do not. So a projection may hold queries with gates, latents or several sides
in any order, and sinks, norms and tables of biases are found too. Declared projections name their
rows of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..observe.inspect.ablation import ablate
from ..observe.inspect.adapters.declarations import (
    OUTPUT_PROJECTION_NAMES,
    AttentionSite,
    get_declaration,
    propose_sites,
)
from ..observe.inspect.adapters.output_path import edits_at_function
from ..observe.inspect.hooks import AttentionHook, SiteModule, hook_sites
from ..observe.inspect.model_inputs import ModelInputs
from ..observe.inspect.site import AttentionInputs, ObservedCall, Site
from ..util.errors import SpecError
from .head_grouping import HeadGroups
from .verification.model_comparison import NO_TENSORS, TOLERANCE, largest_difference, run_and_record


@dataclass(frozen=True)
class EntryMap:
    """New entries of a tensor along one axis: each is the mean of some old ones.

    >>> EntryMap(0, ((0,), (1, 2))).apply(torch.tensor([5.0, 1.0, 3.0]))
    tensor([5., 2.])
    """

    axis: int
    sources: HeadGroups

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the tensor with the new entries."""
        sizes = [len(group) for group in self.sources]
        targets = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        indices = torch.tensor(list(chain.from_iterable(self.sources)))
        shape = list(tensor.shape)
        shape[self.axis] = len(sizes)
        old = tensor.detach().index_select(self.axis, indices.to(tensor.device))
        sums = old.new_zeros(shape).index_add_(self.axis, targets.to(tensor.device), old)
        view = [1] * tensor.dim()
        view[self.axis] = -1
        return sums / torch.tensor(sizes, dtype=sums.dtype, device=sums.device).view(view)


def list_head_tensors(model: nn.Module, site: Site) -> list[str]:
    """Return the names of the parameters and buffers that heads of a site may have entries of:
    those of its module, and of an output projection beside it.
    """
    parent = site.path.rpartition(".")[0]
    has_sibling = "Attention" in type(model.get_submodule(parent)).__name__
    siblings = [name[1:] for name in OUTPUT_PROJECTION_NAMES if name.startswith("^")]
    places = {f"{parent}.{name}" for name in siblings} if has_sibling and parent else set[str]()
    prefix = f"{site.path}." if site.path else ""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return [
        name
        for name, tensor in tensors
        if tensor.is_floating_point()
        and (name.startswith(prefix) or name.rpartition(".")[0] in places)
    ]


def find_changed_path(model: nn.Module, site: Site) -> str:
    """Return the path of the module whose output does not change its shape with heads: that of the
    site, or its parent if the output projection is beside it.
    """
    is_within = all(name.startswith(f"{site.path}.") for name in list_head_tensors(model, site))
    return site.path if is_within or not site.path else site.path.rpartition(".")[0]


def require_gradients(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return copies of these tensors that gradients can be taken for."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: state[name].detach().clone().requires_grad_() for name in names}


def find_used_entries(
    run: Callable[[Mapping[str, Tensor]], Sequence[Tensor]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return for each tensor where the outputs of a run depend on its entries."""
    outputs = [output for output in run(tensors) if output.requires_grad]
    return dependence(outputs, tensors, torch.Generator().manual_seed(0))


@torch.enable_grad()
def dependence(
    outputs: Sequence[Tensor], tensors: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Return where the gradient of a random sum of these outputs is not zero."""
    sums = []
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        sums.append((output * weights.to(output)).sum())
    if not sums:
        return {name: torch.zeros_like(one, dtype=torch.bool) for name, one in tensors.items()}
    gradients = torch.autograd.grad(
        sums, list(tensors.values()), allow_unused=True, retain_graph=True
    )
    used = dict[str, Tensor]()
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        used[name] = torch.zeros_like(tensor) != 0 if gradient is None else gradient != 0
    return used


def map_kept_entries(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> Iterator[tuple[str, EntryMap]]:
    """Yield the tensors with entries that were used `before` heads were ablated and are not used
    `after`, with the map that leaves these out.

    >>> used, still = torch.ones(2, 3) > 0, torch.tensor([[1, 0, 1], [1, 0, 1]]) > 0
    >>> list(map_kept_entries({"out": used}, {"out": still}))
    [('out', EntryMap(axis=1, sources=((0,), (2,))))]
    """
    for name, used in before.items():
        for axis in range(used.dim()):
            unused = _along(used, axis) & ~_along(after[name], axis)
            entries_left = (~unused).nonzero().flatten().tolist()
            if 0 < len(entries_left) < used.shape[axis]:
                yield name, EntryMap(axis, tuple((index,) for index in entries_left))


def explain_partial_cut(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], maps: Mapping[str, EntryMap]
) -> str:
    """Return which tensor holds removed heads in parts of rows and columns; "" if none does."""
    for name, used in before.items():
        if name not in maps and bool((used & ~after[name]).any()):
            return f"{name} holds the removed heads in neither whole rows nor whole columns"
    return ""


def with_biases(model: nn.Module, maps: Mapping[str, EntryMap]) -> dict[str, EntryMap]:
    """Return the maps with those of the biases of their projections, whose gradient may vanish: a
    bias of all keys does not change attention weights.
    """
    complete = dict(maps)
    for name, entries in maps.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        output_axis = 1 if type(owner).__name__ == "Conv1D" else 0
        bias = getattr(owner, "bias", None)
        is_output = leaf == "weight" and entries.axis == output_axis and isinstance(bias, Tensor)
        if is_output and getattr(owner, leaf).dim() == 2:
            complete[f"{path}.bias" if path else "bias"] = EntryMap(0, entries.sources)
    return complete


def _along(used: Tensor, axis: int) -> Tensor:
    """Return which entries along an axis are used anywhere."""
    return used.movedim(axis, 0).flatten(1).any(1) if used.dim() > 1 else used


# --- Keys and values ------------------------------------------------------------------------------


class CallRecorder(AttentionHook):
    """Keep the inputs of the last attention call."""

    inputs: AttentionInputs | None = None

    def on_call(self, call: ObservedCall, /) -> None:
        self.inputs = call.attention_inputs


def record_heads(
    model: nn.Module,
    site_modules: Sequence[SiteModule],
    inputs: ModelInputs,
    tensors: Mapping[str, Tensor],
) -> dict[str, Mapping[str, Tensor]]:
    """Return queries, keys and values of each site by head, [B, S, heads, dim], from a run with
    these tensors; sites whose calls cannot be read are left out.
    """
    recorders = {site_module.site.name: CallRecorder() for site_module in site_modules}
    with torch.enable_grad(), hook_sites(model, site_modules, recorders):
        functional_call(model, dict(tensors), inputs.args, dict(inputs.kwargs))
    recorded = {name: recorder.inputs for name, recorder in recorders.items()}
    return {
        name: {"queries": one.q_BTHK, "keys": one.k_BSGK, "values": one.v_BSGV}
        for name, one in recorded.items()
        if one is not None
    }


@torch.enable_grad()
def find_joined_side(sides: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Return which of these sides has heads that depend on the rows of other heads, as behind a
    norm over all heads; "" if none has.
    """
    for side, heads in sides.items():
        used = dependence([heads[:, :, 0]], tensors, torch.Generator().manual_seed(0))
        has_own_rows = heads.shape[2] == 1
        for one in used.values():
            for axis in range(one.dim() if one.dim() > 1 else 0):
                has_own_rows |= 0 < int(_along(one, axis).sum()) < one.shape[axis]
        if not has_own_rows:
            return f"{side} of a head depend on rows of all heads, as behind a norm over all heads"
    return ""


class KeyValueRows:
    """The entries of a tensor along one axis that belong to a key-value head; `labels` holds its
    number, or -1.
    """

    def __init__(self, axis: int, labels: list[int]) -> None:
        self.axis = axis
        self.labels = labels

    def sweeps(self) -> list[dict[int, list[int]]]:
        """Return the entries by head for each pass over the heads, as k and v in one projection.

        >>> KeyValueRows(0, [-1, 0, 1, 0, 1]).sweeps()
        [{0: [1], 1: [2]}, {0: [3], 1: [4]}]
        """
        passes = list[dict[int, list[int]]]()
        last = -1
        for index, label in enumerate(self.labels):
            if label < 0:
                continue
            if not passes or label < last:
                passes.append({})
            passes[-1].setdefault(label, []).append(index)
            last = label
        return passes

    def pool(self, groups: HeadGroups) -> EntryMap:
        """Return the map to new heads, each the mean of a group of old ones."""
        sources = list[tuple[int, ...]]()
        starts = {min(heads[min(heads)]): heads for heads in self.sweeps()}
        for index, label in enumerate(self.labels):
            if label < 0:
                sources.append((index,))
            for group in groups if index in starts else ():
                rows = [starts[index][head] for head in group]
                sources += zip(*rows, strict=True)
        return EntryMap(self.axis, tuple(sources))

    def share(self, groups: HeadGroups) -> list[int]:
        """Return for each entry the number of the stored entry that it reads, if those of a group
        are stored once.
        """
        group_of_head = dict[int, tuple[int, ...]]()
        for group in groups:
            group_of_head |= dict.fromkeys(group, group)
        first = dict[tuple[Any, ...], int]()
        rank = dict[int, tuple[int, int]]()
        for number, heads in enumerate(self.sweeps()):
            for rows in heads.values():
                rank |= {index: (number, place) for place, index in enumerate(rows)}
        stored = list[int]()
        for index, label in enumerate(self.labels):
            key = (index,) if label < 0 else (*rank[index], group_of_head[label])
            stored.append(first.setdefault(key, len(first)))
        return stored


@torch.enable_grad()
def find_key_value_rows(
    tensors: Mapping[str, Tensor], sides: Mapping[str, Tensor]
) -> dict[str, KeyValueRows]:
    """Return which entries of these tensors belong to one head of the keys or values that were
    computed from them.
    """
    generator = torch.Generator().manual_seed(0)
    labels = dict[tuple[str, int], Tensor]()
    for heads in (sides["keys"], sides["values"]):
        used = [dependence([heads[:, :, n]], tensors, generator) for n in range(heads.shape[2])]
        axes = list[tuple[str, int]]()
        for name, one in tensors.items():
            axes += [(name, axis) for axis in range(one.dim())]
        for name, axis in axes if len(used) > 1 else ():
            users = torch.stack([_along(one[name], axis) for one in used])
            is_own = users.sum(0) == 1
            if bool(is_own.any()):
                old = labels.get((name, axis), torch.full_like(users[0], -1, dtype=torch.long))
                labels[name, axis] = torch.where(is_own, users.int().argmax(0), old)
    return {name: KeyValueRows(axis, one.tolist()) for (name, axis), one in labels.items()}


# --- Declared projections -------------------------------------------------------------------------


def list_blocks(site: AttentionSite, q: int, kv: int) -> dict[str, list[tuple[str, int]]]:
    """Return side and head of each block of rows of each projection, for these numbers of heads.

    >>> list_blocks(AttentionSite("qkv", "qkv", "qkv", "out", heads=2), 2, 1)
    {'qkv': [('q', 0), ('q', 1), ('k', 0), ('v', 0)]}
    """
    counts = {"q": q, "k": kv, "v": kv}
    sides = [list(product((side,), range(count))) for side, count in counts.items()]
    if not site.is_fused:
        return dict(zip((site.q, site.k, site.v), sides, strict=True))
    if site.fused == "by head" and q == kv:
        sides = list(map(list, zip(*sides, strict=True)))
    return {site.q: list(chain.from_iterable(sides))}


def get_projections(module: nn.Module) -> AttentionSite | None:
    """Return the declared projections of a module, if any."""
    declaration = get_declaration(module)
    return None if declaration is None else declaration.projections


def list_projections(model: nn.Module, site: Site) -> list[AttentionSite]:
    """Return the declared projections of a site, or those that its names and sizes allow; raises if
    there are none.
    """
    module = model.get_submodule(site.path)
    if isinstance(module, nn.MultiheadAttention):
        return [AttentionSite("q_proj", "k_proj", "v_proj", "out_proj", heads=module.num_heads)]
    declared = get_projections(module)
    proposed = [declared] if declared else propose_sites(module, site.heads, site.kv or site.heads)
    proposed = list(proposed)
    if not proposed:
        raise SpecError(
            f"cannot change {site.name}: its projections are not declared; call "
            "hw.declare(module, hw.AttentionSite(q=..., k=..., v=..., out=..., heads=...))"
        )
    return proposed


def declared_rows(
    model: nn.Module, path: str, projections: AttentionSite
) -> dict[str, KeyValueRows]:
    """Return the rows of declared projections that belong to key-value heads."""
    rows = dict[str, KeyValueRows]()
    blocks = list_blocks(projections, projections.heads, projections.num_kv_heads)
    for projection, sides in blocks.items():
        labels = [-1 if side == "q" else head for side, head in sides]
        for name in _row_tensors(model, path, projection):
            width = len(model.get_parameter(name)) // len(labels)
            if max(labels) >= 0:
                repeated = chain.from_iterable([label] * width for label in labels)
                rows[name] = KeyValueRows(0, list(repeated))
    return rows


def find_projections(
    model: nn.Module, site: Site, proposed: Sequence[AttentionSite], inputs: ModelInputs
) -> AttentionSite:
    """Return the first proposed projections with the claimed row-to-head layout. Raises if there
    are none.

    While the query heads of a key-value head are ablated, the outputs must not depend on their rows
    of q, k and v. If these are one projection, the outputs must be affine in the rows of v; they
    are not affine in the rows of q and k.
    """
    module = model.get_submodule(site.path)
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None:
            raise SpecError(
                f"cannot convert {site.name}: its bias_kv differs between heads; build it without "
                "add_bias_kv"
            )
        fused = "in_proj_weight" if module.in_proj_weight is not None else ""
        q, k, v = (fused or f"{side}_proj_weight" for side in "qkv")
        return AttentionSite(q, k, v, "out_proj", heads=module.num_heads)

    def run(tensors: Mapping[str, Tensor] = NO_TENSORS) -> list[Tensor]:
        return run_and_record(model, inputs, [site.path], tensors)

    def edit_rows(
        is_chosen: Callable[[str, int], bool], edit: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Parameters of q, k and v with edited rows of the chosen sides and heads."""
        edited = dict[str, Tensor]()
        all_blocks = list_blocks(projections, projections.heads, projections.num_kv_heads)
        for projection, blocks in all_blocks.items():
            rows = [number for number, block in enumerate(blocks) if is_chosen(*block)]
            for name in _row_tensors(model, site.path, projection):
                edited[name] = model.get_parameter(name).detach().clone()
                parts = edited[name].unflatten(0, (len(blocks), -1))
                parts[rows] = edit(parts[rows])
        return edited

    for projections in proposed:
        group = {"q": site.heads // projections.num_kv_heads, "k": 1, "v": 1}
        scrambled = edit_rows(
            lambda side, head, group=group: head < group[side], lambda rows: 1 - 3 * rows.flip(-1)
        )
        if largest_difference(run(scrambled), run()) <= TOLERANCE:
            names = f"{projections.q}, {projections.k} and {projections.v}"
            raise SpecError(
                f"cannot convert {site.name}: its output does not depend on {names} on this "
                "example; give another"
            )
        # behind a norm over all heads, outputs would depend on the ablated group
        first_heads = [(site.name, head) for head in range(group["q"])]
        with edits_at_function(), ablate(model, first_heads):
            belong_to_heads = largest_difference(run(scrambled), run()) <= TOLERANCE
        if belong_to_heads and projections.is_fused:
            none, once, twice = (
                run(
                    edit_rows(
                        lambda side, _: side == "v", lambda rows, factor=factor: rows * factor
                    )
                )[0]
                for factor in (0, 1, 2)
            )
            belong_to_heads = largest_difference([twice - once], [once - none]) <= TOLERANCE
        if belong_to_heads:
            return projections
    raise SpecError(
        f"cannot convert {site.name}: rows of {proposed[0].q} do not belong to {site.heads} heads "
        "of q, k and v in order; declare its projections with "
        "hw.declare(module, hw.AttentionSite(...))"
    )


def _row_tensors(model: nn.Module, path: str, projection: str) -> list[str]:
    """Return the names of the model parameters that hold the rows of one projection of the module
    at `path`.
    """
    module = model.get_submodule(path)
    if isinstance(module, nn.MultiheadAttention):
        has_bias = projection == "in_proj_weight" and module.in_proj_bias is not None
        names = [projection, *(["in_proj_bias"] if has_bias else [])]
    else:
        linear = module.get_submodule(projection)
        names = [f"{projection}.{name}" for name, _ in linear.named_parameters(recurse=False)]
    return [f"{path}.{name}" if path else name for name in names]
