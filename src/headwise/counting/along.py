"""What a layer or a model costs at one length after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..pattern import Pattern
from . import cache_bytes
from .calls import Calls, Load, calls_of
from .devices import bytes_of
from .operations import operations
from .reading import Reader
from .scopes import longest
from .whole import Described, pieces

FARTHEST = 2**40  # tokens
FAR = 2**14  # tokens of a pattern whose ends of rows grow in number with the rows: it is counted end by end


class Sample(NamedTuple):
    """What one length costs: all tokens at once, one more behind the others, and what is remembered of them.

    What reads ahead writes no token alone, so that nothing is remembered of it.
    """

    prefill_flops: int
    step_flops: int | None
    cache_bytes: int | None
    prefill_seconds: float
    step_seconds: float | None


# How each quantity of a sample is called on paper.
WORDS = {
    "prefill_flops": "prefill, FLOP",
    "step_flops": "a step, FLOP",
    "cache_bytes": "cache, bytes",
    "prefill_seconds": "prefill, seconds",
    "step_seconds": "a step, seconds",
}


@dataclass(frozen=True)
class Along:
    """Descriptions by name under one load, at whatever length; nothing is worked out twice.

    >>> import headwise as hw
    >>> along = Along({"gqa": hw.design(preset="gqa", model=4096, heads=32)}, Load())
    >>> [along.at("gqa", tokens).cache_bytes for tokens in (1, 1000)]
    [4096, 4096000]
    """

    described: Mapping[str, Described]
    load: Load
    known: dict[tuple[str, int], Sample] = field(default_factory=dict[tuple[str, int], Sample], compare=False)

    def at(self, name: str, tokens: int) -> Sample:
        """What it costs at this length."""
        if (name, tokens) not in self.known:
            self.known[name, tokens] = sample(self.described[name], replace(self.load, context=tokens))
        return self.known[name, tokens]

    def farthest(self, *names: str) -> int:
        """The length up to which all of these can be asked."""
        return min(_farthest(self.described[name]) for name in names)


def sample(described: Described, load: Load) -> Sample:
    """What a load costs, in its totals alone.

    >>> import headwise as hw
    >>> sample(hw.design(model=8, heads=2), Load(context=4)).prefill_flops == 8 * 4 * 8**2 + 4 * 4**2 * 8
    True
    """
    calls = _calls(described, load)
    ran = {phase: operations(*calls[phase], load.dtype, load.device) for phase in calls}
    flops = {phase: sum(one.flops for one in each) for phase, each in ran.items()}
    seconds = {phase: sum(one.seconds for one in each) for phase, each in ran.items()}
    return Sample(flops["prefill"], flops.get("decode"), _held(calls, load), seconds["prefill"], seconds.get("decode"))


def asked_flops(described: Described, load: Load) -> int:
    """FLOPs of all tokens at once."""
    every, call = _calls(described, load)["prefill"]
    return sum(piece.times * one.flops for piece in every for one in piece.asked(call))


def remembered_bytes(described: Described, load: Load) -> int | None:
    """Bytes held of all tokens, and of those of a source; None of what reads ahead, and so cannot go on from them."""
    return _held(_calls(described, load), load)


def _calls(described: Described, load: Load) -> Calls:
    return calls_of(described, pieces(described), replace(load, generate=0), "")


def _held(calls: Calls, load: Load) -> int | None:
    if "decode" not in calls:
        return None
    tokens = {"attention": load.context, "cross": calls["prefill"][1].source}
    each = bytes_of(load.dtype)
    readers = [piece for piece in calls["decode"][0] if isinstance(piece, Reader)]
    return sum(
        one.times * cache_bytes(one.spec, batch=load.batch, capacity=tokens[one.role], bytes_each=each)
        for one in readers
    )


def _farthest(described: Described) -> int:
    readers = [piece for piece in pieces(described) if isinstance(piece, Reader)]
    grows = any(_lines(one.spec.pattern, 1024) > _lines(one.spec.pattern, 512) for one in readers)
    return min(FAR if grows else FARTHEST, longest(described).own or FARTHEST)


def _lines(pattern: Pattern, tokens: int) -> int:
    return sum(map(len, pattern.lines(range(tokens), range(tokens))))
