"""What curves show, in sentences with numbers: how many heads can go, in which order, from where, and which stay.

What is asked are the claims of 1905.10650 and 1905.09418. What an interval does not tell apart is not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import comb
from typing import NamedTuple

import numpy as np

from ..heads.intervals import SHARE, Array, interval, mean, means, resampled
from ..heads.rating import LEVEL
from ..heads.significance import corrected
from .curves import ALL, Curves, Line, Point
from .plans import Head
from .quality import ACCURACY, LOSS, PERPLEXITY, SEED, Between

DRAWS = 10_000  # the tails of intervals that are corrected for many tests are thin
CLAIMED = ("encoder", "decoder", "cross")  # from the first to go to the last


def answers(curves: Curves) -> list[str]:
    """Every question with what was found."""
    first = next(iter(curves.parts))
    return [
        *(_can_go(curves, part) for part in curves.parts),
        *(_against(curves, first, other) for other in curves.orders[1:]),
        *_free(curves),
        *_parts(curves),
        *_stayed(curves, parts_of(curves), "part"),
        *_stayed(curves, curves.classes, "class"),
    ]


def can_go(line: Line, allowed: float) -> Point:
    """The point with the fewest heads left down to which the loss surely grows by less than so much."""
    found = line.points[0]
    for point in line.points[1:]:
        if not point.change.high < allowed:
            break
        found = point
    return found


def apart(one: Sequence[Point], other: Sequence[Point], tests: int = 1) -> Between:
    """How much larger the loss of some points is than that of others, means over each; the same texts are drawn.

    The interval is corrected for so many tests (Bonferroni).
    """
    sums, places = _sums(one) - _sums(other), np.array([[float(text.places)] for text in one[0].counts])
    found = means(sums, places, resampled(len(sums), DRAWS, SEED))
    low, high = interval(found, 1 - (1 - SHARE) / tests)
    return Between(float(mean(sums, places)[0]), float(low[0]), float(high[0]))


def _sums(points: Sequence[Point]) -> Array:
    """Of each text, a mean over points [texts, 1]."""
    return np.mean([[[text.sums[LOSS]] for text in point.counts] for point in points], axis=0)


class Left(NamedTuple):
    """How many heads of a group are left among so many, what chance would leave, and how likely it does as much.

    `level` is corrected for all groups and counts that were tested.
    """

    group: str
    left: int
    own: int
    chance: float
    level: float

    @property
    def sure(self) -> str:
        """Whether chance leaves as many: "more", "fewer" or "no difference shown"."""
        return "no difference shown" if self.level >= LEVEL else "more" if self.own > self.chance else "fewer"


def stayed(groups: Mapping[Head, str], kept: Sequence[Collection[Head]]) -> list[Left]:
    """Of every group at every count, whether more or fewer of its heads are left than of heads drawn by chance.

    The hypergeometric law, both tails, corrected for all tests (Holm).

    >>> groups = {("a", n): "few" if n < 8 else "many" for n in range(32)}
    >>> few, many = stayed(groups, [[("a", n) for n in range(8)]])
    >>> few.own, few.chance, few.sure, many.sure
    (8, 2.0, 'more', 'fewer')
    """
    sizes, found = Counter(groups.values()), list[Left]()
    for heads in kept:
        own = Counter(groups[head] for head in heads)
        for group, size in sizes.items():
            p = unlikely(own[group], len(heads), size, len(groups))
            found.append(Left(group, len(heads), own[group], len(heads) * size / len(groups), p))
    levels = corrected(np.array([one.level for one in found])) if found else []
    return [one._replace(level=float(level)) for one, level in zip(found, levels, strict=True)]


def unlikely(own: int, drawn: int, size: int, whole: int) -> float:
    """How likely a draw without return is as far out: of `whole` heads, `size` of a group, `own` of it among `drawn`.

    Twice the smaller tail.

    >>> unlikely(2, 2, 2, 4)  # of six pairs one, and twice that
    0.3333333333333333
    """
    ways = [comb(size, n) * comb(whole - size, drawn - n) for n in range(min(size, drawn) + 1)]
    total = comb(whole, drawn)
    return min(1.0, 2 * min(sum(ways[: own + 1]), sum(ways[own:])) / total)


# --- sentences ------------------------------------------------------------------------------------------------


def _can_go(curves: Curves, part: str) -> str:
    heads, told = curves.heads(part), list[str]()
    for order in curves.orders:
        found = [can_go(line, curves.allowed) for line in curves.own(part, order)]
        gone = sorted({heads - point.left for point in found})
        if len(found) > 1:
            told.append(f"{' to '.join(map(str, gone[:1] + gone[1:][-1:]))} by {order} ({len(found)} draws)")
        else:
            told.append(f"{gone[0]} by {order} ({_within(found[0].change)})" if gone[0] else f"none by {order}")
    return (
        f"{titled(curves, part)}: {_name(curves)} surely grows by less than {curves.allowed:g} with so many gone, "
        f"of the counts that were tried: {', '.join(told)}."
    )


def _against(curves: Curves, part: str, other: str) -> str:
    first = curves.orders[0]
    own, theirs = _by_left(curves.own(part, first)), _by_left(curves.own(part, other))
    lefts = [left for left in own if left in theirs][1:]
    draws = len(curves.own(part, other))
    name = f"{titled(curves, part)}: {first} against {other}{f', a mean of {draws} draws' if draws > 1 else ''}"
    if not lefts:
        return f"{name}: no count of heads is left by both."
    each = [_sign(apart(own[left], theirs[left], len(lefts))) for left in lefts]
    every = apart([point for left in lefts for point in own[left]], [p for left in lefts for p in theirs[left]])
    return (
        f"{name}: over all counts {_name(curves)} {_told(every)}; of {len(lefts)} counts it is lower at "
        f"{each.count(-1)}, higher at {each.count(1)}, and no difference is shown at {each.count(0)}."
    )


def _free(curves: Curves) -> Iterator[str]:
    """What free answers lose, where they were asked for."""
    for name in curves.names:
        if name in (LOSS, PERPLEXITY, ACCURACY, curves.objective):
            continue
        for part, order in product(curves.parts, curves.orders):
            marks = curves.marks(part, order, name)[1:]
            if not marks or len(curves.own(part, order)) > 1:
                continue
            told = [
                f"{said} with {', '.join(str(mark.left) for mark in own)} left"
                for sign, said in ((-1, "surely lower"), (0, "not told apart"), (1, "surely higher"))
                if (own := [mark for mark in marks if _sign(Between(*mark[1:])) == sign])
            ]
            yield f"{titled(curves, part)}, by {order}: {name} of free answers is {', '.join(told)}."


def _parts(curves: Curves) -> Iterator[str]:
    """Each part alone, by our order: which costs least."""
    names = [part for part in curves.parts if part != ALL]
    points = {part: curves.own(part, curves.orders[0])[0].points[1:] for part in names}
    shares = set[float].intersection(*({point.share for point in own} for own in points.values())) if points else set()
    if len(names) < 2 or not shares:
        return
    own = {part: [point for point in points[part] if point.share in shares] for part in names}
    whole = curves.own(names[0], curves.orders[0])[0].points[:1]
    cost = {part: apart(own[part], whole) for part in names}
    names.sort(key=lambda part: cost[part].value)
    told = ", ".join(f"{part} {cost[part].value:+.3f} ({_within(cost[part])})" for part in names)
    yield (
        f"Heads of one part gone, the others whole, by {curves.orders[0]}: {_name(curves)} changes, a mean over "
        f"{len(shares)} shares that stay, {told}."
    )
    tests = len(names) * (len(names) - 1) // 2
    more = [apart(own[other], own[one], tests) for one, other in pairwise(names)]
    for (one, other), differs in zip(pairwise(names), more, strict=True):
        yield f"Without heads of {other}, beside without heads of {one}: {_name(curves)} {_told(differs)}."
    if sorted(names) == sorted(CLAIMED):
        yield f"That the encoder goes first and cross-attention last: {_verdict(names, more)}."


def _verdict(names: Sequence[str], more: Sequence[Between]) -> str:
    sure = all(_sign(one) > 0 for one in more)
    if tuple(names) == CLAIMED:
        return "shown" if sure else "so it was found, but not shown, for an interval holds 0"
    return f"not so; from the cheapest on {', '.join(names)}{'' if sure else ', of which not all are told apart'}"


def parts_of(curves: Curves) -> dict[Head, str]:
    """The part of every head; nothing where not all parts were swept, together and apart."""
    alone = {part: own for part, own in curves.parts.items() if part != ALL}
    groups = {(site, head): part for part, own in alone.items() for site, n in own.items() for head in range(n)}
    return groups if ALL in curves.parts and alone and len(groups) == curves.heads(ALL) else {}


def alone(curves: Curves) -> dict[str, Line]:
    """The line of all parts together by each order that is drawn once; nothing where parts were not swept together."""
    lines = {order: curves.own(ALL, order) for order in curves.orders}
    return {order: own[0] for order, own in lines.items() if len(own) == 1}


def heads_of(point: Point) -> list[Head]:
    """The heads that are left at a point."""
    return [(site, head) for site, heads in point.keep.items() for head in heads]


def _stayed(curves: Curves, groups: Mapping[Head, str], what: str) -> Iterator[str]:
    """What stays of each group when all parts lose heads together, by every order that is no chance."""
    for order, line in alone(curves).items() if groups else ():
        found = stayed(groups, kept_of(line, groups)[1:])
        own = {
            group: [one for one in found if one.group == group] for group, _ in Counter(groups.values()).most_common()
        }
        told = [f"{group} {said}" for group, lefts in own.items() for said in _sure(lefts)]
        vague = [group for group, lefts in own.items() if not any(True for _ in _sure(lefts))]
        if vague:
            told.append(f"of {', '.join(vague)} no difference from chance is shown")
        gone = [f"{group} with {left} left" for group, lefts in own.items() if (left := _end(lefts)) is not None]
        told.append(f"the last is gone of {', '.join(gone)}" if gone else "of each some stay to the end")
        yield f"What stays by {order}, {what} by {what}: {'; '.join(told)}."


def kept_of(line: Line, groups: Mapping[Head, str]) -> list[list[Head]]:
    """The heads at every point that are of any group."""
    return [[head for head in heads_of(point) if head in groups] for point in line.points]


def _end(own: Sequence[Left]) -> int | None:
    """How many heads are left where the last one of a group has gone; counts fall."""
    there = max((place for place, one in enumerate(own) if one.own), default=-1)
    return None if there + 1 == len(own) else own[there + 1].left


def _sure(own: Sequence[Left]) -> Iterator[str]:
    for which in ("more", "fewer"):
        there = [one for one in own if one.sure == which]
        if there:
            best, lefts = min(there, key=lambda one: one.level), ", ".join(str(one.left) for one in there)
            yield (
                f"{which} than by chance with {lefts} left (surest {best.own} of {best.left}, by chance "
                f"{best.chance:.1f}, p {best.level:.1g})"
            )


def titled(curves: Curves, part: str) -> str:
    """What a part is called.

    >>> titled(Curves("small", "translation", 2, 9, {"cross": {"decoder.0.cross": 3}}, (), {}, 0.1), "cross")
    'The 3 heads of cross alone'
    """
    heads = curves.heads(part)
    return f"All {heads} heads" if part == ALL else f"The {heads} heads of {part} alone"


def _name(curves: Curves) -> str:
    return f"{curves.objective} loss" if LOSS in curves.names else curves.objective


def _by_left(lines: Sequence[Line]) -> dict[int, list[Point]]:
    found: dict[int, list[Point]] = {}
    for line in lines:
        for point in line.points:
            found.setdefault(point.left, []).append(point)
    return found


def _sign(one: Between) -> int:
    return 0 if one.low <= 0 <= one.high else 1 if one.value > 0 else -1


def _told(one: Between) -> str:
    said = {0: "is not told apart", 1: "is higher", -1: "is lower"}[_sign(one)]
    return f"{said}, {one.value:+.3f} ({_within(one)})"


def _within(one: Between) -> str:
    return f"{one.low:+.3f} to {one.high:+.3f}"
