"""The example that finds an induction circuit, on a decoder whose circuit is set by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from observe.head_analysis.handset_heads import WORDS, induction_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "induction_circuit.py"


def test_the_circuit_that_was_set_by_hand_is_found():
    described = importlib.util.spec_from_file_location("induction_circuit", EXAMPLE)
    assert described is not None
    assert described.loader is not None
    example = importlib.util.module_from_spec(described)
    described.loader.exec_module(example)
    circuit = example.find_circuit(induction_model(), texts=24, period=5, count=1)
    assert circuit.induction == [(1, 0)]
    assert circuit.previous[0] == (0, 0)
    shares = [path.effect.value / circuit.paths.total for path in circuit.paths.paths]
    names = [path.name for path in circuit.paths.paths]
    assert names[0] == "L0H0 -> L1H0.k"
    assert names[-2:] == ["L0H0 -> L1H0.v", "L0H0 -> logits"]
    assert shares[0] == pytest.approx(1, abs=0.1)
    assert max(map(abs, shares[1:])) < 0.1
    writers = [writer for writer, _ in circuit.score.sides["key"].by_size]
    assert writers[0] == "L0H0"
    assert circuit.score.total.value > 1  # at the token behind, not at the equal one
    for row in circuit.losses.rows:
        assert row[2] > 10 * max(row[4], 0.01)
    rows = example.repeat_tokens(WORDS, 3, 4)
    for clean, corrupt, metric in example.make_pairs(rows, WORDS):
        changed = (clean != corrupt).nonzero()[:, 1].tolist()
        assert changed == [2]
        assert clean[0, -1] == clean[0, 2]
        assert metric.tokens[0] == clean[0, 3]
        assert not torch.isin(corrupt[0, 2], clean)
