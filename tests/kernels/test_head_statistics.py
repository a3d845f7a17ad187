"""The Triton kernel of head statistics against their definitions in float64, row by row, and its
compilation for GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.kernels.head_statistics import (
    PLACES,
    ScoreInputs,
    TokenInputs,
    head_statistics,
    uniform_statistics,
)
from headwise.kernels.triton_support import IS_INTERPRETED, triton
from kernels.triton_cases import DEVICE, KV_HEADS, OPTIONS, random_call

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(triton is None, reason="Triton is not installed; run make triton"),
]
runs = pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED,
    reason="Triton is not interpreted and there is no GPU; run make triton",
)
TOLERANCE = 1e-6
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 65536}


# --- definitions, in float64 ----------------------------------------------------------------------

Means = dict[str, list[tuple[float, int]]]


def attention_weights(inputs: ScoreInputs) -> tuple[np.ndarray, np.ndarray]:
    """Weights and allowed pairs, [H, T, S]."""
    q, k = (one.cpu().double().numpy() for one in inputs[:2])
    scores = np.einsum("thk,shk->hts", q, k[:, list(KV_HEADS)]) * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * np.tanh(scores / inputs.softcap)
    allowed = np.ones_like(scores, bool)
    if inputs.is_causal:
        allowed &= np.tri(*scores.shape[1:], dtype=bool)
    if inputs.mask_HTS is not None:
        allowed &= inputs.mask_HTS.cpu().numpy()
    if inputs.bias_HTS is not None:
        scores = scores + inputs.bias_HTS.cpu().double().numpy()
        allowed &= inputs.bias_HTS.cpu().numpy() > -1e4
    powers = np.where(allowed, np.exp(scores), 0)
    total = powers.sum(-1, keepdims=True)
    if inputs.sinks_H is not None:
        total = total + np.exp(inputs.sinks_H.cpu().double().numpy())[:, None, None]
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0), allowed


def at_keys(row: np.ndarray, allowed: np.ndarray, keys: np.ndarray) -> tuple[float, int]:
    """Weight on keys, counted if one of them is allowed."""
    return (row[keys].sum(), 1) if allowed[keys].any() else (0.0, 0)


def measure_row(
    row: np.ndarray, allowed: np.ndarray, t: int, tokens: Mapping[str, np.ndarray], is_self: bool
) -> dict[str, tuple[float, int]]:
    """Value and count of every statistic of one row."""
    keys = np.arange(len(row))
    count = int(allowed.sum())
    positive = row[row > 0]
    entropy = float(-(positive * np.log(positive)).sum())
    alive = int(count > 0)
    several = int(count > 1)
    result = {
        "entropy": (entropy, alive),
        "breadth": (np.exp(entropy) / max(count, 1), several),
        "confidence": (row.max(), alive),
        "distance": (row @ np.abs(keys - t) if is_self else 0.0, alive),
        "sink": (1 - row[~tokens["is_sink"]].sum(), alive),
        "first": at_keys(row, allowed, keys == 0),
        "separator": at_keys(row, allowed, tokens["is_separator"]),
        "first_of_several": (row[0], int(several and allowed[0])),
        "uniform_first": (1 / max(count, 1), int(several and allowed[0])),
    }
    left = row[~tokens["is_sink"]].sum()
    is_counted = left >= 0.01
    rest = np.where(tokens["is_sink"] | ~is_counted, 0, row / left if is_counted else 0)
    allowed = allowed & ~tokens["is_sink"] & is_counted
    result["squares"] = ((rest**2).sum(), int(is_counted))
    result["pairs"] = (allowed.sum(), int(is_counted))
    result["punctuation"] = at_keys(rest, allowed, tokens["is_punctuation"])
    own, ids = tokens["query_ids"][t], tokens["key_ids"]
    nothing = np.zeros(len(row), bool)
    same = (ids == own) & (keys != t) if is_self else nothing
    after = np.roll(ids == own, 1) & (keys > 0) & (keys < t) if is_self else nothing
    result["duplicate"] = at_keys(rest, allowed, same)
    result["induction"] = at_keys(rest, allowed, after)
    best = allowed & (rest > rest.max() * (1 - 1e-12))
    hits = best / max(best.sum(), 1)
    result["rare"] = at_keys(hits, allowed, tokens["is_rarest"])
    for offset in range(-16, 17) if is_self else ():
        at = keys == t + offset
        result[f"weight {offset}"] = at_keys(rest, allowed, at)
        result[f"hits {offset}"] = (hits[at].sum(), int(is_counted))
    return result


def expected(inputs: ScoreInputs, tokens: TokenInputs) -> list[dict[str, tuple[float, int]]]:
    """Sums and counts of every statistic, by head."""
    is_self = tokens.query_ids is tokens.key_ids
    weights, allowed = attention_weights(inputs)
    arrays = {name: one.cpu().numpy() for name, one in tokens._asdict().items()}
    heads = []
    for head in range(len(weights)):
        sums: dict[str, tuple[float, int]] = {}
        for t, (row, may) in enumerate(zip(weights[head], allowed[head], strict=True)):
            for name, (value, count) in measure_row(row, may, t, arrays, is_self).items():
                before = sums.get(name, (0.0, 0))
                sums[name] = (before[0] + value * count, before[1] + count)
        heads.append(sums)
    return heads


def read_sums(values: np.ndarray, is_self: bool) -> dict[str, tuple[float, int]]:
    """The statistics of one head as the kernel stored them."""
    sums = {name: (values[2 * n], int(values[2 * n + 1])) for n, name in enumerate(PLACES)}
    weights, pairs, hits = values[32:].reshape(3, 64)[:, :33]
    for n in range(33) if is_self else ():
        sums[f"weight {n - 16}"] = (weights[n], int(pairs[n]))
        sums[f"hits {n - 16}"] = (hits[n], sums["squares"][1])
    return sums


def check_head(found: Mapping[str, tuple[float, int]], wanted: Mapping[str, tuple[float, int]]):
    assert found.keys() == wanted.keys()
    for name, (total, count) in wanted.items():
        assert found[name][1] == count, name
        scale = max(1.0, abs(total / max(count, 1)))  # distances and pairs are not shares
        assert abs(found[name][0] - total) <= TOLERANCE * scale * max(count, 1), name


@runs
@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        *((option, torch.float32) for option in OPTIONS),
        ("causal", torch.float16),
        ("cross", torch.bfloat16),
    ],
    ids=str,
)
def test_statistics_are_those_of_every_row(option: str, dtype: torch.dtype):
    inputs, tokens = random_call(option, dtype)
    found = head_statistics(inputs, tokens)
    is_self = tokens.query_ids is tokens.key_ids
    for head, wanted in enumerate(expected(inputs, tokens)):
        check_head(read_sums(found.sums[head].cpu().numpy(), is_self), wanted)
    weights, allowed = attention_weights(inputs)
    sampled = tokens.sampled_queries.cpu().numpy()
    assert np.abs(found.sampled.cpu().numpy() - weights[:, sampled]).max() <= TOLERANCE
    mean_mass = found.column_mass.cpu().numpy() / weights.shape[1]
    assert np.abs(mean_mass - weights.mean(1)).max() <= TOLERANCE
    assert np.array_equal(found.num_keys.cpu().numpy(), allowed.sum(-1))


@runs
@pytest.mark.parametrize("option", ["heads", "bias", "cross"])
def test_a_uniform_head_reads_what_some_head_may_read(option: str):
    inputs, tokens = random_call(option)
    _, allowed = attention_weights(inputs)
    plain = inputs._replace(
        q_THK=torch.zeros_like(inputs.q_THK),
        is_causal=False,
        bias_HTS=None,
        mask_HTS=torch.from_numpy(allowed.any(0, keepdims=True)),
    )
    found = uniform_statistics(inputs, tokens)
    is_self = tokens.query_ids is tokens.key_ids
    check_head(read_sums(found.sums[0].cpu().numpy(), is_self), expected(plain, tokens)[0])


@runs
@pytest.mark.parametrize("count", [1, 16, 17, 65])
def test_texts_of_any_length_and_heads_of_any_width(count: int):
    inputs, tokens = random_call("causal", count=count, dim=5 + count)
    found = head_statistics(inputs, tokens)
    for head, wanted in enumerate(expected(inputs, tokens)):
        check_head(read_sums(found.sums[head].cpu().numpy(), True), wanted)


# --- compilation without a GPU --------------------------------------------------------------------


@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_kernels_compile_for_gpus_without_spilled_registers(target: str):
    root = Path(__file__).parent.parent
    settings = {name: one for name, one in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["PYTHONPATH"] = os.pathsep.join([str(root), settings.get("PYTHONPATH", "")])
    command = [sys.executable, str(root / "support" / "triton_targets.py"), target]
    result = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = json.loads(result.stdout)
    assert {row["case"] for row in rows} >= {"plain", "uniform", "entmax, 200 keys"}
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared"] <= SHARED_MEMORY[target], row
