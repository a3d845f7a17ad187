"""What a layer or a model costs at one length after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..pattern import Pattern
from . import cache_bytes
from .calls import PricedCalls, Workload, list_calls
from .devices import dtype_bytes
from .operations import list_operations
from .reading import AttentionComponent
from .scopes import max_lengths
from .whole import SpecOrModel, list_components

MAX_TOKENS = 2**40  # tokens
MAX_PATTERN_TOKENS = 2**14  # tokens of a pattern whose ends of rows grow in number with the rows: it is counted end by end


class LengthCost(NamedTuple):
    """What one length costs: all tokens at once, one more behind the others, and what is remembered of them.

    What reads ahead writes no token alone, so that nothing is remembered of it.
    """

    prefill_flops: int
    step_flops: int | None
    cache_bytes: int | None
    prefill_seconds: float
    step_seconds: float | None


# How each quantity of a sample is called on paper.
QUANTITY_LABELS = {
    "prefill_flops": "prefill, FLOP",
    "step_flops": "a step, FLOP",
    "cache_bytes": "cache, bytes",
    "prefill_seconds": "prefill, seconds",
    "step_seconds": "a step, seconds",
}


@dataclass(frozen=True)
class CostByLength:
    """Descriptions by name under one load, at whatever length; nothing is worked out twice.

    >>> import headwise as hw
    >>> along = CostByLength({"gqa": hw.design(preset="gqa", model=4096, heads=32)}, Workload())
    >>> [along.at("gqa", tokens).cache_bytes for tokens in (1, 1000)]
    [4096, 4096000]
    """

    specs: Mapping[str, SpecOrModel]
    workload: Workload
    cached: dict[tuple[str, int], LengthCost] = field(default_factory=dict[tuple[str, int], LengthCost], compare=False)

    def at(self, name: str, tokens: int) -> LengthCost:
        """What it costs at this length."""
        if (name, tokens) not in self.cached:
            self.cached[name, tokens] = cost_at_length(self.specs[name], replace(self.workload, context=tokens))
        return self.cached[name, tokens]

    def max_length(self, *names: str) -> int:
        """The length up to which all of these can be asked."""
        return min(_max_length(self.specs[name]) for name in names)


def cost_at_length(spec_or_model: SpecOrModel, workload: Workload) -> LengthCost:
    """What a load costs, in its totals alone.

    >>> import headwise as hw
    >>> cost_at_length(hw.design(model=8, heads=2), Workload(context=4)).prefill_flops == 8 * 4 * 8**2 + 4 * 4**2 * 8
    True
    """
    calls = _calls_of_workload(spec_or_model, workload)
    ran = {phase: list_operations(*calls[phase], workload.dtype, workload.device) for phase in calls}
    flops = {phase: sum(one.flops for one in each) for phase, each in ran.items()}
    seconds = {phase: sum(one.seconds for one in each) for phase, each in ran.items()}
    return LengthCost(flops["prefill"], flops.get("decode"), _cached_bytes_of_calls(calls, workload), seconds["prefill"], seconds.get("decode"))


def prefill_flops(spec_or_model: SpecOrModel, workload: Workload) -> int:
    """FLOPs of all tokens at once."""
    every, call = _calls_of_workload(spec_or_model, workload)["prefill"]
    return sum(piece.times * one.flops for piece in every for one in piece.required_products(call))


def cached_bytes(spec_or_model: SpecOrModel, workload: Workload) -> int | None:
    """Bytes held of all tokens, and of those of a source; None of what reads ahead, and so cannot go on from them."""
    return _cached_bytes_of_calls(_calls_of_workload(spec_or_model, workload), workload)


def _calls_of_workload(described: SpecOrModel, load: Workload) -> PricedCalls:
    return list_calls(described, list_components(described), replace(load, generate=0), "")


def _cached_bytes_of_calls(calls: PricedCalls, load: Workload) -> int | None:
    if "decode" not in calls:
        return None
    tokens = {"attention": load.context, "cross": calls["prefill"][1].source}
    each = dtype_bytes(load.dtype)
    readers = [piece for piece in calls["decode"][0] if isinstance(piece, AttentionComponent)]
    return sum(
        one.times * cache_bytes(one.spec, batch=load.batch, capacity=tokens[one.role], bytes_per_number=each)
        for one in readers
    )


def _max_length(described: SpecOrModel) -> int:
    readers = [piece for piece in list_components(described) if isinstance(piece, AttentionComponent)]
    grows = any(_pattern_lines(one.spec.pattern, 1024) > _pattern_lines(one.spec.pattern, 512) for one in readers)
    return min(MAX_PATTERN_TOKENS if grows else MAX_TOKENS, max_lengths(described).own or MAX_TOKENS)


def _pattern_lines(pattern: Pattern, tokens: int) -> int:
    return sum(map(len, pattern.lines(range(tokens), range(tokens))))
