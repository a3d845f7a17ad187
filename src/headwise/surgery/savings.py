"""What a model costs before and after: counted from its description, and checked against its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import counting
from ..counting.costs import CostReport, cost
from ..counting.pricing import Workload, CostEstimate
from ..counting.scopes import max_lengths
from ..models import Transformer
from ..spec import AttentionSpec

COUNTED_LENGTH = 512  # tokens that are priced, unless said
COUNTED_BYTES = 4  # bytes of each number in a price; the model's own precision is put in their place


class CostPair(NamedTuple):
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


class AttentionSize(NamedTuple):
    """What one attention has: output heads, key-value heads, parameters, numbers remembered of a token."""

    heads: int = 0
    kv: int = 0
    parameters: int = 0
    remembered: int = 0

    @staticmethod
    def of_spec(spec: AttentionSpec | None) -> AttentionSize:
        """Of a spec; of an attention that is gone, nothing."""
        if spec is None:
            return AttentionSize()
        return AttentionSize(len(spec.score_head_of_output), spec.heads.kv, counting.count_parameters(spec), counting.cached_numbers_per_token(spec))


@dataclass(frozen=True)
class CostComparison:
    """Numbers of both models under one load of so many tokens, and of every attention whose numbers changed."""

    length: int
    source_length: int | None
    dtype: str
    costs: tuple[CostPair, ...]
    sites: Mapping[str, tuple[AttentionSize, AttentionSize]]

    def get_cost(self, name: str) -> CostPair:
        """One of them."""
        return next(pair for pair in self.costs if pair.name == name)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        sites = [
            {"site": site, "before": before._asdict(), "after": after._asdict()}
            for site, (before, after) in self.sites.items()
        ]
        told = {"length": self.length, "source": self.source_length, "dtype": self.dtype}
        return told | {"numbers": [pair.data for pair in self.costs], "sites": sites}

    @property
    def summary(self) -> str:
        """What was saved, in words; nothing is said too."""
        parts = list[str]()
        for name, what in (("parameters", "parameters"), ("cache, a token", "bytes of every token that is remembered")):
            pair = next((one for one in self.costs if one.name == name), None)
            if pair is not None and pair.before:
                less = pair.before - pair.after
                parts.append(f"{less:,} of {pair.before:,} {what} ({less / pair.before:.1%})")
        return f"Saved: {' and '.join(parts)}."

    @property
    def uncut_cache_notes(self) -> list[str]:
        """Attentions that lost heads and have as many keys and values as before; those that are alike are one line."""
        found: dict[str, list[str]] = {}
        for site, (before, after) in self.sites.items():
            if after.heads < before.heads and before.remembered == after.remembered and after.remembered:
                gone = f"{before.heads - after.heads} of {before.heads} heads are gone"
                found.setdefault(f"{gone}, and all {before.kv} key-value heads are still read", []).append(site)
        return [f"{_join_sites(sites)}: {what}" for what, sites in found.items()]


def compare_cost(before: Transformer, after: Transformer, length: int | None = None, source_length: int | None = None) -> CostComparison:
    """What both cost for a row of `length` tokens, and `source` of them where one is read.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> found = compare_cost(net, net)
    >>> found.length, found.pair("cache, a token").before, found.pair("parameters").ratio
    (512, 64, 1.0)
    """
    load = default_workload(before, length, source_length)
    prices = cost({"before": before.described, "after": after.described}, load)
    nets = {"before": before, "after": after}
    for name, net in nets.items():
        _check_parameter_count(name, net, prices[name])
    specs = tuple(dict(net.described.attention_specs()) for net in nets.values())
    sites = {site: (AttentionSize.of_spec(specs[0].get(site)), AttentionSize.of_spec(specs[1].get(site))) for site in specs[0]}
    dtype = str(next(before.parameters()).dtype).removeprefix("torch.")
    changed = {site: pair for site, pair in sites.items() if pair[0] != pair[1]}
    reads = load.source if len(before.described.stacks) > 1 else None
    return CostComparison(prices["before"].full_call.tokens, reads, dtype, tuple(_iter_costs(nets, prices)), changed)


def _join_sites(sites: Sequence[str]) -> str:
    return sites[0] if len(sites) == 1 else f"{sites[0]} and {len(sites) - 1} more"


def default_workload(net: Transformer, length: int | None, source_length: int | None) -> Workload:
    """A row as long as is asked for, or as the model takes."""
    most = max_lengths(net.described)
    own = length or min(COUNTED_LENGTH, most.own or COUNTED_LENGTH)
    read = source_length or min(own, most.source or own)
    return Workload(context=own, dtype="fp32", source=read)


def _iter_costs(nets: Mapping[str, Transformer], prices: CostReport) -> Iterator[CostPair]:
    one, other = prices["before"], prices["after"]
    each = {name: next(net.parameters()).element_size() for name, net in nets.items()}
    numels = {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()}
    yield CostPair("parameters", "", one.parameters.total, other.parameters.total)
    yield CostPair("weights", "bytes", *(numels[name] * each[name] for name in nets))
    yield CostPair("forward" if one.decode_flops is None else "prefill", "FLOPs", one.prefill_flops.total, other.prefill_flops.total)
    if one.decode_flops is None:
        return
    yield CostPair("decode, a step", "FLOPs", one.decode_flops.total, 0 if other.decode_flops is None else other.decode_flops.total)
    for name, told in (("cache, a token", _cache_per_token), ("cache, a token of the source", _source_cache_per_token), ("cache, in all", _cache_bytes)):
        before, after = (told(prices[which]) // COUNTED_BYTES * each[which] for which in nets)
        if before or after:
            yield CostPair(name, "bytes", before, after)


def _cache_per_token(price: CostEstimate) -> int:
    return price.cache_bytes_per_token or 0


def _source_cache_per_token(price: CostEstimate) -> int:
    return price.source_cache_bytes_per_token or 0


def _cache_bytes(price: CostEstimate) -> int:
    return price.cache_bytes


def _check_parameter_count(name: str, net: Transformer, price: CostEstimate) -> None:
    """Refuse a description that does not count what the model holds."""
    held, counted = sum(p.numel() for p in net.parameters()), price.parameters.total
    if held != counted:
        raise ValueError(f"the model {name} holds {held:,} parameters and is described with {counted:,}; build it anew")
