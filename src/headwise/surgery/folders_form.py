"""A model in the plainest words that say it: heads in the order of what they read, and nothing said that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..axes import transform_axes, select_heads
from ..blueprint import ModelSpec
from ..blueprint.stack import group_blocks
from ..hub.plan import WeightNames
from ..models import Transformer
from ..registry import field_defaults
from ..seams import Part
from ..spec import SLOTS, AttentionSpec

SpecByName = Mapping[str, AttentionSpec]


@dataclass(frozen=True)
class CanonicalForm:
    """A description, and every tensor of it by name."""

    model_spec: ModelSpec
    tensors: Mapping[str, Tensor]

    def find_extra_constants(self, names: WeightNames) -> dict[str, Tensor]:
        """Numbers that files of this kind do not hold, and that do not follow from the description either."""
        return {
            f"{site}.{key}": held
            for site, spec in self.model_spec.attention_specs()
            for key, param in spec.params().items()
            if not param.trainable and names.find_location(f"{site}.{key}") is None
            if not torch.equal(
                held := self.tensors[f"{site}.{key}"].cpu(), param.init(spec.shapes()[key]).to(held.dtype)
            )
        }


def to_canonical_form(net: Transformer) -> CanonicalForm:
    """The same function: heads of a layer stand in order, a shared table holds what is read of it, parts say no more
    than they must.

    >>> import headwise as hw
    >>> from headwise.blueprint import Block, Embedding, Stack
    >>> spec = hw.design(model=8, heads=4, kv=2, dim=3).with_heads(reads=(0, 1, 0, 1))
    >>> stack = Stack.of("decoder", 8, [Block(spec)], embedding=Embedding(5))
    >>> [(_, sorted_spec)] = to_canonical_form(hw.build(ModelSpec("x", "decoder", (stack,)))).described.specs()
    >>> sorted_spec.heads
    Heads.grouped(q=4, kv=2, dim=3)
    """
    form = CanonicalForm(net.described, {name: tensor.detach() for name, tensor in net.state_dict().items()})
    for step in (_sort_heads, _narrow_tables, _drop_defaults):
        form = step(form)
    return form


def replace_specs(model_spec: ModelSpec, specs: SpecByName) -> ModelSpec:
    """The model with these attentions, by name, in the place of its own."""
    stacks = []
    for stack in model_spec.stacks:
        blocks = [
            replace(block, **{role: specs[f"{stack.name}.{depth}.{role}"] for role in block.attention_specs})
            for depth, block in enumerate(stack.layers)
        ]
        stacks.append(replace(stack, runs=group_blocks(blocks)))
    return replace(model_spec, stacks=tuple(stacks))


def _site_tensors(form: CanonicalForm, site: str, spec: AttentionSpec) -> dict[str, Tensor]:
    """Every tensor that an attention reads; one that layers share is found where it first stands."""
    stack = site.split(".")[0]
    found = dict[str, Tensor]()
    for key in spec.params():
        shared = (name for name in form.tensors if name.startswith(f"{stack}.") and name.endswith(f".{key}"))
        found[key] = form.tensors[name if (name := f"{site}.{key}") in form.tensors else next(shared)]
    return found


# --- heads in order ------------------------------------------------------------------------------------


def _sort_heads(form: CanonicalForm) -> CanonicalForm:
    """Query heads sorted by what they read, and key-value heads by who reads them first."""
    specs, tensors = dict(form.model_spec.attention_specs()), dict(form.tensors)
    if form.model_spec.approximation_reasons():
        return form
    for site, spec in specs.items():
        heads, weights = spec.heads, _site_tensors(form, site, spec)
        if heads.values or spec.score_head_of_output != tuple(range(heads.q)):
            continue
        columns = next((weights[key].tolist() for key, _, _ in list_index_constants(spec)), list(heads.reads))
        by_column = heads.kv == heads.q
        order = sorted(range(heads.q), key=lambda h: columns[h] if by_column else heads.reads[h])
        groups = list(dict.fromkeys(heads.reads[h] for h in order))
        if order == sorted(order) and groups == sorted(groups):
            continue
        reads = tuple(groups.index(heads.reads[h]) for h in order)
        moved = transform_axes(spec, weights, {"q": select_heads(order), "out": select_heads(order), "kv": select_heads(groups)})
        specs[site] = replace(spec, heads=replace(heads, reads=reads))
        tensors |= {name: moved[key] for key in moved if (name := f"{site}.{key}") in tensors}
    return CanonicalForm(replace_specs(form.model_spec, specs), tensors)


# --- tables that layers share --------------------------------------------------------------------------


def list_index_constants(spec: AttentionSpec) -> Iterator[tuple[str, str, str]]:
    """Constants that say for each head which index of a shared table it reads: constant, table, and the axis of it."""
    for name, part in spec.parts():
        params = part.params(spec)
        own = {key for key, param in params.items() if param.layout.axes == ("q",) and not param.trainable}
        tables = {key: param.layout.axes for key, param in params.items() if param.tied_to}
        for table, axes in tables.items():
            yield from ((f"{name}.{axis}", f"{name}.{table}", axis) for axis in axes if axis in own)


def _narrow_tables(form: CanonicalForm) -> CanonicalForm:
    """A table of which all layers of a stack read the same indices holds these alone."""
    specs, tensors = dict(form.model_spec.attention_specs()), dict(form.tensors)
    for stack in form.model_spec.stacks:
        own = {site: spec for site, spec in specs.items() if site.startswith(f"{stack.name}.")}
        for constant, table, axis in {row for spec in own.values() for row in list_index_constants(spec)}:
            sites = [site for site, spec in own.items() if constant in spec.params()]
            read = {tuple(tensors[f"{site}.{constant}"].tolist()) for site in sites}
            owner = next(f"{site}.{table}" for site in sites if f"{site}.{table}" in tensors)
            layout = own[sites[0]].params()[table].layout
            size = tensors[owner].shape[layout.axes.index(axis)]
            if len(read) > 1 or (kept := sorted(next(iter(read)))) != sorted(set(kept)) or len(kept) == size:
                continue
            fitted = {site: _fit_axis(own[site], constant.split(".")[0], axis, len(kept)) for site in sites}
            if not all(fitted.values()):
                continue
            specs |= {site: spec for site, spec in fitted.items() if spec}
            tensors[owner] = select_heads(kept)(tensors[owner], layout.axes.index(axis)).clone()
            for site in sites:
                held = tensors[f"{site}.{constant}"]
                tensors[f"{site}.{constant}"] = torch.tensor([kept.index(one) for one in held.tolist()]).to(held)
    return CanonicalForm(replace_specs(form.model_spec, specs), tensors)


def _fit_axis(spec: AttentionSpec, name: str, axis: str, size: int) -> AttentionSpec | None:
    """The spec whose part of this name gives an axis this size without being told, if it can."""
    part = dict(spec.parts())[name]
    for field, usual in _default_fields(part).items():
        fresh = replace(part, **{field: usual})
        if getattr(part, field) != usual and spec.sizes_of(fresh)[axis] == size:
            return _replace_part(spec, name, fresh)
    return None


# --- what follows by itself ----------------------------------------------------------------------------


def _drop_defaults(form: CanonicalForm) -> CanonicalForm:
    """Parts without what they would settle on by themselves."""
    specs = dict(form.model_spec.attention_specs())
    return replace(form, model_spec=replace_specs(form.model_spec, {site: _simplify_spec(spec) for site, spec in specs.items()}))


def _simplify_spec(spec: AttentionSpec) -> AttentionSpec:
    for name, part in list(spec.parts()):
        for field, usual in _default_fields(part).items():
            fresh = replace(part, **{field: usual})
            if getattr(part, field) != usual and fresh.with_fixed_sizes(spec) == part.with_fixed_sizes(spec) and fresh != part:
                spec, part = _replace_part(spec, name, fresh), fresh
    return spec


def _default_fields(part: Part) -> dict[str, Any]:
    return field_defaults(type(part))


def _replace_part(spec: AttentionSpec, name: str, fresh: Any) -> AttentionSpec:
    slots: dict[str, Callable[[], AttentionSpec]] = {
        ("output" if slot == "merge" else slot): (lambda slot=slot: replace(spec, **{slot: fresh})) for slot in SLOTS
    }
    if name in slots:
        return slots[name]()
    named = [found for found, _ in spec.parts()][4:]
    modifiers = tuple(fresh if found == name else held for found, held in zip(named, spec.modifiers, strict=True))
    return replace(spec, modifiers=modifiers)
