"""Heads of keys and values shared, split or merged in a whole model: one model in, another out, and what was done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import SpecError, nearest
from ..heads.scene import Scene
from ..models import Transformer
from .gathering import gathered
from .plans import counts
from .rebuilding import Changed, attention_of, ours, rebuilt, weights_of
from .ways import WORDS, Made, Pool, Way
from .worths import USUAL, By, worths

WHERE = ("all", "self", "cross")
AT_ONCE = 2**26  # sums of products that are gathered in one reading of the texts


@dataclass(frozen=True, eq=False)
class Shared:
    """A model before and after; `same` is it with its heads aligned and not yet pooled, which says what it said."""

    before: Transformer
    after: Transformer
    same: Transformer | None
    way: Way
    made: Mapping[str, Made]
    notes: tuple[str, ...]

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Which heads of keys and values were pooled at each site."""
        return {site: tuple(map(tuple, one.groups)) for site, one in self.made.items() if one.groups}

    @property
    def data(self) -> dict[str, Any]:
        """What was done, as plain values."""
        groups = {site: [list(group) for group in own] for site, own in self.groups.items()}
        way = {"name": type(self.way).__name__.lower(), "said": repr(self.way), "sentence": self.way.sentence}
        missed = {site: dict(one.missed) for site, one in self.made.items() if one.missed}
        return {"done": "share", "way": way, "groups": groups, "missed": missed, "notes": list(self.notes)}


def share(
    model: nn.Module,
    way: Way | int,
    scenes: Sequence[Scene] = (),
    *,
    where: str = "all",
    by: By = USUAL,
    tell: Callable[[str], Any] = lambda _: None,
) -> Shared:
    """A model whose heads share keys and values as a way says; a number is how many of these every layer keeps.

    `scenes` are texts, for ways that look at what heads say; where="self" or "cross" changes attentions of one kind.
    The model itself is left alone; one of transformers is copied as one of ours first.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}), seed=0)
    >>> done = share(net, 2)
    >>> [spec.heads.kv for _, spec in done.after.described.specs()], done.groups["decoder.0.attention"]
    ([2, 2], ((0, 1), (2, 3)))
    """
    model = ours(model)
    if where not in WHERE:
        raise SpecError(f"where={where!r} is unknown; {nearest(where, WHERE)}")
    chosen = Pool(way) if isinstance(way, int) else way
    if not isinstance(chosen, Way):
        raise SpecError(f"way={way!r} says nothing of what is shared; give a number of heads, or hw.surgery.Pool(...)")
    sites = [
        site for site in counts(model.described) if where in ("all", "cross" if site.endswith("cross") else "self")
    ]
    if not sites:
        raise SpecError(f"{model.described.name} has no {where}-attention; use where='all'")
    if chosen.gathers and len(scenes) < 2:
        raise SpecError(f"{len(scenes)} texts say little of what heads say; give at least two, or align='none'")
    made = _made(model, chosen, sites, scenes, (by, tell))
    after = rebuilt(model, {site: Changed(one.spec, one.weights) for site, one in made.items()})
    same = {
        site: Changed(attention_of(model, site).spec, one.same) for site, one in made.items() if one.same is not None
    }
    notes = [*_missed(made), *(f"{site}: {note}" for site, one in made.items() for note in one.notes)]
    return Shared(model, after, rebuilt(model, same) if same else None, chosen, made, tuple(notes))


def _missed(made: Mapping[str, Made]) -> Iterator[str]:
    """How much less means miss of what heads say, over all layers."""
    for side, word in WORDS.items():
        found = [one.missed[side] for one in made.values() if side in one.missed]
        if found:
            (low, high), (least, most) = ((min(lost), max(lost)) for lost in zip(*found, strict=True))
            yield f"means of {word} miss {least:.0%} to {most:.0%} of what heads say, unaligned {low:.0%} to {high:.0%}"


def _made(
    net: Transformer, way: Way, sites: Sequence[str], scenes: Sequence[Scene], how: tuple[By, Callable[[str], Any]]
) -> dict[str, Made]:
    by, tell = how
    batches = [scene.given for scene in scenes]
    found, made = worths(net, scenes, by).of if way.weighs else {}, dict[str, Made]()
    for some in _portions(net, sites) if way.gathers else [sites]:
        tell(f"reading {len(batches)} texts for {some[0]} and {len(some) - 1} others")
        told = gathered(net.eval(), batches, some) if way.gathers else {}
        for site in some:
            spec, weights = attention_of(net, site).spec, weights_of(net, site)
            worth = [found.get((site, head), math.inf) for head in range(len(spec.speaks))]
            tell(f"{site}: {way.sentence}")
            try:
                made[site] = way.make(spec, weights, told.get(site), worth)
            except SpecError as error:
                raise SpecError(f"{site}: {error}") from None
    return made


def _portions(net: Transformer, sites: Sequence[str]) -> list[list[str]]:
    """Sites in order, as many at a time as there is room for the sums of."""
    portions, full = [list[str]()], 0
    for site in sites:
        heads = attention_of(net, site).spec.heads
        need = 2 * heads.kv**2 * (heads.dim**2 + heads.vdim**2)
        if portions[-1] and full + need > AT_ONCE:
            portions.append([])
            full = 0
        portions[-1].append(site)
        full += need
    return portions
