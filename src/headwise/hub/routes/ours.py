"""Attentions of headwise itself, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import backends
from ...backends import Attend, Bound, Inputs, Job
from ...models import Transformer
from ...module import Attention, Plan
from ...probe import Probe
from ...site import YES, Site
from ...tokens import Sight, Tokens
from ..watching import Holding, Reading, Seen, Stand, Watcher, changed, watchers
from .base import Found, Route


class Ours(Route):
    """Every `hw.Attention`: all that its spec says is known, and any of it can be computed again."""

    def find(self, model: nn.Module) -> Iterator[Found]:
        names = [name for name, _ in model.described.specs()] if isinstance(model, Transformer) else []
        modules = model.named_modules(remove_duplicate=False)
        layers = [(path, module) for path, module in modules if isinstance(module, Attention)]
        for number, (path, module) in enumerate(layers):
            stack, layer, kind = _parts(path, number) if path in names else ("model", number, "attention")
            name = path if path in names else f"{stack}.{layer}.{kind}"
            yield Found(_site(name, (stack, layer, kind), path, module), module, self)

    def stands(self) -> Sequence[Holding]:
        return STANDS

    def gives(self, module: nn.Module) -> str:
        assert isinstance(module, Attention)
        spec = module.spec
        return "scores" if backends.is_plain(Job(spec, spec.core_of(spec.form(one=False)))) else "weights"


class Worked:
    """What an attention of ours worked with: any rows of its weights are computed again, as its definition says."""

    def __init__(self, job: Job, sight: Sight, inputs: Inputs, bound: Bound) -> None:
        self.job, self.bound = job, bound
        self.sight, self.inputs = backends.gathered(sight, inputs)
        self._by_head: Inputs | None = None

    def rows(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        return self.every(queries)[:, head]

    def every(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]; of `keys` that are all they may read, if not all."""
        if backends.is_plain(self.job):
            return self._seen(*_sliced(self.sight, self._laid, queries, keys)).every()
        job = replace(self.job, wants=frozenset({"weights"}), training=False)
        probe = Probe("weights")
        backends.choose(job).attend(job, *_sliced(self.sight, self.inputs, queries), self.bound, probe)
        return probe.seen["weights"][..., keys]

    @property
    def _laid(self) -> Inputs:
        """The inputs with the keys of each head side by side, which are read again for each band of queries."""
        if self._by_head is None:
            self._by_head = self.inputs._replace(k=self.inputs.k.transpose(1, 2).contiguous().transpose(1, 2))
        return self._by_head

    def allowed(self, queries: slice = slice(None)) -> Tensor:
        """Which keys some queries may read, [B or 1, 1, T, S]."""
        return _sliced(self.sight, self.inputs, queries)[0].allowed

    def reading(self, head: int) -> Reading:
        """What one head that speaks reads, whatever it compares."""
        row = self.job.spec.speaks[head]
        return Reading(row, self.inputs.v[:, :, self.job.core.values[row]])

    @property
    def told(self) -> Seen | None:
        """The same as tensors, if softmax of scaled products is all that the layer does with them."""
        return self._seen(self.sight, self.inputs) if backends.is_plain(self.job) else None

    def _seen(self, sight: Sight, inputs: Inputs) -> Seen:
        plain, core = backends.plainly(sight, inputs, self.bound), self.job.core
        k, v, reads = inputs.k, inputs.v, None if self.job.groups else core.keys
        if core.values != core.keys:  # values are grouped otherwise: each head is given its own of both
            k, v, reads = k[:, :, list(core.keys)], v[:, :, list(core.values)], tuple(range(len(core.keys)))
        return Seen(
            inputs.q, k, v, inputs.asked.scale, plain.mask, plain.causal, plain.bias, sinks=plain.sinks,
            reads=reads, stands=self.stands,
        )  # fmt: skip

    @property
    def stands(self) -> Tensor | None:
        """The numbers of its keys among all tokens."""
        return _numbers(self.sight.keys)


def _numbers(keys: Tokens) -> Tensor | None:
    """Which tokens these are, -1 for none, where all rows hold the same: then positions number them."""
    position, segment = keys.position[:1], keys.segment[:1]
    if keys.filled is not None:  # all of them are read; a cache may write segments later
        return position[0] if bool((keys.position == position).all()) else None
    alike = bool((keys.position == position).all()) and bool((keys.segment == segment).all())
    return torch.where(segment[0] < 0, -1, position[0]) if alike and not bool((segment > 0).any()) else None


def _sliced(sight: Sight, inputs: Inputs, queries: slice, keys: slice = slice(None)) -> tuple[Sight, Inputs]:
    """The same call for some of its queries, and of some of its keys if all that happens to scores is additive."""
    at, told, asked, mask = sight.queries, sight.keys, inputs.asked, sight.mask
    some = Tokens(at.position[:, queries], at.segment[:, queries], checked=True)
    if keys != slice(None):
        filled = None if told.filled is None else len(range(told.filled)[keys])
        told = Tokens(told.position[:, keys], told.segment[:, keys], checked=True, filled=filled)
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.shape[3] == 1 else mask[..., keys]
    asked = asked._replace(x_BTD=asked.x_BTD[:, queries], q_BTHK=asked.q_BTHK[:, queries], at=some)
    inputs = inputs._replace(q=inputs.q[:, queries], k=inputs.k[:, keys], v=inputs.v[:, keys], asked=asked)
    return Sight(some, told, sight.pattern, mask), inputs


def _parts(path: str, number: int) -> tuple[str, int, str]:
    stack, layer, kind = path.split(".")
    return stack, int(layer), kind


def _site(name: str, where: tuple[str, int, str], path: str, module: Attention) -> Site:
    spec = module.spec
    heads = spec.heads
    stack, layer, kind = where
    return Site(
        name=name, stack=stack, layer=layer, kind=kind, path=path, heads=len(spec.speaks), q=heads.q, kv=heads.kv,
        dim=heads.dim, pattern=spec.pattern.text, spec=spec, unsaid="", see=YES, silence=YES, cut=YES, share=YES,
    )  # fmt: skip


def _edited(original: Callable[..., Any]) -> Callable[..., Any]:
    def gated(self: Attention, x: Tensor, *, probe: Probe | None = None, **said: Any) -> Any:
        those = watchers(self)
        return original(self, x, probe=_joined(those, probe) if those else probe, **said)

    return gated


def _planned(original: Callable[..., Plan]) -> Callable[..., Plan]:
    def _plan(self: Attention, *said: Any) -> Plan:
        plan = original(self, *said)
        seers = [watcher for watcher in watchers(self) if watcher.wants_core]
        return plan._replace(attend=partial(_told, plan.attend, seers)) if seers else plan

    return _plan


def _told(attend: Attend, seers: Sequence[Watcher], *said: Any) -> Tensor:
    """What a backend does, seen: it is told of the job, the sight, the inputs, the parts and a probe."""
    worked = Worked(*said[:4])
    for watcher in seers:
        watcher.core(worked)
    return attend(*said)


STANDS = (Stand(Attention, "gated", _edited), Stand(Attention, "_plan", _planned))


def _joined(those: tuple[Watcher, ...], probe: Probe | None) -> Probe:
    """A probe that lets watchers change what heads say, and whoever looked already look on."""
    own = probe.wants if probe is not None else frozenset[str]()

    def see(place: str, tensor: Tensor) -> Tensor | None:
        if place == "heads":
            tensor = changed(those, tensor)
        return probe(place, tensor) if probe is not None and place in own else tensor

    return Probe(*own, "heads", see=see, ledger=probe.ledger if probe is not None else None)
