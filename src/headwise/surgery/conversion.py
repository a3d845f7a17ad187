"""Conversion of attention layers: MHA to GQA or MQA by pooling, to MLA, collaborative or composed
heads, mixture of heads, MHA.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..attention import head_axis_ops
from ..attention.parts.collaborative import convert_to_collaborative
from ..attention.parts.composed_heads import convert_to_composed
from ..attention.parts.latent_attention import convert_to_latent
from ..attention.parts.mixture_of_heads import convert_to_mixture_of_heads
from ..attention.spec.attention_spec import AttentionSpec
from ..models import Transformer
from ..observe.head_analysis.annotated_examples import Example
from ..report.progress import count_items
from ..util.errors import SpecError, suggest
from .attention_replacement import (
    AttentionChange,
    get_attention,
    get_attention_parameters,
    replace_attentions,
)
from .head_alignment import (
    AlignmentResult,
    CrossProducts,
    align_heads,
    compute_similarity,
    find_symmetry,
)
from .head_grouping import (
    HeadGroups,
    collect_kv_statistics,
    group_adjacent_heads,
    group_similar_heads,
    permute_heads,
)
from .head_selection import DEFAULT_RANKING, HeadRanking, score_heads
from .model_and_texts import NativeResult, OpenedModel
from .pruning_plan import count_heads
from .verification.model_comparison import full_precision, parameter_dtype

ALIGN_SIDES = {"none": "", "values": "v", "keys": "k", "both": "kv"}
KV_NAMES = {"k": "keys", "v": "values"}
GROUPINGS = ("consecutive", "similar")
Weights = Mapping[str, Tensor]
KVStatistics = Mapping[str, CrossProducts] | None


class ConvertedLayer(NamedTuple):
    """Converted layer: its spec and weights, and the groups, errors and notes of the conversion.

    Weights of 16 bits are converted in float32. `equivalent_weights` are aligned but not yet
    pooled: they compute the same function as before. `pooling_errors` is the fraction of the keys'
    ("k") and values' ("v") squared norm that group means lose, unaligned and aligned.
    """

    spec: AttentionSpec
    weights: Weights
    equivalent_weights: Weights | None = None
    groups: HeadGroups = ()
    pooling_errors: Mapping[str, tuple[float, float]] = {}
    notes: tuple[str, ...] = ()


class AttentionConversion(ABC):
    """Strategy that converts one attention layer.

    `is_exact`: the converted layer computes the same function.
    """

    is_exact: ClassVar[bool] = False

    @property
    def importance_ranking(self) -> HeadRanking | None:
        """How to estimate the importance for `convert_layer`; None if it needs none."""
        return None

    @property
    def needs_statistics(self) -> bool:
        """True if `convert_layer` needs keys and values collected over examples."""
        return bool(self.text_uses) and self.importance_ranking is None

    @property
    def text_uses(self) -> tuple[str, ...]:
        """Uses of the texts, as notes of a verification report; empty if the conversion does
        not depend on texts.
        """
        return () if self.importance_ranking is None else ("heads were chosen",)

    @property
    @abstractmethod
    def summary(self) -> str:
        """The converted layer in one clause."""

    @abstractmethod
    def convert_layer(
        self,
        spec: AttentionSpec,
        weights: Weights,
        statistics: KVStatistics,
        importance: Sequence[float],
        /,
    ) -> ConvertedLayer:
        """Convert one layer; `importance` holds a score per output head, infinity where unknown."""


@dataclass(frozen=True)
class Pool(AttentionConversion):
    """GQA by mean pooling: `kv` key-value heads, each the mean of a group of equal size
    (2305.13245).

    grouping="consecutive" groups neighbours, "similar" heads with close values. align="values",
    "keys" or "both" rotates the heads of a group towards each other before they are averaged,
    without changing the function (2412.20677).
    """

    kv: int
    align: str = "none"
    grouping: str = "consecutive"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"align": ALIGN_SIDES, "grouping": GROUPINGS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise SpecError(f"unknown {name}={value!r}; {suggest(str(value), allowed)}")

    @property
    def text_uses(self) -> tuple[str, ...]:
        """Uses of the texts: grouping by similarity, and alignment."""
        grouped = ("heads were grouped",) if self.grouping == "similar" else ()
        return (*grouped, *(("heads were aligned",) if self.align != "none" else ()))

    @property
    def summary(self) -> str:
        """The converted layer in one clause."""
        sides = "keys and values" if self.align == "both" else self.align
        aligned = "" if self.align == "none" else f", after aligning {sides}"
        if self.kv == 1:
            return f"one key-value head per layer, the mean of all{aligned}"
        heads = "neighbours" if self.grouping == "consecutive" else "similar heads"
        return f"{self.kv} key-value heads per layer, means of {heads}{aligned}"

    def convert_layer(
        self,
        spec: AttentionSpec,
        weights: Weights,
        statistics: KVStatistics,
        importance: Sequence[float],
        /,
    ) -> ConvertedLayer:
        groups = group_adjacent_heads(spec.heads.kv, self.kv)  # raises for unequal groups
        spec.with_heads(kv=self.kv)  # raises if parts need more key-value heads
        if self.grouping == "similar":
            assert statistics is not None
            symmetry, _ = find_symmetry(spec, weights, "v")
            similarity = compute_similarity(statistics["v"], symmetry)
            groups = group_similar_heads(similarity, self.kv, seed=self.seed)
        alignment = AlignmentResult(dict(weights), {}, {})
        sides = ALIGN_SIDES[self.align]
        if sides:
            assert statistics is not None
            alignment = align_heads(spec, weights, groups, statistics, sides=sides)
        skipped = alignment.skip_reasons
        if sides and skipped.keys() == set(sides):
            raise SpecError(f"cannot align heads: {'; '.join(skipped.values())}. Use align='none'")
        notes = [f"{KV_NAMES[side]} were not aligned: {skipped[side]}" for side in skipped]
        errors = {
            side: error for side, error in alignment.pooling_errors.items() if side not in skipped
        }
        pooled = head_axis_ops.share_kv_heads(spec, alignment.weights, groups)
        return ConvertedLayer(
            *permute_heads(*pooled),
            alignment.weights if sides else None,
            groups,
            errors,
            tuple(notes),
        )


@dataclass(frozen=True)
class ToMHA(AttentionConversion):
    """MHA: a copy of its key-value head for every query head. Computes the same function."""

    is_exact: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        """The converted layer in one clause."""
        return "one key-value head per query head"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, /, *_: Any) -> ConvertedLayer:
        return ConvertedLayer(*head_axis_ops.split_kv_heads(spec, weights))


@dataclass(frozen=True)
class ToLatent(AttentionConversion):
    """MLA: keys and values of all heads from one latent vector. Same function; a start for a
    smaller latent.
    """

    is_exact: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        """The converted layer in one clause."""
        return "keys and values of all heads from one latent vector"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, /, *_: Any) -> ConvertedLayer:
        return ConvertedLayer(*convert_to_latent(spec, weights))


@dataclass(frozen=True)
class ToCollaborative(AttentionConversion):
    """Collaborative heads: queries and keys of all heads share one space of `width` channels
    (2006.16362).
    """

    width: int

    @property
    def summary(self) -> str:
        """The converted layer in one clause."""
        return f"queries and keys of all heads in a shared space of {self.width} channels"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, /, *_: Any) -> ConvertedLayer:
        result = convert_to_collaborative(spec, weights, self.width)
        return ConvertedLayer(
            result.spec,
            result.weights,
            notes=(f"relative error of attention scores {result.relative_error:.2%}",),
        )


@dataclass(frozen=True)
class ToComposed(AttentionConversion):
    """Composed heads: keys and values of all heads are sums of `components` cached ones
    (2601.19611).
    """

    components: int

    @property
    def summary(self) -> str:
        """The converted layer in one clause."""
        return f"keys and values of all heads as sums of {self.components} cached ones"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, /, *_: Any) -> ConvertedLayer:
        result = convert_to_composed(spec, weights, self.components)
        errors = f"of keys {result.key_error:.2%}, of values {result.value_error:.2%}"
        note = f"relative error of the parameters {errors}"
        return ConvertedLayer(result.spec, result.weights, notes=(note,))


@dataclass(frozen=True)
class ToMixtureOfHeads(AttentionConversion):
    """Mixture of heads: the most important heads are always active, `num_active` others per token
    (2410.11842).
    """

    num_always_active: int
    num_active: int
    ranking: HeadRanking = DEFAULT_RANKING

    @property
    def importance_ranking(self) -> HeadRanking | None:
        """Return the ranking that chooses the always-active heads."""
        return self.ranking

    @property
    def summary(self) -> str:
        """The converted layer in one clause."""
        return (
            f"{self.num_always_active} heads per layer always active, and for each token the "
            f"{self.num_active} of the others with the highest router scores"
        )

    def convert_layer(
        self,
        spec: AttentionSpec,
        weights: Weights,
        statistics: KVStatistics,
        importance: Sequence[float],
        /,
    ) -> ConvertedLayer:
        count = self.num_always_active
        if not 0 <= count <= len(importance):
            raise SpecError(
                f"num_always_active must be between 0 and {len(importance)}, the number of heads, "
                f"got {count}"
            )
        ranked = sorted(range(len(importance)), key=lambda head: -importance[head])
        routed = convert_to_mixture_of_heads(spec, weights, sorted(ranked[:count]), self.num_active)
        return ConvertedLayer(*routed)


# --- Conversion of a whole model ------------------------------------------------------------------

ATTENTION_KINDS = ("all", "self", "cross")
MAX_STATISTICS = 2**26  # numbers of cross products collected in one pass over the examples


@dataclass(frozen=True, eq=False, repr=False)
class ConversionResult(NativeResult):
    """Model before and after, and the converted layers before rounding to the model's dtype."""

    conversion: AttentionConversion
    layers: Mapping[str, ConvertedLayer]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.before.spec.name}: {self.summary}", *self.notes])

    @property
    def equivalent(self) -> Transformer | None:
        """Model with aligned heads before pooling, equivalent to `before`; None without alignment.

        Rebuilt at each access, in float32 if `before` has 16 bits.
        """
        aligned = dict[str, AttentionChange]()
        for site, layer in self.layers.items():
            if layer.equivalent_weights is not None:
                spec = get_attention(self.before, site).spec
                aligned[site] = AttentionChange(spec, layer.equivalent_weights)
        return self._in_float32(aligned) if aligned else None

    @property
    def summary(self) -> str:
        return self.conversion.summary

    @property
    def verification_options(self) -> dict[str, Any]:
        def convert_in_float32() -> Transformer:
            return self._in_float32(_attention_changes(self.layers))

        equivalents = dict[str, Callable[[], Any]]()
        if any(layer.equivalent_weights is not None for layer in self.layers.values()):
            equivalents["aligned, before heads are pooled"] = lambda: self.equivalent
        if self.conversion.is_exact:
            equivalents["the new form, an exact rewrite"] = convert_in_float32
        return {
            "equivalents": equivalents,
            "surgery_pair": (self.before, self.after),
            "exact_change": convert_in_float32,
        }

    def _in_float32(self, changes: Mapping[str, AttentionChange]) -> Transformer:
        dtype = full_precision(parameter_dtype(self.before))
        return replace_attentions(self.before, changes, dtype)

    @property
    def groups(self) -> dict[str, HeadGroups]:
        """Pooled groups of key-value heads by site."""
        groups = {site: layer.groups for site, layer in self.layers.items() if layer.groups}
        return {site: tuple(map(tuple, own)) for site, own in groups.items()}

    @property
    def data(self) -> dict[str, Any]:
        """Conversion as JSON-serialisable values."""
        errors = {site: dict(own.pooling_errors) for site, own in self.layers.items()}
        return {
            "operation": "convert",
            "conversion": {
                "name": type(self.conversion).__name__.lower(),
                "options": repr(self.conversion),
                "sentence": self.conversion.summary,
            },
            "groups": {site: list(map(list, groups)) for site, groups in self.groups.items()},
            "pooling_errors": {site: own for site, own in errors.items() if own},
            "notes": list(self.notes),
        }


