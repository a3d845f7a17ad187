"""Overlapping heads: overlap by depth, dependent sizes, and the channels of the values."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from support import layer_cases as cases
from support.layer_cases import check_close

# The overlap of layers 0 .. 5 of 6, written by hand from the list of 2410.14874.
BY_DEPTH = {
    "l": [0, 1, 2, 3, 4, 5],
    "l+1": [1, 2, 3, 4, 5, 6],
    "l//2": [0, 0, 1, 1, 2, 2],
    "l//2+1": [1, 1, 2, 2, 3, 3],
    "L-l-1": [5, 4, 3, 2, 1, 0],
    "L-l": [6, 5, 4, 3, 2, 1],
    "(L-l-1)//2": [2, 2, 1, 1, 0, 0],
    "(L-l-1)//2+1": [3, 3, 2, 2, 1, 1],
    "fixed": [2, 2, 2, 2, 2, 2],
}
ROTARY = (hw.parts.Rotary(),)


def scheduled(schedule: str, **options) -> hw.AttentionSpec:
    return cases.base(
        project=hw.parts.Overlapping(overlap=2, schedule=schedule), pattern="causal()", **options
    )


@pytest.mark.parametrize("schedule", BY_DEPTH)
def test_the_overlap_at_every_depth(schedule):
    spec = scheduled(schedule, modifiers=ROTARY)
    assert spec.project.overlap == 2
    for layer, overlap in enumerate(BY_DEPTH[schedule]):
        placed = spec.at_depth(layer, 6)
        assert placed == cases.base(
            project=hw.parts.Overlapping(overlap=overlap), pattern="causal()", modifiers=ROTARY
        )
        assert placed.heads.vdim == 4 + 2 * overlap
        assert placed.at_depth(0, 9) == placed
        assert hw.from_toml(str(placed)) == placed
        assert hw.costs.count_parameters(placed) == 4 * 240 + 2 * overlap * 6 * 10


@pytest.mark.parametrize("schedule", BY_DEPTH)
def test_a_placed_layer_runs_decodes_and_is_cut(schedule):
    spec = scheduled(schedule).at_depth(4, 6)
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    check_close(layer(x), hw.attention.reference.reference_attention(layer, x))
    cache = layer.cache(batch=cases.BATCH, capacity=9)
    check_close(
        torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(cases.TOKENS)], 1), layer(x)
    )
    loud = torch.tensor([0.0, 1, 0, 1, 1, 0], dtype=torch.float64)[:, None]
    silenced = layer(x, probe=hw.Probe("heads", callback=lambda _, o: o * loud))
    small, weights = hw.attention.head_axis_ops.keep_heads(spec, layer.state_dict(), [1, 3, 4])
    cut = cases.load_layer(small, weights)
    check_close(cut(x), silenced)


def test_a_pruned_layer_keeps_its_overlaps():
    spec = scheduled("l")
    small, _ = hw.attention.head_axis_ops.keep_heads(spec, cases.layer(spec).state_dict(), [1, 3])
    assert small.at_depth(5, 6) == small


def test_heads_read_the_values_of_their_channels_and_the_next_ones_on_both_sides():
    overlap, heads, dim = 2, 6, 4
    spec = cases.base(project=hw.parts.Overlapping(overlap=overlap))
    layer, (x, _) = cases.layer(spec), cases.tensors(spec)
    probe = hw.Probe("weights", "heads")
    layer(x, probe=probe)
    v = x @ layer.project["v"].T
    for h in range(heads):
        for n, channel in enumerate(range(h * dim - overlap, (h + 1) * dim + overlap)):
            inside = 0 <= channel < heads * dim
            expected = (
                probe.tensors["weights"][:, h] @ v[..., channel, None] if inside else 0 * v[..., :1]
            )
            check_close(probe.tensors["heads"][:, :, h, n, None], expected)
