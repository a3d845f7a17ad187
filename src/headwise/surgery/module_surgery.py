"""Pruning and conversion of heads in any nn.Module.

`head_entries` finds the entries of parameters that belong to heads by gradients on an example; a
changed module keeps some of them or the means of groups. The example then compares the copy with
the original: with ablated heads after pruning, with equal heads in each group after conversion. A
module that does not read its number of key-value heads, such as `nn.MultiheadAttention`, keeps its
shapes when converted: a parametrization stores each shared entry once and repeats it when the
weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..observe.inspect.abilities import kv_sharing_reason, unprunable_reason
from ..observe.inspect.ablation import HeadRef, ablate, group_by_site
from ..observe.inspect.adapters.declarations import copy_declared
from ..observe.inspect.attention_sites import find_attention
from ..observe.inspect.model_inputs import ModelInputs, prepare_inputs
from ..observe.inspect.site import Site
from ..util.errors import SpecError, pluralise
from .conversion import AttentionConversion, Pool, ToMHA, read_conversion, select_sites
from .head_entries import (
    KeyValueRows,
    declared_rows,
    explain_partial_cut,
    find_changed_path,
    find_joined_side,
    find_key_value_rows,
    find_projections,
    find_used_entries,
    list_head_tensors,
    list_projections,
    map_kept_entries,
    record_heads,
    require_gradients,
    with_biases,
)
from .head_grouping import HeadGroups, group_adjacent_heads
from .hf_export.model_folder import OutputFolder, WrittenFolder, write_changed_folder
from .hf_export.module_folder import (
    fill_module_folder,
    find_config,
    with_plain_parameters,
)
from .model_and_texts import OriginalModel, SurgeryResult
from .pruning_plan import HeadId, PruningPlan
from .resized_attention import (
    HeadCounts,
    SharedEntries,
    SiteChange,
    count_heads,
    make_changed,
    share_entries,
    split_multiheads,
)
from .verification.model_comparison import ResultCheck, run_and_record


@dataclass(frozen=True, eq=False, repr=False)
class ModuleChange(SurgeryResult):
    """The changed copy of a model, and the largest difference on the example from what it must
    equal, relative to the largest output.

    `removed_params` is negative if parameters were added. `removed_heads` lists pruned heads,
    `groups` the averaged key-value heads by site. `counts` are the heads of every site before and
    after, `inputs` the example. `equal_heads` are tensors with equal heads in each group, with
    which the model before must equal the converted one. `hw.prune` adds its plan, and the caller's
    tokenizer.
    """

    difference: float
    inputs: ModelInputs
    counts: Mapping[str, tuple[Site, HeadCounts, HeadCounts]]
    removed_heads: tuple[HeadId, ...] = ()
    groups: Mapping[str, HeadGroups] = field(default_factory=dict)
    equal_heads: Mapping[str, Tensor] = field(default_factory=dict)
    plan: PruningPlan | None = None
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        if self.plan is not None:
            return self.plan.summary
        changed = sum(old != new for _, old, new in self.counts.values())
        heads = sum(old.heads for _, old, _ in self.counts.values())
        if self.groups:
            return f"key-value heads of {pluralise(changed, 'layer')} are means of neighbours"
        return f"{heads - len(self.removed_heads)} of {heads} heads kept, all but the listed heads"

    def __str__(self) -> str:
        size = sum(parameter.numel() for parameter in self.before.parameters())
        saved = f"{self.removed_params:,} of {size:,} parameters removed"
        plan_notes = () if self.plan is None else self.plan.notes
        checked = f"outputs differ by {self.difference:.1e} of the largest from those it must equal"
        first = f"{type(self.before).__name__}: {self.summary}; {saved}"
        return "\n".join([first, *plan_notes, *self.notes, checked])

    @property
    def head_rows(self) -> list[tuple[str, int, int, int, int]]:
        rows = list[tuple[str, int, int, int, int]]()
        for name, (_, old, new) in self.counts.items():
            rows.append((name, old.heads, new.heads, old.kv_heads, new.kv_heads))
        return rows

    @property
    def verification_options(self) -> dict[str, Any]:
        keep = dict[str, tuple[int, ...]]()
        for name in dict.fromkeys(name for name, _ in self.removed_heads):
            heads = range(self.counts[name][1].heads)
            keep[name] = tuple(head for head in heads if (name, head) not in self.removed_heads)
        references = {"the model before, with equal heads in each group": self._with_equal_heads}
        return {"keep": keep, "exports": references if self.groups else {}}

    def _with_equal_heads(self) -> nn.Module:
        """Return a copy of the model before with `equal_heads`."""
        reference = copy_declared(self.before)
        for name, tensor in self.equal_heads.items():
            reference.get_parameter(name).data = tensor
        return reference

    @property
    def data(self) -> dict[str, Any]:
        """The change as JSON-serialisable values."""
        heads = {name: list(map(list, pair)) for name, (_, *pair) in self.counts.items()}
        return {
            "operation": "convert" if self.groups else "prune",
            "removed_heads": [list(head) for head in self.removed_heads],
            "groups": {name: list(map(list, one)) for name, one in self.groups.items()},
            "heads": heads,
            "difference": self.difference,
            "reason": self.summary,
            "notes": [*self.notes, *(() if self.plan is None else self.plan.notes)],
        }

    def forecast_folder(self, source: Path | None) -> str | None:
        after, is_stored_once = with_plain_parameters(self.before, self.after)
        return "" if is_stored_once else find_config(after, self.counts)[1]

    def write_folder(
        self, after: Any, target: OutputFolder, record: Mapping[str, Any]
    ) -> WrittenFolder:
        if getattr(after, "save_pretrained", None) is None:
            raise SpecError(
                f"{type(after).__name__} has no save_pretrained and config of transformers; "
                "save its state_dict, and apply the change again to load it"
            )
        models = (self.before, after, self.original.tokenizer)
        write = partial(fill_module_folder, *models, self.counts, self.inputs)
        return write_changed_folder(target, record, write)


# --- Verbs ----------------------------------------------------------------------------------------


def prune_module(model: nn.Module, heads: Iterable[HeadRef], example: Any) -> ModuleChange:
    """Return a copy of any model without these heads, at sites with declared or conventionally
    named projections.

    A head is (layer, head) or (site name, head), as for `hw.ablate`. The copy must equal the
    ablated model on `example`, an input of the model. Raises if it does not, for example because
    `AttentionSite(attributes=...)` misses a size that the forward reads. `model` is not changed,
    and the copy is declared as well.

    >>> import headwise as hw, torch
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix, self.last, self.num_heads = nn.Linear(6, 18), nn.Linear(6, 6), 3
    ...
    ...     def forward(self, x):
    ...         q, k, v = self.mix(x).unflatten(-1, (3, self.num_heads, 2)).permute(2, 0, 3, 1, 4)
    ...         z = nn.functional.scaled_dot_product_attention(q, k, v)
    ...         return self.last(z.transpose(1, 2).flatten(2))
    >>> net = nn.Sequential(Mine()).eval()
    >>> hw.declare(net[0], hw.AttentionSite(q="mix", k="mix", v="mix", out="last", heads=3))
    >>> done = prune_module(net, [(0, 1)], torch.randn(2, 5, 6))
    >>> done.removed_params, done.after[0].num_heads
    (54, 2)
    """
    sites = _find_sites(model)
    removed = group_by_site(model, find_attention(model), heads)
    if not removed:
        raise SpecError("no head would be removed; name heads as (layer, head)")
    pairs = chain.from_iterable(product((name,), sorted(removed[name])) for name in removed)
    names = tuple(pairs)
    counts = dict[str, tuple[HeadCounts, HeadCounts]]()
    for name, dropped in removed.items():
        check_changeable(model, sites, name)
        old = HeadCounts(*count_heads(model, sites[name]))
        counts[name] = (old, old.without(name, dropped))
        check_sharing(model, sites[name], *counts[name])
    inputs = prepare_inputs(model, example, 0)
    paths = sorted(find_changed_path(model, sites[name]) for name in removed)
    with ablate(model, names):
        expected = run_and_record(model, inputs, paths)
    source = split_multiheads(model, [sites[name] for name in removed])
    with ablate(source, names):
        ablated = _find_used(source, sites, removed, inputs)
    used = _find_used(source, sites, removed, inputs)
    maps = with_biases(source, dict(map_kept_entries(used, ablated)))
    _check_untied(source, maps)
    changes = {name: (sites[name], *pair, maps) for name, pair in counts.items()}
    check = ResultCheck("pruned", "ablated one", PRUNING_REMEDY, expected, inputs, paths)
    try:
        after, difference = make_changed(source, changes, check)
    except SpecError as error:
        reason = explain_partial_cut(used, ablated, maps)
        reason = reason or _explain_joined_heads(model, removed, inputs)
        if not reason:
            raise
        raise SpecError(
            f"cannot prune {names[0][0]}: {reason}; ablate them instead (hw.ablate)"
        ) from error
    every = _count_all(model, sites, counts)
    original = OriginalModel(model)
    return ModuleChange(model, after, original, difference, inputs, every, removed_heads=names)


PRUNING_REMEDY = "name the sizes that its forward reads in AttentionSite(attributes=...)"
CONVERSION_REMEDY = (
    "name the sizes that its forward reads in AttentionSite(attributes=...), or declare its "
    "projections with hw.AttentionSite"
)


def convert_module(
    model: nn.Module, conversion: AttentionConversion | int, example: Any, *, kind: str = "all"
) -> ModuleChange:
    """Return a copy of any model with `conversion` key-value heads per attention, each the mean of
    neighbours.

    `conversion` is a number, `Pool(number)` or, for modules that read their number of key-value
    heads, `ToMHA()`. It applies to all sites, or to one `kind`, "self" or "cross". On `example`, an
    input of the model, the copy must equal the model with full projections and equal heads per
    group. `model` is not changed. A copy made of another model of the same class has the same
    parameters, so that it can load the state dict of the result.

    >>> import torch
    >>> attention = nn.TransformerEncoder(
    ...     nn.TransformerEncoderLayer(8, 4, 12, batch_first=True), 2
    ... ).eval()
    >>> done = convert_module(attention, 2, torch.randn(2, 5, 8))
    >>> done.removed_params, done.groups["model.0.attention"]
    (144, ((0, 1), (2, 3)))
    """
    strategy = read_conversion(conversion)
    is_pool = isinstance(strategy, Pool) and not strategy.needs_statistics
    if not is_pool and not isinstance(strategy, ToMHA):
        raise SpecError(
            f"{strategy!r} needs layers of headwise; of other modules, heads can be averaged with "
            "neighbours: give a number of key-value heads"
        )
    sites = _find_sites(model)
    chosen = select_sites(type(model).__name__, sites, kind)
    readable = [name for name in chosen if sites[name].observe.possible]
    chosen = readable or chosen  # recurrent mixers of hybrids have calls that cannot be read
    inputs = prepare_inputs(model, example, 0)
    groups = dict[str, HeadGroups]()
    counts = dict[str, tuple[HeadCounts, HeadCounts]]()
    for name in chosen:
        old = HeadCounts(*count_heads(model, sites[name]))
        groups[name] = _group_heads(name, old, strategy)
        counts[name] = (old, HeadCounts(old.heads, len(groups[name])))
        check_sharing(model, sites[name], *counts[name])
    rows = _find_rows(model, sites, chosen, inputs)
    changes = dict[str, SiteChange]()
    shared = dict[str, SharedEntries]()
    for name in chosen:
        _check_rows_of_all(name, rows[name], counts[name][0].kv_heads)
        maps = {tensor: one.pool(groups[name]) for tensor, one in rows[name].items()}
        changes[name] = (sites[name], *counts[name], maps)
        if isinstance(strategy, Pool):
            for tensor, one in rows[name].items():
                device = model.get_parameter(tensor).device
                shared[tensor] = SharedEntries(one.share(groups[name]), one.axis).to(device)
    if all(old == new for old, new in counts.values()):
        raise SpecError(
            f"nothing would change: attentions of {type(model).__name__} have "
            f"{pluralise(len(groups[chosen[0]]), 'key-value head')} already; give fewer"
        )
    paths = [find_changed_path(model, sites[name]) for name in chosen]
    equal_heads = dict[str, Tensor]()
    for tensor, sharing in shared.items():
        equal_heads[tensor] = sharing(sharing.right_inverse(model.get_parameter(tensor).detach()))
    expected = run_and_record(model, inputs, paths, equal_heads)
    check = ResultCheck(
        "converted", "one with equal heads", CONVERSION_REMEDY, expected, inputs, paths
    )
    try:
        after, difference = make_changed(model, changes, check)
    except SpecError:
        if isinstance(strategy, ToMHA):
            kind_name = type(model.get_submodule(paths[0])).__name__
            raise SpecError(
                f"cannot convert {paths[0]} to MHA: {kind_name} does not read a number"
                " of key-value heads; name it in AttentionSite(attributes={...: 'kv_heads'})"
            ) from None
        after = share_entries(model, shared)  # its forward needs all entries
        difference = check.compare(after)
    every = _count_all(model, sites, counts)
    original = OriginalModel(model)
    changed = ModuleChange(model, after, original, difference, inputs, every, groups=groups)
    return replace(changed, equal_heads=equal_heads)


def _check_rows_of_all(name: str, rows: Mapping[str, KeyValueRows], num_heads: int) -> None:
    """Refuse a site whose heads have tensors of their own, which no mean of rows replaces."""
    for tensor, one in rows.items():
        if len({*one.labels} - {-1}) < num_heads:
            raise SpecError(
                f"cannot convert {name}: {tensor} belongs to some of its heads alone, as a norm "
                "for each head does; leave it as it is"
            )


def _group_heads(name: str, old: HeadCounts, strategy: AttentionConversion) -> HeadGroups:
    """Return the old key-value heads of each new one."""
    if isinstance(strategy, Pool):
        try:
            return group_adjacent_heads(old.kv_heads, strategy.kv)
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
    if old.heads == old.kv_heads:
        raise SpecError(
            f"cannot convert {name} to MHA: each query head has its own keys and values; leave "
            "it as it is"
        )
    return tuple((head * old.kv_heads // old.heads,) for head in range(old.heads))


def _find_sites(model: nn.Module) -> dict[str, Site]:
    if model.training:
        raise SpecError(
            "the model is in train mode, where outputs are random; call model.eval() first"
        )
    return {site_module.site.name: site_module.site for site_module in find_attention(model)}


def _count_all(
    model: nn.Module,
    sites: Mapping[str, Site],
    changed: Mapping[str, tuple[HeadCounts, HeadCounts]],
) -> dict[str, tuple[Site, HeadCounts, HeadCounts]]:
    """Return the heads of every site whose calls can be read, or which changes, before and
    after.
    """
    every = dict[str, tuple[Site, HeadCounts, HeadCounts]]()
    for name, site in sites.items():
        if name in changed or site.observe.possible:
            same = HeadCounts(*count_heads(model, site))
            every[name] = (site, *changed.get(name, (same, same)))
    return every


# --- Projections ----------------------------------------------------------------------------------


def check_changeable(model: nn.Module, sites: Mapping[str, Site], name: str) -> None:
    """Raise if weights of a site are computed from others or cannot be changed, or if its module
    runs at several depths.
    """
    site = sites[name]
    for path, child in model.get_submodule(site.path).named_modules():
        if parametrize.is_parametrized(child):
            raise SpecError(
                f"cannot change {name}: weights of {path or 'it'} are computed from others "
                "(parametrization), as after hw.convert_module; change the original model"
            )
    reason = unprunable_reason([model.get_submodule(site.path)])
    if reason:
        raise SpecError(f"cannot change {name}: {reason}")
    if site.same_as is not None or any(other.same_as == name for other in sites.values()):
        raise SpecError(f"cannot change {name}: its module runs at several depths; copy it first")


def check_sharing(model: nn.Module, site: Site, old: HeadCounts, new: HeadCounts) -> None:
    """Raise if key-value heads change that layers share."""
    reason = kv_sharing_reason([model.get_submodule(site.path)])
    if reason and old.kv_heads != new.kv_heads:
        raise SpecError(
            f"cannot change the key-value heads of {site.name}: {reason}; remove the same "
            "number of query heads of each"
        )


def _check_untied(model: nn.Module, names: Iterable[str]) -> None:
    """Raise if one of these tensors is also used under another name."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    path_of_tensor = {id(tensors[name]): name for name in names if name in tensors}
    for path, tensor in tensors.items():
        if path_of_tensor.get(id(tensor), path) != path:
            raise SpecError(
                f"cannot change {path_of_tensor[id(tensor)]}: {path} has the same weights; untie "
                "them first"
            )


