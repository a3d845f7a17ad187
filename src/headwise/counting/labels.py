"""Where names stand beside what they name, so that none covers another."""

from __future__ import annotations

from collections.abc import Sequence


def spread_labels(wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Places at least a gap apart, between two bounds, whose squared distances to the wanted ones are least together.

    Where there is no room for the gap, they share what there is.

    >>> spread_labels([0.5, 0.5, 0.9], gap=0.2)
    [0.4, 0.6, 0.9]
    >>> spread_labels([1.0, 0.0, 1.0], gap=0.25)
    [0.75, 0.0, 1.0]
    """
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    blocks: list[tuple[float, int]] = []  # the sum, and the number, of those that have to stand together
    for place, n in enumerate(order):
        total, count = wanted[n] - place * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, more = blocks.pop()
            total, count = total + before, count + more
        blocks.append((total, count))
    most = high - (len(wanted) - 1) * gap
    starts = [min(max(total / count, low), most) for total, count in blocks for _ in range(count)]
    places = {n: start + place * gap for place, (n, start) in enumerate(zip(order, starts, strict=True))}
    return [round(places[n], 9) for n in range(len(wanted))]


def shorten_label(name: str, most: int) -> str:
    """A name in so many characters: what stands in its middle is left out, for names differ at their ends.

    >>> shorten_label("llama-3-8b-instruct-q4", 12)
    'llama-…ct-q4'
    """
    half = most // 2
    return name if len(name) <= most else f"{name[:half]}…{name[len(name) - (most - half - 1) :]}"
