"""What key and value heads of a model say over data, before turns, as sums of products: what sharing them asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError, nearest
from ..hub.finding import found
from ..hub.watching import Core, Stand, watchers, watching
from ..module import Attention
from ..tokens import Tokens
from .products import Products, features


def gathered(
    model: nn.Module, batches: Iterable[Any], sites: Iterable[str] | None = None
) -> dict[str, dict[str, Products]]:
    """Products of keys ("k") and values ("v") for each attention of ours, or those of these names, over a data set.

    A batch is a tensor, or a mapping of what the model is called with; padding among its tokens does not count. Nothing
    is kept but the sums, of (heads x width)^2 numbers a site and side.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> told = gathered(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])])
    >>> [(site, side, said.rows) for site, sides in told.items() for side, said in sides.items()]
    [('decoder.0.attention', 'k', 5), ('decoder.0.attention', 'v', 5)]
    """
    named = _named(model, sites)
    if any(module.training for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is in train mode, where heads say what dropout leaves; call .eval()")
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(f"batches are of type {type(batches).__name__}; give several, or one as [batch]")
    gatherers = {site: Gatherer(attention) for site, attention in named.items()}
    with torch.no_grad(), watching({one.attention: (one,) for one in gatherers.values()}, STANDS):
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    if silent := [site for site, one in gatherers.items() if not one.told]:
        raise ValueError(f"nothing was gathered of {silent[0]}; give at least one batch that the model reads there")
    return {site: one.told for site, one in gatherers.items()}


def _named(model: nn.Module, sites: Iterable[str] | None) -> dict[str, Attention]:
    ours = {one.site.name: one.module for one in found(model) if isinstance(one.module, Attention)}
    for site in sites or ():
        if site not in ours:
            raise SpecError(f"the model has no attention {site!r} of ours; {nearest(site, ours)}")
    return ours if sites is None else {site: ours[site] for site in sites}


class Gatherer:
    """Adds up what the heads of one attention make of each input that it remembers."""

    wants_core = False

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.told: dict[str, Products] = {}

    def core(self, seen: Core) -> None:
        """It does not look there."""

    def heads(self, z: Tensor) -> None:
        """Nor there."""

    def gather(self, z_BSE: Tensor, tokens: Tokens | None) -> None:
        """Take one input, its padding left out."""
        for side, said in features(self.attention, z_BSE).items():
            live = said if tokens is None else said[tokens.live.expand(said.shape[:2])]
            own = Products.of(live)
            self.told[side] = self.told[side] + own if side in self.told else own


def _tell(attention: Attention, z_BSE: Tensor, tokens: Tokens | None) -> None:
    for watcher in watchers(attention):
        if isinstance(watcher, Gatherer):
            watcher.gather(z_BSE, tokens)


def _of_others(original: Callable[..., Any]) -> Callable[..., Any]:
    def remember(self: Attention, z: Tensor, *, tokens: Tokens | None = None) -> Any:
        _tell(self, z, tokens)
        return original(self, z, tokens=tokens)

    return remember


def _of_itself(original: Callable[..., Any]) -> Callable[..., Any]:
    def _remembered(self: Attention, x_BTD: Tensor, at: Tokens, turning: Any, source: Any, cache: Any) -> Any:
        if source is None:
            _tell(self, x_BTD, at)
        return original(self, x_BTD, at, turning, source, cache)

    return _remembered


STANDS = (Stand(Attention, "remember", _of_others), Stand(Attention, "_remembered", _of_itself))
