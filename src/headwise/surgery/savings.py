"""What a model costs before and after: counted from its description, and checked against its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import counting
from ..counting.costs import Costs, cost
from ..counting.pricing import Load, Price
from ..counting.scopes import longest
from ..models import Transformer
from ..spec import AttentionSpec

LENGTH = 512  # tokens that are priced, unless said
PRICED = 4  # bytes of each number in a price; the model's own precision is put in their place


class Pair(NamedTuple):
    """One number of both models."""

    name: str
    unit: str
    before: int
    after: int

    @property
    def ratio(self) -> float | None:
        """What is left of it, as a share."""
        return self.after / self.before if self.before else None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return {**self._asdict(), "ratio": self.ratio}


class Layer(NamedTuple):
    """What one attention has: output heads, key-value heads, parameters, numbers remembered of a token."""

    heads: int = 0
    kv: int = 0
    parameters: int = 0
    remembered: int = 0

    @staticmethod
    def of(spec: AttentionSpec | None) -> Layer:
        """Of a spec; of an attention that is gone, nothing."""
        if spec is None:
            return Layer()
        return Layer(len(spec.speaks), spec.heads.kv, counting.params(spec), counting.cache_numbers(spec))


@dataclass(frozen=True)
class Savings:
    """Numbers of both models under one load of so many tokens, and of every attention whose numbers changed."""

    length: int
    source: int | None
    dtype: str
    pairs: tuple[Pair, ...]
    sites: Mapping[str, tuple[Layer, Layer]]

    def pair(self, name: str) -> Pair:
        """One of them."""
        return next(pair for pair in self.pairs if pair.name == name)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        sites = [
            {"site": site, "before": before._asdict(), "after": after._asdict()}
            for site, (before, after) in self.sites.items()
        ]
        told = {"length": self.length, "source": self.source, "dtype": self.dtype}
        return told | {"numbers": [pair.data for pair in self.pairs], "sites": sites}

    @property
    def sentence(self) -> str:
        """What was saved, in words; nothing is said too."""
        parts = list[str]()
        for name, what in (("parameters", "parameters"), ("cache, a token", "bytes of every token that is remembered")):
            pair = next((one for one in self.pairs if one.name == name), None)
            if pair is not None and pair.before:
                less = pair.before - pair.after
                parts.append(f"{less:,} of {pair.before:,} {what} ({less / pair.before:.1%})")
        return f"Saved: {' and '.join(parts)}."

    @property
    def kept(self) -> list[str]:
        """Attentions that lost heads and have as many keys and values as before; those that are alike are one line."""
        found: dict[str, list[str]] = {}
        for site, (before, after) in self.sites.items():
            if after.heads < before.heads and before.remembered == after.remembered and after.remembered:
                gone = f"{before.heads - after.heads} of {before.heads} heads are gone"
                found.setdefault(f"{gone}, and all {before.kv} key-value heads are still read", []).append(site)
        return [f"{_listed(sites)}: {what}" for what, sites in found.items()]


def savings(before: Transformer, after: Transformer, length: int | None = None, source: int | None = None) -> Savings:
    """What both cost for a row of `length` tokens, and `source` of them where one is read.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> found = savings(net, net)
    >>> found.length, found.pair("cache, a token").before, found.pair("parameters").ratio
    (512, 64, 1.0)
    """
    load = load_of(before, length, source)
    prices = cost({"before": before.described, "after": after.described}, load)
    nets = {"before": before, "after": after}
    for name, net in nets.items():
        _check_numbers(name, net, prices[name])
    specs = tuple(dict(net.described.specs()) for net in nets.values())
    sites = {site: (Layer.of(specs[0].get(site)), Layer.of(specs[1].get(site))) for site in specs[0]}
    dtype = str(next(before.parameters()).dtype).removeprefix("torch.")
    changed = {site: pair for site, pair in sites.items() if pair[0] != pair[1]}
    reads = load.source if len(before.described.stacks) > 1 else None
    return Savings(prices["before"].whole.tokens, reads, dtype, tuple(_pairs(nets, prices)), changed)


def _listed(sites: Sequence[str]) -> str:
    return sites[0] if len(sites) == 1 else f"{sites[0]} and {len(sites) - 1} more"


def load_of(net: Transformer, length: int | None, source: int | None) -> Load:
    """A row as long as is asked for, or as the model takes."""
    most = longest(net.described)
    own = length or min(LENGTH, most.own or LENGTH)
    read = source or min(own, most.source or own)
    return Load(context=own, dtype="fp32", source=read)


def _pairs(nets: Mapping[str, Transformer], prices: Costs) -> Iterator[Pair]:
    one, other = prices["before"], prices["after"]
    each = {name: next(net.parameters()).element_size() for name, net in nets.items()}
    numels = {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()}
    yield Pair("parameters", "", one.parameters.total, other.parameters.total)
    yield Pair("weights", "bytes", *(numels[name] * each[name] for name in nets))
    yield Pair("forward" if one.decode is None else "prefill", "FLOPs", one.prefill.total, other.prefill.total)
    if one.decode is None:
        return
    yield Pair("decode, a step", "FLOPs", one.decode.total, 0 if other.decode is None else other.decode.total)
    for name, told in (("cache, a token", _each), ("cache, a token of the source", _told), ("cache, in all", _all)):
        before, after = (told(prices[which]) // PRICED * each[which] for which in nets)
        if before or after:
            yield Pair(name, "bytes", before, after)


def _each(price: Price) -> int:
    return price.kept_each or 0


def _told(price: Price) -> int:
    return price.told_each or 0


def _all(price: Price) -> int:
    return price.kept_bytes


def _check_numbers(name: str, net: Transformer, price: Price) -> None:
    """Refuse a description that does not count what the model holds."""
    held, counted = sum(p.numel() for p in net.parameters()), price.parameters.total
    if held != counted:
        raise ValueError(f"the model {name} holds {held:,} parameters and is described with {counted:,}; build it anew")
