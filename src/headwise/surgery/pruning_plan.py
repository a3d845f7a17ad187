"""Pruning plans: the heads that every attention of a model keeps, and why, fixed before any weight
is changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..attention.presets import design
from ..attention.spec.attention_spec import AttentionSpec
from ..models import Transformer
from ..models.model_spec import ModelSpec, to_json
from ..observe.inspect.abilities import kv_sharing_reason
from ..observe.inspect.attention_sites import find_attention
from ..util.errors import SpecError, suggest

HeadId = tuple[str, int]  # name of an attention, index of a head
KeptHeads = Mapping[str, tuple[int, ...]]


class SiteSpecs(NamedTuple):
    """The heads of a model that headwise does not load as its own, as specs of its sites."""

    name: str
    specs: tuple[tuple[str, AttentionSpec], ...]

    def attention_specs(self) -> tuple[tuple[str, AttentionSpec], ...]:
        """Return the name and the spec of every site."""
        return self.specs


HeadSpecs = ModelSpec | SiteSpecs


def describe_heads(model: nn.Module) -> HeadSpecs:
    """Return the spec of a headwise model; of another one, its attentions whose calls can be read
    and whose key-value heads no other layer reads. Recurrent mixers are left out.
    """
    if isinstance(model, Transformer):
        return model.spec
    specs = list[tuple[str, AttentionSpec]]()
    for one in find_attention(model):
        site = one.site
        is_free = not kv_sharing_reason([one.module]) and site.same_as is None
        if one.adapter == "transformers" and site.observe.possible and is_free:
            spec = design(model=site.q * site.dim, heads=site.q, kv=site.kv, dim=site.dim)
            specs.append((site.name, spec))
    if not specs:
        raise SpecError(
            f"no attention of {type(model).__name__} can lose key-value heads: its calls cannot be "
            "read, or layers share their keys and values; name heads for hw.prune_module"
        )
    return SiteSpecs(type(model).__name__, tuple(specs))


@dataclass(frozen=True)
class PruningPlan:
    """The heads that every attention of a model keeps, and how they were chosen.

    >>> import headwise as hw
    >>> gpt2 = hw.families.read_model_spec(
    ...     {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}
    ... )
    >>> plan = PruningPlan.without(gpt2, [("decoder.0.attention", 3)], "by hand")
    >>> plan.keep["decoder.0.attention"], plan.num_kept, plan.removed_heads
    ((0, 1, 2), 7, (('decoder.0.attention', 3),))
    """

    keep: KeptHeads
    head_counts: Mapping[str, int]
    reason: str
    notes: tuple[str, ...] = ()

    @staticmethod
    def from_kept_heads(
        model_spec: HeadSpecs,
        keep: Mapping[str, Iterable[int]],
        reason: str,
        notes: Sequence[str] = (),
    ) -> PruningPlan:
        """Return a plan from the heads that some sites keep; the other sites
        keep all their heads.
        """
        head_counts = count_heads(model_spec)
        wrong = [site for site in keep if site not in head_counts]
        if wrong:
            raise SpecError(
                f"{model_spec.name} has no attention {wrong[0]!r}; {suggest(wrong[0], head_counts)}"
            )
        kept_heads = {
            site: tuple(keep.get(site, range(count))) for site, count in head_counts.items()
        }
        for site, heads in kept_heads.items():
            check_heads(site, heads, head_counts[site])
        if not any(kept_heads.values()):
            raise SpecError(f"cannot remove all heads of {model_spec.name}. Keep at least one")
        return PruningPlan(
            {site: tuple(sorted(heads)) for site, heads in kept_heads.items()},
            head_counts,
            reason,
            tuple(notes),
        )

    @staticmethod
    def without(
        model_spec: HeadSpecs, heads: Iterable[HeadId], reason: str, notes: Sequence[str] = ()
    ) -> PruningPlan:
        """Return a plan that removes the given heads."""
        removed: dict[str, list[int]] = {}
        for site, head in heads:
            removed.setdefault(site, []).append(head)
        head_counts = count_heads(model_spec)
        for site, indices in removed.items():
            if site not in head_counts:
                raise SpecError(
                    f"{model_spec.name} has no attention {site!r}; {suggest(site, head_counts)}"
                )
            check_heads(site, indices, head_counts[site])
        keep = {
            site: sorted(set(range(head_counts[site])).difference(indices))
            for site, indices in removed.items()
        }
        return PruningPlan.from_kept_heads(model_spec, keep, reason, notes)

    @property
    def removed_heads(self) -> tuple[HeadId, ...]:
        """The heads that the plan removes."""
        removed: list[HeadId] = []
        for site, kept_heads in self.keep.items():
            heads = range(self.head_counts[site])
            removed += [(site, head) for head in heads if head not in kept_heads]
        return tuple(removed)

    @property
    def changed_sites(self) -> KeptHeads:
        """The heads kept at the sites that lose any."""
        return {
            site: kept_heads
            for site, kept_heads in self.keep.items()
            if len(kept_heads) < self.head_counts[site]
        }

    @property
    def num_kept(self) -> int:
        """Number of heads kept."""
        return sum(map(len, self.keep.values()))

    @property
    def summary(self) -> str:
        """One line: heads kept, heads in all, and how they were chosen."""
        total = sum(self.head_counts.values())
        return f"{self.num_kept} of {total} heads kept, {self.reason}"

    @property
    def data(self) -> dict[str, Any]:
        """The plan as JSON-serialisable values."""
        keep = {site: list(heads) for site, heads in self.keep.items()}
        return {
            "keep": keep,
            "head_counts": dict(self.head_counts),
            "reason": self.reason,
            "notes": list(self.notes),
        }


def count_heads(model_spec: HeadSpecs) -> dict[str, int]:
    """Return the number of output heads of each attention, by site."""
    return {site: len(spec.score_head_of_output) for site, spec in model_spec.attention_specs()}


def check_heads(site: str, heads: Sequence[int], head_count: int) -> None:
    """Raise SpecError if a head does not exist or is listed twice."""
    wrong = [head for head in heads if type(head) is not int or not 0 <= head < head_count]
    if wrong:
        raise SpecError(f"{site} has no head {wrong[0]!r}; its heads are 0..{head_count - 1}")
    if len(set(heads)) < len(heads):
        twice = next(head for head in heads if list(heads).count(head) > 1)
        raise SpecError(f"head {twice} of {site} is listed twice; list it once")


UNIT_KINDS = ("auto", "head", "group")


@dataclass(frozen=True)
class HeadUnit:
    """Heads of one site that are removed or kept together."""

    site: str
    heads: tuple[int, ...]


def list_units(model_spec: HeadSpecs, kind: str = "auto") -> dict[str, tuple[HeadUnit, ...]]:
    """Return the units of every site: single heads ("head"), or the query heads of one key-value
    head ("group").

    "auto" takes groups if a layer has several with more than one head each: only removing whole
    groups shrinks the KV cache.

    >>> import headwise as hw
    >>> llama = {
    ...     "model_type": "llama",
    ...     "hidden_size": 8,
    ...     "num_attention_heads": 4,
    ...     "num_key_value_heads": 2,
    ... }
    >>> small = hw.families.read_model_spec(
    ...     llama | {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 11}
    ... )
    >>> [unit.heads for unit in list_units(small)["decoder.0.attention"]]
    [(0, 1), (2, 3)]
    """
    if kind not in UNIT_KINDS:
        raise SpecError(f"unknown unit={kind!r}; {suggest(kind, UNIT_KINDS)}")
    return {
        site: tuple(_site_units(site, spec, kind)) for site, spec in model_spec.attention_specs()
    }


def _site_units(site: str, spec: AttentionSpec, kind: str) -> Iterator[HeadUnit]:
    outs = range(len(spec.score_head_of_output))
    groups: dict[frozenset[int], list[int]] = {}
    for out in outs:
        rows = spec.compared_score_heads(out)
        kv_heads = frozenset(spec.heads.kv_head_of_query[row] for row in rows)
        groups.setdefault(kv_heads, []).append(out)
    disjoint = sum(map(len, groups)) == len(frozenset[int]().union(*groups))
    if kind == "group" and not disjoint:
        raise SpecError(
            f"cannot group heads of {site}: each uses several key-value heads. Use unit='head'"
        )
    use_groups = disjoint and (kind == "group" or (kind == "auto" and 1 < len(groups) < len(outs)))
    for heads in groups.values() if use_groups else zip(outs, strict=True):
        yield HeadUnit(site, tuple(heads))


Value = TypeVar("Value")


def choose_sites(sites: Mapping[str, Value], names: Sequence[str]) -> dict[str, Value]:
    """Return the sites with these names or prefixes, such as "encoder"; all if `names` is empty.

    >>> choose_sites({"decoder.0.attention": 4, "decoder.1.attention": 8}, ["decoder.1"])
    {'decoder.1.attention': 8}
    """
    for name in names:
        if not any(f"{site}.".startswith(f"{name}.") for site in sites):
            raise SpecError(f"the model has no attention {name!r}; {suggest(name, sites)}")
    prefixes = tuple(f"{name}." for name in names) or ("",)
    return {site: value for site, value in sites.items() if f"{site}.".startswith(prefixes)}


def collect_heads(sites: Iterable[str], units: Iterable[HeadUnit]) -> dict[str, tuple[int, ...]]:
    """Return the heads of these units by site, in order."""
    heads: dict[str, list[int]] = {site: [] for site in sites}
    for unit in units:
        heads[unit.site] += unit.heads
    return {site: tuple(sorted(own)) for site, own in heads.items()}


def list_rounded_shares(
    amount: float,
    scope: str,
    keep: Mapping[str, Sequence[int]],
    units_by_site: Mapping[str, Sequence[HeadUnit]],
) -> Iterator[str]:
    """Yield a note for every number of kept heads that is not `amount`, because key-value groups
    are kept whole.

    >>> units = {
    ...     "a": [HeadUnit("a", (0, 1, 2)), HeadUnit("a", (3, 4, 5)), HeadUnit("a", (6, 7, 8))]
    ... }
    >>> list(list_rounded_shares(0.75, "layer", {"a": range(6)}, units))
    ['keep=0.75 was rounded to whole key-value groups: 6 of 9 heads (0.667) in each layer']
    """
    grouped = {site: units for site, units in units_by_site.items() if len(units[0].heads) > 1}
    counts: list[tuple[int, int]] = []
    for site, units in grouped.items():
        counts.append((len(keep[site]), sum(len(unit.heads) for unit in units)))
    if scope == "model" and counts:
        counts = [(sum(count for count, _ in counts), sum(heads for _, heads in counts))]
    where = "the model" if scope == "model" else "each layer"
    for num_kept, heads in dict.fromkeys(counts):
        asked = amount if isinstance(amount, int) else amount * heads
        if abs(num_kept - asked) > 1e-6 * heads:
            share = f"{num_kept} of {heads} heads ({num_kept / heads:.3f})"
            yield f"keep={amount:g} was rounded to whole key-value groups: {share} in {where}"


# --- Model fingerprints ---------------------------------------------------------------------------


def fingerprint_model(net: nn.Module) -> str:
    """Return the SHA-256 of a model's spec (or the name of its class) and tensors, in hexadecimal.

    >>> import headwise as hw
    >>> small = hw.families.read_model_spec(
    ...     {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
    ... )
    >>> nets = [hw.build(small, seed=seed) for seed in (0, 0, 1)]
    >>> [fingerprint_model(net) == fingerprint_model(nets[0]) for net in nets]
    [True, True, False]
    """
    description = to_json(net.spec) if isinstance(net, Transformer) else type(net).__name__
    digest = hashlib.sha256(description.encode())
    for name, tensor in net.state_dict().items():
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
