"""How likely chance alone would do as much: signs of paired differences turned over, and many tests at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import nearest

Array = NDArray[np.float64]
EXACT = 14  # texts: with as many, or fewer, all turns are tried
TURNS = 9_999  # else so many, or `EACH` for every head that is tested, so that a correction leaves room below 0.05
EACH = 200
SLACK = 1e-12  # of what was seen: a turn that adds the same numbers in another order is as far out
CORRECTIONS = ("holm", "bonferroni", "none")


def p_values(differences: Array, seed: int = 0) -> Array:
    """For each column of [texts, heads]: how often a mean is as far from 0 when signs are turned over by chance.

    All turns of few texts, else drawn ones, with what was seen among them (Phipson and Smyth 2010).

    >>> p_values(np.array([[1.0, 1.0], [2.0, -1.0], [3.0, 0.0]])).tolist()
    [0.25, 1.0]
    """
    texts, heads = differences.shape
    seen = np.abs(differences.sum(0))
    least = seen - SLACK * np.abs(differences).sum(0)
    if texts <= EXACT:
        bits = (np.arange(2**texts)[:, None] >> np.arange(texts)) & 1
        return (np.abs((1.0 - 2 * bits) @ differences) >= least).mean(0)
    draw, turns, beyond = np.random.default_rng(seed), max(TURNS, EACH * heads - 1), np.ones(heads)
    for start in range(0, turns, 1000):
        signs = 1.0 - 2 * draw.integers(0, 2, (min(1000, turns - start), texts))
        beyond += (np.abs(signs @ differences) >= least).sum(0)
    return beyond / (turns + 1)


def least_p(texts: int) -> float:
    """The least p that so many texts can have: all signs alike is one of two ways to be as far out.

    >>> least_p(5)
    0.0625
    """
    return 2.0 ** (1 - texts)


def corrected(p: Array, how: str = "holm") -> Array:
    """The same for as many tests at once: the least level at which each is still told from chance.

    >>> p = np.array([0.01, 0.04, 0.03])
    >>> corrected(p).round(4).tolist(), corrected(p, "bonferroni").round(4).tolist()
    ([0.03, 0.06, 0.06], [0.03, 0.12, 0.09])
    """
    if how not in CORRECTIONS:
        raise ValueError(f"correction={how!r} is unknown; {nearest(how, CORRECTIONS)}")
    if how == "none":
        return p
    if how == "bonferroni":
        return np.minimum(1, p * len(p))
    order = p.argsort()
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    found = np.empty_like(p)
    found[order] = np.minimum(1, stepped)
    return found
