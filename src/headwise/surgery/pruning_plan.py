"""What is kept of every attention of a model, and why: known before anything is cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SpecError, suggest
from ..model_spec import ModelSpec, to_json
from ..models import Transformer
from ..spec.attention_spec import AttentionSpec

HeadId = tuple[str, int]  # the name of a site, and a head of it by its number
KeptHeads = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PruningPlan:
    """The heads that each site keeps, for every attention of a model, and how they were chosen.

    >>> import headwise as hw
    >>> gpt2 = hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2})
    >>> plan = PruningPlan.without(gpt2, [("decoder.0.attention", 3)], "named")
    >>> plan.keep["decoder.0.attention"], plan.num_kept, plan.removed_heads
    ((0, 1, 2), 7, (('decoder.0.attention', 3),))
    """

    keep: KeptHeads
    head_counts: Mapping[str, int]
    reason: str
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        model_spec: ModelSpec, keep: Mapping[str, Iterable[int]], reason: str, notes: Sequence[str] = ()
    ) -> PruningPlan:
        """A plan that says what some sites keep; the others keep all."""
        there = count_heads(model_spec)
        if wrong := [site for site in keep if site not in there]:
            raise SpecError(f"{model_spec.name} has no attention {wrong[0]!r}; {suggest(wrong[0], there)}")
        whole = {site: tuple(keep.get(site, range(count))) for site, count in there.items()}
        for site, heads in whole.items():
            check_heads(site, heads, there[site])
        if not any(whole.values()):
            raise SpecError(f"no head would be left in {model_spec.name}; keep at least one")
        return PruningPlan({site: tuple(sorted(heads)) for site, heads in whole.items()}, there, reason, tuple(notes))

    @staticmethod
    def without(model_spec: ModelSpec, heads: Iterable[HeadId], reason: str, notes: Sequence[str] = ()) -> PruningPlan:
        """A plan that takes these heads away."""
        gone: dict[str, list[int]] = {}
        for site, head in heads:
            gone.setdefault(site, []).append(head)
        there = count_heads(model_spec)
        for site, numbers in gone.items():
            if site not in there:
                raise SpecError(f"{model_spec.name} has no attention {site!r}; {suggest(site, there)}")
            check_heads(site, numbers, there[site])
        keep = {site: [head for head in range(there[site]) if head not in own] for site, own in gone.items()}
        return PruningPlan.of(model_spec, keep, reason, notes)

    @staticmethod
    def from_dict(model_spec: ModelSpec, values: Mapping[str, Any]) -> PruningPlan:
        """The plan whose `data` this is.

        >>> import headwise as hw
        >>> gpt2 = hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 1})
        >>> PruningPlan.from_dict(gpt2, {"keep": {"decoder.0.attention": [1, 2]}, "why": "by hand"}).summary
        '2 of 4 heads stay, by hand'
        """
        keep = values.get("keep")
        if not isinstance(keep, dict) or not all(isinstance(heads, list) for heads in keep.values()):
            raise SpecError(f"keep={keep!r} does not say which heads stay; give a list of heads for each site")
        return PruningPlan.of(model_spec, keep, str(values.get("why", "as was planned")))

    @property
    def removed_heads(self) -> tuple[HeadId, ...]:
        """The heads that are taken away."""
        return tuple(
            (site, head)
            for site, kept in self.keep.items()
            for head in range(self.head_counts[site])
            if head not in kept
        )

    @property
    def changed_sites(self) -> KeptHeads:
        """What the sites keep that lose any."""
        return {site: kept for site, kept in self.keep.items() if len(kept) < self.head_counts[site]}

    @property
    def num_kept(self) -> int:
        """How many heads stay."""
        return sum(map(len, self.keep.values()))

    @property
    def summary(self) -> str:
        """It in a line."""
        whole = sum(self.head_counts.values())
        return f"{self.num_kept} of {whole} heads stay, {self.reason}"

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        keep = {site: list(heads) for site, heads in self.keep.items()}
        return {"keep": keep, "there": dict(self.head_counts), "why": self.reason, "notes": list(self.notes)}


def count_heads(model_spec: ModelSpec) -> dict[str, int]:
    """How many heads speak at each site."""
    return {site: len(spec.score_head_of_output) for site, spec in model_spec.attention_specs()}


def check_heads(site: str, heads: Sequence[int], head_count: int) -> None:
    """Refuse heads that a site has not, or that are named twice."""
    if wrong := [head for head in heads if type(head) is not int or not 0 <= head < head_count]:
        raise SpecError(f"{site} has no head {wrong[0]!r}; its heads are 0..{head_count - 1}")
    if len(set(heads)) < len(heads):
        twice = next(head for head in heads if list(heads).count(head) > 1)
        raise SpecError(f"head {twice} of {site} is named twice; name it once")


UNIT_KINDS = ("auto", "head", "group")


@dataclass(frozen=True)
class HeadUnit:
    """Heads of one site that go together or stay together."""

    site: str
    heads: tuple[int, ...]


def list_units(model_spec: ModelSpec, kind: str = "auto") -> dict[str, tuple[HeadUnit, ...]]:
    """The units of every site: single heads, or those that read one head of keys and values.

    "auto" takes whole groups where there are several, smaller than the layer: only they make a cache smaller.

    >>> import headwise as hw
    >>> llama = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> small = hw.families.read_model_spec(llama | {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 11})
    >>> [unit.heads for unit in list_units(small)["decoder.0.attention"]]
    [(0, 1), (2, 3)]
    """
    if kind not in UNIT_KINDS:
        raise SpecError(f"unit={kind!r} is unknown; {suggest(kind, UNIT_KINDS)}")
    return {site: tuple(_site_units(site, spec, kind)) for site, spec in model_spec.attention_specs()}


def _site_units(site: str, spec: AttentionSpec, kind: str) -> Iterator[HeadUnit]:
    outs = range(len(spec.score_head_of_output))
    read = [frozenset(spec.heads.reads[row] for row in spec.required_score_heads(out)) for out in outs]
    groups: dict[frozenset[int], list[int]] = {}
    for out in outs:
        groups.setdefault(read[out], []).append(out)
    apart = sum(map(len, groups)) == len(frozenset[int]().union(*groups))
    if kind == "group" and not apart:
        raise SpecError(f"heads of {site} read several heads of keys and values each; use unit='head'")
    whole = apart and (kind == "group" or (kind == "auto" and 1 < len(groups) < len(outs)))
    yield from (HeadUnit(site, tuple(heads)) for heads in (groups.values() if whole else [[out] for out in outs]))


# --- A mark by which a model is known again ------------------------------------------------------------


def fingerprint_model(net: Transformer) -> str:
    """SHA-256 of what a model is and of all that it holds.

    >>> import headwise as hw
    >>> small = hw.families.read_model_spec(
    ...     {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
    ... )
    >>> nets = [hw.build(small, seed=seed) for seed in (0, 0, 1)]
    >>> [fingerprint_model(net) == fingerprint_model(nets[0]) for net in nets]
    [True, True, False]
    """
    mark = hashlib.sha256(to_json(net.spec).encode())
    for name, tensor in net.state_dict().items():
        mark.update(f"{name} {tensor.dtype}".encode())
        mark.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return mark.hexdigest()
