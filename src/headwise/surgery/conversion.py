"""How heads of keys and values are shared, split or brought into another form: one attention at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ..errors import SpecError, suggest
from ..head_analysis.annotated_examples import Example
from ..models import Transformer
from ..nn import head_axis_ops
from ..parts.collaborative import convert_to_collaborative
from ..parts.latent_attention import convert_to_latent
from ..parts.mixture_of_heads import convert_to_mixture_of_heads
from ..spec.attention_spec import AttentionSpec
from .attention_replacement import (
    AttentionChange,
    get_attention,
    get_attention_parameters,
    replace_attentions,
    to_native_model,
)
from .head_alignment import AlignmentResult, CrossProducts, align_heads, compute_similarity, find_symmetry
from .head_grouping import HeadGroups, group_adjacent_heads, group_similar_heads, make_groups_contiguous
from .head_selection import DEFAULT_RANKING, HeadRanking, score_heads
from .kv_statistics import collect_kv_statistics
from .pruning_plan import count_heads

ALIGN_SIDES = {"none": "", "values": "v", "keys": "k", "both": "kv"}
KV_NAMES = {"k": "keys", "v": "values"}
GROUPINGS = ("even", "alike")
Weights = Mapping[str, Tensor]
KVStatistics = Mapping[str, CrossProducts] | None


class ConvertedLayer(NamedTuple):
    """A layer in its new form, the same function as before where there is one, and what must be said of it.

    `missed` is the share of what keys ("k") and values ("v") say that means of groups miss: as they were, and aligned.
    """

    spec: AttentionSpec
    weights: Weights
    equivalent_weights: Weights | None = None
    groups: HeadGroups = ()
    pooling_errors: Mapping[str, tuple[float, float]] = {}
    notes: tuple[str, ...] = ()


class AttentionConversion(ABC):
    """A way to change who reads whom. It is `exact` if the function stays, `gathers` if it looks at what heads say
    of texts first, and `weighs` if at what they are worth."""

    is_exact: ClassVar[bool] = False

    needs_importance: ClassVar[bool] = False

    @property
    def needs_statistics(self) -> bool:
        """Whether it asks what heads say."""
        return False

    @property
    @abstractmethod
    def summary(self) -> str:
        """What it does, in a few words."""

    @abstractmethod
    def convert_layer(
        self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]
    ) -> ConvertedLayer:
        """A layer so changed; `worth` is that of its heads, where the way asks for it."""


@dataclass(frozen=True)
class Pool(AttentionConversion):
    """`kv` heads of keys and values, each the mean of equally many (2305.13245).

    grouping="even" takes neighbours, "alike" those whose values are nearest to each other; align="values", "keys" or
    "both" maps the heads of a group as near to each other as the function allows before their mean is taken
    (2412.20677).
    """

    kv: int
    align: str = "none"
    grouping: str = "even"
    score: str = "distance"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("align", ALIGN_SIDES), ("grouping", GROUPINGS), ("score", ("distance", "cosine"))):
            if (said := getattr(self, name)) not in known:
                raise SpecError(f"{name}={said!r} is unknown; {suggest(str(said), known)}")

    @property
    def needs_statistics(self) -> bool:
        """Whether it asks what heads say."""
        return self.align != "none" or self.grouping == "alike"

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        mapped = (
            ""
            if self.align == "none"
            else f", after {self.align} were aligned"
            if self.align != "both"
            else (", after keys and values were aligned")
        )
        if self.kv == 1:
            return f"every layer has one head of keys and values, the mean of all{mapped}"
        return (
            f"every layer has {self.kv} heads of keys and values, means of {_describe_grouping(self.grouping)}{mapped}"
        )

    def convert_layer(
        self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]
    ) -> ConvertedLayer:
        groups = self._group_heads(spec, weights, statistics)
        found = AlignmentResult(dict(weights), {}, {})
        if sides := ALIGN_SIDES[self.align]:
            assert statistics is not None
            found = align_heads(spec, weights, groups, statistics, sides=sides)
            if found.skip_reasons.keys() == set(sides):
                raise SpecError(f"nothing can be aligned: {'; '.join(found.skip_reasons.values())}; leave align out")
        notes = tuple(f"{KV_NAMES[side]} stay as they are: {why}" for side, why in found.skip_reasons.items())
        missed = {side: lost for side, lost in found.pooling_errors.items() if side not in found.skip_reasons}
        shared, left = make_groups_contiguous(*head_axis_ops.share_kv_heads(spec, found.weights, groups))
        return ConvertedLayer(shared, left, found.weights if sides else None, groups, missed, notes)

    def _group_heads(self, spec: AttentionSpec, weights: Weights, gathered: KVStatistics) -> HeadGroups:
        if self.grouping == "even":
            return group_adjacent_heads(spec.heads.kv, self.kv)
        assert gathered is not None
        group_adjacent_heads(spec.heads.kv, self.kv)  # which refuses what does not divide
        free, _ = find_symmetry(spec, weights, "v")
        return group_similar_heads(compute_similarity(gathered["v"], free, kind=self.score), self.kv, seed=self.seed)


@dataclass(frozen=True)
class Split(AttentionConversion):
    """Every query head has its own copy of what it reads: exactly the same, for work that wants heads apart."""

    is_exact: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return "every query head has keys and values of its own"

    def convert_layer(
        self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]
    ) -> ConvertedLayer:
        made = head_axis_ops.split_kv_heads(spec, weights)
        return ConvertedLayer(made[0], made[1])


@dataclass(frozen=True)
class Merged(AttentionConversion):
    """All heads of keys and values in one latent vector: exactly the same, as a start for a smaller one."""

    is_exact: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return "keys and values of all heads are one latent vector"

    def convert_layer(
        self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]
    ) -> ConvertedLayer:
        made = convert_to_latent(spec, weights)
        return ConvertedLayer(made[0], made[1])


@dataclass(frozen=True)
class Collaborate(AttentionConversion):
    """Queries and keys of all heads in one shared space of this width (2006.16362)."""

    width: int

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return f"queries and keys of all heads share a space of {self.width} channels"

    def convert_layer(
        self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]
    ) -> ConvertedLayer:
        made = convert_to_collaborative(spec, weights, self.width)
        return ConvertedLayer(
            made.spec, made.weights, notes=(f"scores are met to {made.relative_error:.2%} of their size",)
        )


@dataclass(frozen=True)
class Route(AttentionConversion):
    """Of every layer so many heads always speak, those worth most, and `active` of the others, token by token."""

    needs_importance: ClassVar[bool] = True
    num_always_active: int
    num_active: int

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return (
            f"{self.num_always_active} heads of every layer always speak, and of the others the "
            f"{self.num_active} that ask loudest"
        )

    def convert_layer(
        self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]
    ) -> ConvertedLayer:
        if not 0 <= self.num_always_active <= len(importance):
            raise SpecError(
                f"{self.num_always_active} of {len(importance)} heads cannot always speak; give at most "
                f"{len(importance)}"
            )
        first = sorted(range(len(importance)), key=lambda head: -importance[head])[: self.num_always_active]
        made = convert_to_mixture_of_heads(spec, weights, sorted(first), self.num_active)
        return ConvertedLayer(made[0], made[1])


def _describe_grouping(grouping: str) -> str:
    return "neighbours" if grouping == "even" else "those that are most alike"


# --- Heads of keys and values shared, split or merged in a whole model ---------------------------------

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
        way = {
            "name": type(self.conversion).__name__.lower(),
            "said": repr(self.conversion),
            "sentence": self.conversion.summary,
        }
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
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}), seed=0
    ... )
    >>> done = convert(net, 2)
    >>> [spec.heads.kv for _, spec in done.after.spec.attention_specs()], done.groups["decoder.0.attention"]
    ([2, 2], ((0, 1), (2, 3)))
    """
    model = to_native_model(model)
    if kind not in ATTENTION_KINDS:
        raise SpecError(f"where={kind!r} is unknown; {suggest(kind, ATTENTION_KINDS)}")
    chosen = Pool(conversion) if isinstance(conversion, int) else conversion
    if not isinstance(chosen, AttentionConversion):
        raise SpecError(
            f"way={conversion!r} says nothing of what is shared; give a number of heads, or hw.surgery.Pool(...)"
        )
    sites = [site for site in count_heads(model.spec) if kind in ("all", "cross" if site.endswith("cross") else "self")]
    if not sites:
        raise SpecError(f"{model.spec.name} has no {kind}-attention; use where='all'")
    if chosen.needs_statistics and len(examples) < 2:
        raise SpecError(f"{len(examples)} texts say little of what heads say; give at least two, or align='none'")
    made = _convert_layers(model, chosen, sites, examples, (ranking, log))
    after = replace_attentions(model, {site: AttentionChange(one.spec, one.weights) for site, one in made.items()})
    same = {
        site: AttentionChange(get_attention(model, site).spec, one.equivalent_weights)
        for site, one in made.items()
        if one.equivalent_weights is not None
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
    net: Transformer,
    way: AttentionConversion,
    sites: Sequence[str],
    scenes: Sequence[Example],
    how: tuple[HeadRanking, Callable[[str], Any]],
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
