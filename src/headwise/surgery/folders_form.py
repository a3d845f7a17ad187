"""A model in the plainest words that say it: heads in the order of what they read, and nothing said that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..axes import changed, take
from ..blueprint import Model
from ..blueprint.stack import runs_of
from ..hub.plan import Map
from ..models import Transformer
from ..registry import defaults
from ..seams import Part
from ..spec import SLOTS, AttentionSpec

Specs = Mapping[str, AttentionSpec]


@dataclass(frozen=True)
class Form:
    """A description, and every tensor of it by name."""

    described: Model
    tensors: Mapping[str, Tensor]

    def constants(self, names: Map) -> dict[str, Tensor]:
        """Numbers that files of this kind do not hold, and that do not follow from the description either."""
        return {
            f"{site}.{key}": held
            for site, spec in self.described.specs()
            for key, param in spec.params().items()
            if not param.learned and names.slot(f"{site}.{key}") is None
            if not torch.equal(
                held := self.tensors[f"{site}.{key}"].cpu(), param.init(spec.shapes()[key]).to(held.dtype)
            )
        }


def plain(net: Transformer) -> Form:
    """The same function: heads of a layer stand in order, a shared table holds what is read of it, parts say no more
    than they must.

    >>> import headwise as hw
    >>> from headwise.blueprint import Block, Embedding, Stack
    >>> spec = hw.design(model=8, heads=4, kv=2, dim=3).with_heads(reads=(0, 1, 0, 1))
    >>> stack = Stack.of("decoder", 8, [Block(spec)], embedding=Embedding(5))
    >>> [(_, sorted_spec)] = plain(hw.build(Model("x", "decoder", (stack,)))).described.specs()
    >>> sorted_spec.heads
    Heads.grouped(q=4, kv=2, dim=3)
    """
    form = Form(net.described, {name: tensor.detach() for name, tensor in net.state_dict().items()})
    for step in (_ordered, _narrowed, _unsettled):
        form = step(form)
    return form


def with_specs(described: Model, specs: Specs) -> Model:
    """The model with these attentions, by name, in the place of its own."""
    stacks = []
    for stack in described.stacks:
        blocks = [
            replace(block, **{role: specs[f"{stack.name}.{depth}.{role}"] for role in block.specs})
            for depth, block in enumerate(stack.layers)
        ]
        stacks.append(replace(stack, runs=runs_of(blocks)))
    return replace(described, stacks=tuple(stacks))


def _own(form: Form, site: str, spec: AttentionSpec) -> dict[str, Tensor]:
    """Every tensor that an attention reads; one that layers share is found where it first stands."""
    stack = site.split(".")[0]
    found = dict[str, Tensor]()
    for key in spec.params():
        shared = (name for name in form.tensors if name.startswith(f"{stack}.") and name.endswith(f".{key}"))
        found[key] = form.tensors[name if (name := f"{site}.{key}") in form.tensors else next(shared)]
    return found


# --- heads in order ------------------------------------------------------------------------------------


def _ordered(form: Form) -> Form:
    """Query heads sorted by what they read, and key-value heads by who reads them first."""
    specs, tensors = dict(form.described.specs()), dict(form.tensors)
    if form.described.unsaid():
        return form
    for site, spec in specs.items():
        heads, weights = spec.heads, _own(form, site, spec)
        if heads.values or spec.speaks != tuple(range(heads.q)):
            continue
        columns = next((weights[key].tolist() for key, _, _ in readers(spec)), list(heads.reads))
        by_column = heads.kv == heads.q
        order = sorted(range(heads.q), key=lambda h: columns[h] if by_column else heads.reads[h])
        groups = list(dict.fromkeys(heads.reads[h] for h in order))
        if order == sorted(order) and groups == sorted(groups):
            continue
        reads = tuple(groups.index(heads.reads[h]) for h in order)
        moved = changed(spec, weights, {"q": take(order), "out": take(order), "kv": take(groups)})
        specs[site] = replace(spec, heads=replace(heads, reads=reads))
        tensors |= {name: moved[key] for key in moved if (name := f"{site}.{key}") in tensors}
    return Form(with_specs(form.described, specs), tensors)


# --- tables that layers share --------------------------------------------------------------------------


def readers(spec: AttentionSpec) -> Iterator[tuple[str, str, str]]:
    """Constants that say for each head which index of a shared table it reads: constant, table, and the axis of it."""
    for name, part in spec.parts():
        params = part.params(spec)
        own = {key for key, param in params.items() if param.layout.axes == ("q",) and not param.learned}
        tables = {key: param.layout.axes for key, param in params.items() if param.tied}
        for table, axes in tables.items():
            yield from ((f"{name}.{axis}", f"{name}.{table}", axis) for axis in axes if axis in own)


def _narrowed(form: Form) -> Form:
    """A table of which all layers of a stack read the same indices holds these alone."""
    specs, tensors = dict(form.described.specs()), dict(form.tensors)
    for stack in form.described.stacks:
        own = {site: spec for site, spec in specs.items() if site.startswith(f"{stack.name}.")}
        for constant, table, axis in {row for spec in own.values() for row in readers(spec)}:
            sites = [site for site, spec in own.items() if constant in spec.params()]
            read = {tuple(tensors[f"{site}.{constant}"].tolist()) for site in sites}
            owner = next(f"{site}.{table}" for site in sites if f"{site}.{table}" in tensors)
            layout = own[sites[0]].params()[table].layout
            size = tensors[owner].shape[layout.axes.index(axis)]
            if len(read) > 1 or (kept := sorted(next(iter(read)))) != sorted(set(kept)) or len(kept) == size:
                continue
            fitted = {site: _fitted(own[site], constant.split(".")[0], axis, len(kept)) for site in sites}
            if not all(fitted.values()):
                continue
            specs |= {site: spec for site, spec in fitted.items() if spec}
            tensors[owner] = take(kept)(tensors[owner], layout.axes.index(axis)).clone()
            for site in sites:
                held = tensors[f"{site}.{constant}"]
                tensors[f"{site}.{constant}"] = torch.tensor([kept.index(one) for one in held.tolist()]).to(held)
    return Form(with_specs(form.described, specs), tensors)


def _fitted(spec: AttentionSpec, name: str, axis: str, size: int) -> AttentionSpec | None:
    """The spec whose part of this name gives an axis this size without being told, if it can."""
    part = dict(spec.parts())[name]
    for field, usual in _usual(part).items():
        fresh = replace(part, **{field: usual})
        if getattr(part, field) != usual and spec.sizes_of(fresh)[axis] == size:
            return _with_part(spec, name, fresh)
    return None


# --- what follows by itself ----------------------------------------------------------------------------


def _unsettled(form: Form) -> Form:
    """Parts without what they would settle on by themselves."""
    specs = dict(form.described.specs())
    return replace(form, described=with_specs(form.described, {site: _plainest(spec) for site, spec in specs.items()}))


def _plainest(spec: AttentionSpec) -> AttentionSpec:
    for name, part in list(spec.parts()):
        for field, usual in _usual(part).items():
            fresh = replace(part, **{field: usual})
            if getattr(part, field) != usual and fresh.settled(spec) == part.settled(spec) and fresh != part:
                spec, part = _with_part(spec, name, fresh), fresh
    return spec


def _usual(part: Part) -> dict[str, Any]:
    return defaults(type(part))


def _with_part(spec: AttentionSpec, name: str, fresh: Any) -> AttentionSpec:
    slots: dict[str, Callable[[], AttentionSpec]] = {
        ("output" if slot == "merge" else slot): (lambda slot=slot: replace(spec, **{slot: fresh})) for slot in SLOTS
    }
    if name in slots:
        return slots[name]()
    named = [found for found, _ in spec.parts()][4:]
    modifiers = tuple(fresh if found == name else held for found, held in zip(named, spec.modifiers, strict=True))
    return replace(spec, modifiers=modifiers)
