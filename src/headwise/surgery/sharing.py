"""Heads of keys and values shared, split or merged in a whole model: one model in, another out, and what was done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import SpecError, suggest
from ..heads.scene import Example
from ..models import Transformer
from .gathering import collect_kv_statistics
from .plans import count_heads
from .rebuilding import AttentionChange, get_attention, to_native_model, replace_attentions, get_attention_parameters
from .ways import KV_NAMES, ConvertedLayer, Pool, AttentionConversion
from .worths import DEFAULT_RANKING, HeadRanking, score_heads

ATTENTION_KINDS = ("all", "self", "cross")
MAX_STATISTICS = 2**26  # sums of products that are gathered in one reading of the texts


@dataclass(frozen=True, eq=False)
class ConversionResult:
    """A model before and after; `same` is it with its heads aligned and not yet pooled, which says what it said."""

    before: Transformer
    after: Transformer
    equivalent: Transformer | None
    conversion: AttentionConversion
    layers: Mapping[str, ConvertedLayer]
    notes: tuple[str, ...]

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Which heads of keys and values were pooled at each site."""
        return {site: tuple(map(tuple, one.groups)) for site, one in self.layers.items() if one.groups}

    @property
    def data(self) -> dict[str, Any]:
        """What was done, as plain values."""
        groups = {site: [list(group) for group in own] for site, own in self.groups.items()}
        way = {"name": type(self.conversion).__name__.lower(), "said": repr(self.conversion), "sentence": self.conversion.summary}
        missed = {site: dict(one.pooling_errors) for site, one in self.layers.items() if one.pooling_errors}
        return {"done": "share", "way": way, "groups": groups, "missed": missed, "notes": list(self.notes)}


def convert(
    model: nn.Module,
    conversion: AttentionConversion | int,
    examples: Sequence[Example] = (),
    *,
    kind: str = "all",
    ranking: HeadRanking = DEFAULT_RANKING,
    log: Callable[[str], Any] = lambda _: None,
) -> ConversionResult:
    """A model whose heads share keys and values as a way says; a number is how many of these every layer keeps.

    `scenes` are texts, for ways that look at what heads say; where="self" or "cross" changes attentions of one kind.
    The model itself is left alone; one of transformers is copied as one of ours first.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}), seed=0)
    >>> done = convert(net, 2)
    >>> [spec.heads.kv for _, spec in done.after.described.specs()], done.groups["decoder.0.attention"]
    ([2, 2], ((0, 1), (2, 3)))
    """
    model = to_native_model(model)
    if kind not in ATTENTION_KINDS:
        raise SpecError(f"where={kind!r} is unknown; {suggest(kind, ATTENTION_KINDS)}")
    chosen = Pool(conversion) if isinstance(conversion, int) else conversion
    if not isinstance(chosen, AttentionConversion):
        raise SpecError(f"way={conversion!r} says nothing of what is shared; give a number of heads, or hw.surgery.Pool(...)")
    sites = [
        site for site in count_heads(model.described) if kind in ("all", "cross" if site.endswith("cross") else "self")
    ]
    if not sites:
        raise SpecError(f"{model.described.name} has no {kind}-attention; use where='all'")
    if chosen.needs_statistics and len(examples) < 2:
        raise SpecError(f"{len(examples)} texts say little of what heads say; give at least two, or align='none'")
    made = _convert_layers(model, chosen, sites, examples, (ranking, log))
    after = replace_attentions(model, {site: AttentionChange(one.spec, one.weights) for site, one in made.items()})
    same = {
        site: AttentionChange(get_attention(model, site).spec, one.equivalent_weights) for site, one in made.items() if one.equivalent_weights is not None
    }
    notes = [*_pooling_notes(made), *(f"{site}: {note}" for site, one in made.items() for note in one.notes)]
    return ConversionResult(model, after, replace_attentions(model, same) if same else None, chosen, made, tuple(notes))


def _pooling_notes(made: Mapping[str, ConvertedLayer]) -> Iterator[str]:
    """How much less means miss of what heads say, over all layers."""
    for side, word in KV_NAMES.items():
        found = [one.pooling_errors[side] for one in made.values() if side in one.pooling_errors]
        if found:
            (low, high), (least, most) = ((min(lost), max(lost)) for lost in zip(*found, strict=True))
            yield f"means of {word} miss {least:.0%} to {most:.0%} of what heads say, unaligned {low:.0%} to {high:.0%}"


def _convert_layers(
    net: Transformer, way: AttentionConversion, sites: Sequence[str], scenes: Sequence[Example], how: tuple[HeadRanking, Callable[[str], Any]]
) -> dict[str, ConvertedLayer]:
    by, tell = how
    batches = [scene.model_inputs for scene in scenes]
    found, made = score_heads(net, scenes, by).scores if way.needs_importance else {}, dict[str, ConvertedLayer]()
    for some in _batch_sites(net, sites) if way.needs_statistics else [sites]:
        tell(f"reading {len(batches)} texts for {some[0]} and {len(some) - 1} others")
        told = collect_kv_statistics(net.eval(), batches, some) if way.needs_statistics else {}
        for site in some:
            spec, weights = get_attention(net, site).spec, get_attention_parameters(net, site)
            worth = [found.get((site, head), math.inf) for head in range(len(spec.score_head_of_output))]
            tell(f"{site}: {way.summary}")
            try:
                made[site] = way.convert_layer(spec, weights, told.get(site), worth)
            except SpecError as error:
                raise SpecError(f"{site}: {error}") from None
    return made


def _batch_sites(net: Transformer, sites: Sequence[str]) -> list[list[str]]:
    """Sites in order, as many at a time as there is room for the sums of."""
    portions, full = [list[str]()], 0
    for site in sites:
        heads = get_attention(net, site).spec.heads
        need = 2 * heads.kv**2 * (heads.dim**2 + heads.vdim**2)
        if portions[-1] and full + need > MAX_STATISTICS:
            portions.append([])
            full = 0
        portions[-1].append(site)
        full += need
    return portions
