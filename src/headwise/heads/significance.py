"""How likely chance alone would do as much: signs of paired differences turned over, and many tests at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import suggest

FloatMatrix = NDArray[np.float64]
MAX_EXACT_TEXTS = 14  # texts: with as many, or fewer, all turns are tried
NUM_SIGN_FLIPS = 9_999  # else so many, or `EACH` for every head that is tested, so that a correction leaves room below 0.05
FLIPS_PER_TEST = 200
COMPARISON_TOLERANCE = 1e-12  # of what was seen: a turn that adds the same numbers in another order is as far out
CORRECTION_METHODS = ("holm", "bonferroni", "none")


def sign_flip_p_values(differences: FloatMatrix, seed: int = 0) -> FloatMatrix:
    """For each column of [texts, heads]: how often a mean is as far from 0 when signs are turned over by chance.

    All turns of few texts, else drawn ones, with what was seen among them (Phipson and Smyth 2010).

    >>> sign_flip_p_values(np.array([[1.0, 1.0], [2.0, -1.0], [3.0, 0.0]])).tolist()
    [0.25, 1.0]
    """
    texts, heads = differences.shape
    seen = np.abs(differences.sum(0))
    least = seen - COMPARISON_TOLERANCE * np.abs(differences).sum(0)
    if texts <= MAX_EXACT_TEXTS:
        bits = (np.arange(2**texts)[:, None] >> np.arange(texts)) & 1
        return (np.abs((1.0 - 2 * bits) @ differences) >= least).mean(0)
    draw, turns, beyond = np.random.default_rng(seed), max(NUM_SIGN_FLIPS, FLIPS_PER_TEST * heads - 1), np.ones(heads)
    for start in range(0, turns, 1000):
        signs = 1.0 - 2 * draw.integers(0, 2, (min(1000, turns - start), texts))
        beyond += (np.abs(signs @ differences) >= least).sum(0)
    return beyond / (turns + 1)


def min_p_value(num_texts: int) -> float:
    """The least p that so many texts can have: all signs alike is one of two ways to be as far out.

    >>> min_p_value(5)
    0.0625
    """
    return 2.0 ** (1 - num_texts)


def correct_p_values(p: FloatMatrix, method: str = "holm") -> FloatMatrix:
    """The same for as many tests at once: the least level at which each is still told from chance.

    >>> p = np.array([0.01, 0.04, 0.03])
    >>> correct_p_values(p).round(4).tolist(), correct_p_values(p, "bonferroni").round(4).tolist()
    ([0.03, 0.06, 0.06], [0.03, 0.12, 0.09])
    """
    if method not in CORRECTION_METHODS:
        raise ValueError(f"correction={method!r} is unknown; {suggest(method, CORRECTION_METHODS)}")
    if method == "none":
        return p
    if method == "bonferroni":
        return np.minimum(1, p * len(p))
    order = p.argsort()
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    found = np.empty_like(p)
    found[order] = np.minimum(1, stepped)
    return found
