"""Simulated coverage of our intervals and rejection rates of our tests, for docs/heads.md and
docs/studies.md.

`python tools/interval_coverage.py` writes docs/interval-coverage.json in about a minute; a slow
test computes it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from headwise.observe.head_analysis.resampling import Array, Jackknife

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "interval-coverage.json"
NUM_UNITS = (2, 3, 5, 8, 12, 19, 20, 40, 60)
NUM_SAMPLES = 20_000  # the standard error of a rate of 0.05 is 0.0015
RARE = 0.1  # how often the rare event happens
KINDS = ("normal", "skewed", "rare", "rounded")
WORDS = {
    "en": {name: name for name in (*KINDS, "coverage")}
    | {"units": "texts or seeds", "rejected": "rejected, two sides"}
    | {"above": "rejected, above", "below": "rejected, below"},
    "zh": {
        "units": "文本或种子数",
        "normal": "正态",
        "skewed": "偏斜",
        "rare": "罕见",
        "rounded": "取整",
    }
    | {
        "coverage": "覆盖率",
        "rejected": "双侧拒绝率",
        "above": "单侧拒绝率 above",
        "below": "单侧拒绝率 below",
    },
}


def sample_centred(kind: str, num_units: int) -> Array:
    """Values with mean 0, [units, samples]; "rare" is an event of probability `RARE`, "skewed" is
    exponential.
    """
    generator = np.random.default_rng([KINDS.index(kind), num_units])
    shape = (num_units, NUM_SAMPLES)
    if kind == "skewed":
        return generator.exponential(size=shape) - 1
    if kind == "rare":
        return (generator.random(shape) < RARE) - RARE
    normal = generator.standard_normal(shape)
    return np.round(normal) if kind == "rounded" else normal


def simulate(kind: str, num_units: int) -> dict[str, float]:
    """Coverage of the 95 % interval, and how often tests reject a true null hypothesis at 5 %.

    `above` is the one-sided test that a mean is above chance, `below` that test of the mirrored
    values. `untested` is the share of samples without spread, which have no p-value.
    """
    values = sample_centred(kind, num_units)
    shift = RARE if kind == "rare" else 0.0  # the units themselves are not centred: 0 and 1
    mean = Jackknife.of_ratio(values + shift)
    low, high = mean.interval()
    centred = Jackknife.of_ratio(values)
    mirrored = Jackknife.of_ratio(-values)
    rounding = 1e-12
    rates = {
        "coverage": (low <= shift + rounding) & (high >= shift - rounding),
        "rejected": centred.p_values() < 0.05,
        "above": centred.p_values(sides=1) < 0.05,
        "below": mirrored.p_values(sides=1) < 0.05,
        "untested": ~centred.has_spread,
    }
    return {name: round(float(rate.mean()), 4) for name, rate in rates.items()}


def simulate_all() -> dict[str, Any]:
    """The rates of every kind of values and number of units."""
    return {kind: {str(count): simulate(kind, count) for count in NUM_UNITS} for kind in KINDS}


def format_coverage(language: str = "en") -> str:
    """Return the stored figures as a Markdown table."""
    figures, word = json.loads(FIGURES.read_text()), WORDS[language]
    lines = [_row([word["units"], *map(str, NUM_UNITS)]), _row(["---"] + ["--:"] * len(NUM_UNITS))]
    rows = [(kind, "coverage", ".2f") for kind in KINDS] + [
        (kind, "rejected", ".3f") for kind in KINDS
    ]
    rows += [("skewed", name, ".3f") for name in ("above", "below")]
    for kind, rate, digits in rows:
        rates = (format(figures[kind][str(count)][rate], digits) for count in NUM_UNITS)
        lines.append(_row([f"{word[kind]}: {word[rate]}", *rates]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    FIGURES.write_text(json.dumps(simulate_all(), indent=1) + "\n")