def convert_native(
    opened: OpenedModel,
    conversion: AttentionConversion,
    kind: str = "all",
    log: Callable[[str], Any] = lambda _: None,
) -> ConversionResult:
    """Return the conversion of a model that headwise loads as its own, as by `hw.convert`."""
    original, net, examples, reading_notes = opened
    sites = select_sites(net.spec.name, count_heads(net.spec), kind)
    if conversion.needs_statistics and len(examples) < 2:
        raise SpecError(
            f"cannot collect keys and values from {len(examples)} texts. Give at least 2, or use "
            "align='none'"
        )
    layers = _convert_layers(net, conversion, sites, examples, log)
    after = replace_attentions(net, _attention_changes(layers, parameter_dtype(net)))
    notes = list[str]()
    for side, name in KV_NAMES.items():
        errors = [own.pooling_errors[side] for own in layers.values() if side in own.pooling_errors]
        if errors:
            unaligned, aligned = zip(*errors, strict=True)
            notes.append(
                f"pooling {name} loses {min(aligned):.0%} to {max(aligned):.0%} of their squared "
                f"norm, unaligned {min(unaligned):.0%} to {max(unaligned):.0%}"
            )
    for site, layer in layers.items():
        notes += [f"{site}: {note}" for note in layer.notes]
    notes += reading_notes
    return ConversionResult(net, after, original, conversion, layers, tuple(notes))