def _find_used(
    model: nn.Module, sites: Mapping[str, Site], names: Iterable[str], inputs: ModelInputs
) -> dict[str, Tensor]:
    """Return where the outputs depend on tensors that heads of these sites may have entries of."""
    tensors = chain.from_iterable(list_head_tensors(model, sites[name]) for name in names)
    paths = [find_changed_path(model, sites[name]) for name in names]
    leaves = require_gradients(model, list(tensors))
    return find_used_entries(lambda one: run_and_record(model, inputs, paths, one), leaves)


def _explain_joined_heads(model: nn.Module, names: Iterable[str], inputs: ModelInputs) -> str:
    """Return why heads of these sites cannot be separated; "" if it is not seen in their calls."""
    readable = [one for one in find_attention(model) if one.site.name in names]
    readable = [one for one in readable if one.site.observe.possible]
    for one in readable:
        tensors = require_gradients(model, list_head_tensors(model, one.site))
        for sides in record_heads(model, [one], inputs, tensors).values():
            reason = find_joined_side(sides, tensors)
            if reason:
                return reason
    return ""


def _find_rows(
    model: nn.Module, sites: Mapping[str, Site], chosen: Iterable[str], inputs: ModelInputs
) -> dict[str, dict[str, KeyValueRows]]:
    """Return the entries of keys and values of each site by tensor: read from the calls of the
    model, or where these cannot be read, from declared or conventionally named projections.
    """
    rows = dict[str, dict[str, KeyValueRows]]()
    modules = {one.site.name: one for one in find_attention(model)}
    tensors_of_site = dict[str, dict[str, Tensor]]()
    for name in chosen:
        check_changeable(model, sites, name)
        if modules[name].adapter == "transformers" and sites[name].observe.possible:
            names = list_head_tensors(model, sites[name])
            tensors_of_site[name] = require_gradients(model, names)
    every = dict(chain.from_iterable(one.items() for one in tensors_of_site.values()))
    recorded = record_heads(model, [modules[name] for name in tensors_of_site], inputs, every)
    for name, sides in recorded.items():
        keys_and_values = {side: sides[side] for side in ("keys", "values")}
        reason = find_joined_side(keys_and_values, tensors_of_site[name])
        if reason:
            raise SpecError(f"cannot convert {name}: {reason}; leave them as they are")
        rows[name] = find_key_value_rows(tensors_of_site[name], sides)
    for name in chosen:
        if name not in rows:
            proposed = list_projections(model, sites[name])
            projections = find_projections(model, sites[name], proposed, inputs)
            rows[name] = declared_rows(model, sites[name].path, projections)
        _check_untied(model, rows[name])
    return rows
