"""Attentions of headwise itself, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...cache import Cache, Remembered
from ...models import Transformer
from ...module import Attention
from ...probe import Probe
from ...site import YES, Site
from ...tokens import Sight, Tokens
from ..watching import Core, Holding, Reading, Stand, Watcher, changed, watchers
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

    def stands(self) -> list[Holding]:
        return [STAND]


class Again:
    """What an attention of ours worked with: any rows of its weights are computed again by the layer itself."""

    def __init__(self, layer: Attention, x: Tensor, source: Tensor | Remembered | None, at: Tokens) -> None:
        self.x, self.at, self._values = x, at, None
        if source is None:  # the same layer, said as one that reads another text, which happens to be this one
            layer = Attention(replace(layer.spec, source=layer.spec.model), shares=layer.weights).eval()
            source = layer.remember(x, tokens=at)
        self.layer = layer
        self.kept = source if isinstance(source, Remembered) else layer.remember(source)

    def rows(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        probe = Probe("weights")
        at = Tokens(self.at.position[:, queries], self.at.segment[:, queries], checked=True)
        self.layer(self.x[:, queries], source=self.kept, tokens=at, probe=probe)
        return probe.seen["weights"][:, head]

    def reading(self, head: int) -> Reading:
        """What one head that speaks reads, whatever it compares."""
        spec = self.layer.spec
        row = spec.speaks[head]
        readable_BTS = Sight(self.at, self.kept.tokens, spec.pattern).allowed[:, 0]
        return Reading(row, self._recalled()[:, :, spec.core.values[row]], readable_BTS)

    def _recalled(self) -> Tensor:
        """All values, computed once for all heads."""
        if self._values is None:
            probe = Probe("v")
            self.layer(self.x, source=self.kept, tokens=self.at, probe=probe)
            self._values = probe.seen["v"]
        return self._values


class Stepwise:
    """What cannot be told of an attention that reads its past from a cache, or goes by a mask of the caller's own."""

    def rows(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Refused."""
        raise ValueError("with a cache or a mask weights are not computed again; run the whole text without")

    def reading(self, head: int) -> Reading:
        """Refused."""
        raise ValueError("with a cache or a mask it is not known what is read; run the whole text without")


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


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    def gated(self: Attention, x: Tensor, *, probe: Probe | None = None, **said: Any) -> Any:
        those = watchers(self)
        if not those:
            return original(self, x, probe=probe, **said)
        if seers := [watcher for watcher in those if watcher.wants_core]:
            told = _told(self, x, **said)
            for watcher in seers:
                watcher.core(told)
        return original(self, x, probe=_joined(those, probe), **said)

    return gated


STAND = Stand(Attention, "gated", _around)


def _told(
    layer: Attention, x: Tensor, *, source: Tensor | Remembered | None = None, cache: Cache | None = None,
    tokens: Tokens | None = None, mask: Tensor | None = None,
) -> Core:  # fmt: skip
    if cache is not None or mask is not None:
        return Stepwise()
    return Again(layer, x, source, tokens or Tokens.run(0, x.shape[1], x.device))


def _joined(those: tuple[Watcher, ...], probe: Probe | None) -> Probe:
    """A probe that lets watchers change what heads say, and whoever looked already look on."""
    own = probe.wants if probe is not None else frozenset[str]()

    def see(place: str, tensor: Tensor) -> Tensor | None:
        if place == "heads":
            tensor = changed(those, tensor)
        return probe(place, tensor) if probe is not None and place in own else tensor

    return Probe(*own, "heads", see=see, ledger=probe.ledger if probe is not None else None)
