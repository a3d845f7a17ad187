"""The comparison tables: every cell is printed and equals the instrument's, and every verdict follows its input."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from headwise.costs.layer_reach import LAYERS, LayerReach, measure_layer_reach
from headwise.learn import measured_layers
from headwise.learn.sampled_tensors import make_layer, sample
from headwise.presets import design
from support import learn_entries as learn
from support.learn_entries import array, layer_output

ENTRIES = learn.entries_of("000") | learn.entries_of("003")
# Other test modules check that every other run has a test.
TABLES = ("000-1f", "003-4.1c", "003-4.2d")
COLUMNS = ("attention", "gru", "lstm", "convolution")


@pytest.fixture(scope="module")
def reach() -> dict[str, LayerReach]:
    return {layer.name.lower(): layer for layer in measure_layer_reach(64).layers}


@pytest.mark.parametrize("id", TABLES)
def test_every_row_has_a_number_for_every_layer(id: str):
    text = ENTRIES[id].reason_text
    for rows in (text.en, text.zh):
        lines = [line for line in rows.splitlines() if " | " in line]
        assert len(lines) >= 6
        for line in lines[1:]:
            key = line.split(" | ")[1].strip("{}").split(":")[0].removesuffix("_attention")
            assert re.findall(r"\{(\w+)", line.partition(" | ")[2]) == [f"{key}_{name}" for name in COLUMNS]


@pytest.mark.parametrize("id", TABLES)
def test_numbers_and_verdict(id: str, reach: dict[str, LayerReach]):
    result = ENTRIES[id].check()
    assert result.verdict == ENTRIES[id].verdict == "wrong"
    for name, layer in reach.items():
        assert result.numbers[f"field_{name}"] == layer.receptive_field
        assert result.numbers[f"chain_{name}"] == layer.chain
        assert result.numbers[f"gradient_32_{name}"] == layer.gradients[32]
        assert result.numbers[f"bytes_{name}"] == layer.state_bytes
        assert result.numbers[f"permutation_{name}"] == layer.permutation
        assert float(result.numbers[f"ms_{name}"]) > 0
        assert float(result.numbers[f"growth_{name}"]) > 0
    assert "another verdict" not in result.reason_en


def test_verdicts_follow_their_input():
    learn.check_flip(ENTRIES["000-1f"], {"local": "convolution"})
    learn.check_flip(ENTRIES["003-4.1c"], {"local": "convolution"})
    learn.check_flip(ENTRIES["003-4.2d"], {"positions": True})
    learn.check_flip(ENTRIES["000-1g"], {"steps": 0})


def test_the_error_with_sinusoids_is_that_of_numpy():
    layer, x = make_layer(design(model=16, heads=2)), array(sample(1, 64, 16))
    angles = np.arange(64)[:, None] / 10000 ** (np.arange(0, 16, 2) / 16)
    table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(64, 16)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2)).numpy()
    error = np.abs(layer_output(layer, x[order] + table, 2) - layer_output(layer, x + table, 2)[order]).max()
    assert ENTRIES["003-4.2d"].check().numbers["explicit_attention"] == pytest.approx(float(error), rel=1e-4)


def test_lengths_are_learned_by_all_layers_that_see_the_mark():
    result = ENTRIES["000-1g"].check()
    assert result.verdict == "holds"
    assert result.numbers["chance"] == 0.25
    for name in ("attention", "gru", "lstm"):
        assert float(result.numbers[f"short_{name}"]) > 0.9
        assert float(result.numbers[f"long_{name}"]) > 0.7
    # The last output of the convolution sees 2 of 16 and 2 of 64 tokens, and guesses otherwise.
    for row, tokens in (("short", 16), ("long", 64)):
        seen = 2 / tokens
        assert abs(float(result.numbers[f"{row}_convolution"]) - (seen + (1 - seen) / 4)) < 0.1


def test_a_convolution_learns_the_mark_that_it_sees():
    numbers = measured_layers.table_of_lengths(marked_last=True).numbers
    assert all(float(numbers[f"long_{name.lower()}"]) > 0.95 for name in LAYERS)


def test_training_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    measured_layers.table_of_lengths(steps=1)
    assert torch.equal(torch.rand(2), expected)
