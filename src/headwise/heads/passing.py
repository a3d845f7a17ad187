"""One text on its way through a model, again and again with other heads: whole, or from the layer that is edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..hub.forwards import standing
from ..hub.readable import Readable
from ..hub.routes.base import Found
from ..hub.running import Run
from ..hub.watching import Core, Watcher
from ..models import Transformer
from ..models.block import Call, Layers
from ..models.transformer import placed

WAYS = frozenset({"x", "tokens", "source", "source_tokens"})  # what a model of ours is told that can go on midway


class Silent:
    """A watcher that makes some heads say nothing, and counts how many there are."""

    wants_core = False

    def __init__(self, *heads: int) -> None:
        self.own = list(heads)
        self.count = 0

    def core(self, seen: Core) -> None:
        """Nothing to look at."""

    def heads(self, z: Tensor) -> Tensor:
        """The same without these."""
        self.count = z.shape[-2]
        other = z.clone()
        other[..., self.own, :] = 0
        return other


class Kept:
    """A watcher that keeps what heads say, for gradients to be taken at."""

    wants_core = False

    def __init__(self) -> None:
        self.z: list[Tensor] = []

    def core(self, seen: Core) -> None:
        """Nothing to look at."""

    def heads(self, z: Tensor) -> Tensor:
        """The same, kept; where nothing before it is learned, it is where gradients begin."""
        z = z if z.requires_grad else z.detach().requires_grad_()
        self.z.append(z)
        return z


class Passage:
    """A model, its sites and one text: what it says, and what it says with watchers at some sites."""

    restarts = False

    def __init__(self, model: nn.Module, those: Sequence[Found], given: Readable) -> None:
        self.model, self.those, self.given = model, those, given
        self._counting = {one.site.name: Silent() for one in those}
        self._plain: list[Any] = []

    @property
    def plain(self) -> Any:
        """What the model says unedited; it is run when this is first asked for."""
        if not self._plain:
            self._plain.append(self._run(self._counting))
        return self._plain[0]

    @property
    def counts(self) -> dict[str, int]:
        """How many heads there are at each site that the text reaches."""
        _ = self.plain
        return {name: one.count for name, one in self._counting.items() if one.count}

    def _run(self, counting: Mapping[str, Watcher]) -> Any:
        return self.watched(counting)

    def watched(self, watchers: Mapping[str, Watcher]) -> Any:
        """What the model says while these watch."""
        return Run(self.model, self.given).watched(self.those, watchers)

    def sloped(self, watchers: Mapping[str, Watcher]) -> Any:
        """The same with what gradients need."""
        with standing(self.model, self.those, watchers), torch.enable_grad():
            return Run(self.model, self.given).said()


class Restarted(Passage):
    """The same of a model of ours: the input of every layer is kept, and a run begins at the first that is edited."""

    restarts = True

    def __init__(self, model: Transformer, those: Sequence[Found], given: Readable) -> None:
        self.net, self.stacks = model, list(model.stacks.values())
        super().__init__(model, those, given)

    def _run(self, counting: Mapping[str, Watcher]) -> Tensor:
        self.kept: dict[str, list[Tensor]] = {stack.described.name: [] for stack in self.stacks}
        self.calls: dict[str, list[Call]] = {}
        with standing(self.model, self.those, counting), torch.inference_mode():
            return self._from_start(self.stacks)

    def _from_start(self, stacks: Sequence[Layers]) -> Tensor:
        names, told = self.given.names, None
        h: Tensor | None = None
        for stack, (ids, tokens) in zip(stacks, _ways(names)[-len(stacks) :], strict=True):
            name, (x, types) = stack.described.name, stack.embed(ids)
            at = placed(x, tokens, None)
            self.calls[name] = _calls(stack, Call(at, None, None, told, self.net.probes), h)
            h, told = _along(stack, self.calls[name], stack.place(x, at, types), self.kept[name].append), at
        assert h is not None
        return self._read_out(h)

    def watched(self, watchers: Mapping[str, Watcher]) -> Tensor:
        """What the model says while these watch, from the first layer on at which anybody does."""
        named = {one.site.name: one.site for one in self.those}
        where = {name: (named[name].stack, named[name].layer) for name in watchers}
        order = [stack.described.name for stack in self.stacks]
        _ = self.plain  # which keeps what is gone on from
        first, depth = min((order.index(stack), layer) for stack, layer in where.values())
        with standing(self.model, self.those, watchers), torch.inference_mode():
            return self._onward(self.stacks[first:], depth)

    def _onward(self, stacks: Sequence[Layers], depth: int) -> Tensor:
        """From a layer of the first of these stacks on; the next reads what that says now."""
        name = stacks[0].described.name
        h = _along(stacks[0], self.calls[name], self.kept[name][depth], start=depth)
        for stack in stacks[1:]:
            name = stack.described.name
            h = _along(stack, _calls(stack, self.calls[name][0], h), self.kept[name][0])
        return self._read_out(h)

    def _read_out(self, h: Tensor) -> Tensor:
        return self.net.read(h, tokens=self.given.names.get("tokens"))


def _along(
    stack: Layers, calls: Sequence[Call], h: Tensor, keep: Callable[[Tensor], object] = id, start: int = 0
) -> Tensor:
    """Through the layers of a stack from one of them on, and its norm; `keep` is handed the input of each."""
    for layer, call in zip(stack.blocks[start:], calls[start:], strict=True):
        keep(h)
        h = layer(h, call)
    return h if stack.norm is None else stack.norm(h)


def _calls(stack: Layers, call: Call, states: Tensor | None) -> list[Call]:
    """The call of each layer, with what it reads of another stack projected once."""
    if states is None:
        return [call] * stack.depth
    assert call.told is not None
    return [call._replace(source=layer.remember(states, call.told)) for layer in stack.blocks]


def _ways(names: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """What each of two stacks reads, and where that stands."""
    return [(names.get("source"), names.get("source_tokens")), (names["x"], names.get("tokens"))]


def passage(model: nn.Module, those: Sequence[Found], given: Readable) -> Passage:
    """A text on its way; one that is begun again midway where the model is ours."""
    if isinstance(model, Transformer) and not given.places and given.names.keys() <= WAYS:
        return Restarted(model, those, given)
    return Passage(model, those, given)