def read_conversion(conversion: AttentionConversion | int) -> AttentionConversion:
    """Return a conversion; an int is the number of key-value heads, as in `Pool`."""
    strategy = Pool(conversion) if isinstance(conversion, int) else conversion
    if not isinstance(strategy, AttentionConversion):
        raise SpecError(
            f"conversion={conversion!r} is no AttentionConversion; give a number of key-value "
            "heads, or hw.surgery.Pool(...)"
        )
    return strategy


def select_sites(model_name: str, sites: Iterable[str], kind: str) -> list[str]:
    """Return the attentions of one kind, "self" or "cross", or of all."""
    if kind not in ATTENTION_KINDS:
        raise SpecError(f"unknown kind={kind!r}; {suggest(kind, ATTENTION_KINDS)}")
    chosen = [s for s in sites if kind in ("all", "cross" if s.endswith("cross") else "self")]
    if not chosen:
        what = "attention" if kind == "all" else f"{kind}-attention"
        raise SpecError(
            f"{model_name} has no {what} that headwise finds; hw.sites(model) lists the others"
        )
    return chosen


def _attention_changes(
    layers: Mapping[str, ConvertedLayer], dtype: torch.dtype = torch.float32
) -> dict[str, AttentionChange]:
    """Return the changes of all layers, with weights of float32 rounded to the
    dtype of the model.
    """
    changes = dict[str, AttentionChange]()
    for site, layer in layers.items():
        rounded = dict(layer.weights)
        for name, weight in layer.weights.items():
            rounded[name] = weight.to(dtype) if weight.dtype == torch.float32 else weight
        changes[site] = AttentionChange(layer.spec, rounded)
    return changes


def _convert_layers(
    net: Transformer,
    conversion: AttentionConversion,
    sites: Sequence[str],
    examples: Sequence[Example],
    log: Callable[[str], Any],
) -> dict[str, ConvertedLayer]:
    batches = [example.model_inputs for example in examples]
    ranking = conversion.importance_ranking
    layers = dict[str, ConvertedLayer]()
    scores = {} if ranking is None else score_heads(net, examples, ranking, log).scores
    # lists of sites with at most MAX_STATISTICS numbers of cross products
    groups = [list[str]()]
    used = 0
    for site in sites:
        heads = get_attention(net, site).spec.heads
        size = 2 * heads.kv**2 * (heads.dim**2 + heads.vdim**2)
        if conversion.needs_statistics and groups[-1] and used + size > MAX_STATISTICS:
            groups.append([])
            used = 0
        groups[-1].append(site)
        used += size
    for group in groups:
        statistics = dict[str, dict[str, CrossProducts]]()
        if conversion.needs_statistics:
            more = f"{group[0]} and {len(group) - 1} more"
            log(f"collecting keys and values of {len(batches)} examples: {more}")
            counted = count_items(batches, log, "collecting keys and values", "texts")
            statistics = collect_kv_statistics(net.eval(), counted, group)
        for site in group:
            spec = get_attention(net, site).spec
            weights = get_attention_parameters(net, site)
            for name, weight in weights.items():
                if weight.is_floating_point():
                    weights[name] = weight.to(full_precision(weight.dtype))
            heads = range(len(spec.score_head_of_output))
            importance = [scores.get((site, head), math.inf) for head in heads]
            log(f"{site}: {conversion.summary}")
            try:
                layers[site] = conversion.convert_layer(
                    spec, weights, statistics.get(site), importance
                )
            except SpecError as error:
                raise SpecError(f"{site}: {error}") from None
    return layers
