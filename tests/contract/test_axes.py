"""Axes travel with parameters: cutting is silencing, sharing equal heads changes nothing."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.attention import head_axis_ops
from support import layer_cases as cases
from support.layer_cases import EVERY, EVERY_CASE, check_close
from support.spec_strategies import REPR_NAMES

KEEP_CASES = [(0,), (1, 3, 4), (5, 0), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("name", EVERY_CASE)
def test_cutting_is_silencing(spec, layer, x, z):
    outs = len(spec.score_head_of_output)
    for keep in {tuple(sorted(o for o in keep if o < outs)) for keep in KEEP_CASES}:
        loud = torch.zeros(outs, 1, dtype=x.dtype)
        loud[list(keep)] = 1
        silenced = layer(
            x, source=z, probe=hw.Probe("heads", callback=lambda _, o, loud=loud: o * loud)
        )
        small, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), keep)
        assert len(small.score_head_of_output) == len(keep)
        cut = cases.load_layer(small, weights)
        check_close(cut(x, source=z), silenced)
        assert sum(p.numel() for p in cut.parameters()) <= sum(
            p.numel() for p in layer.parameters()
        )
        again, twice = head_axis_ops.keep_heads(small, weights, [0])
        loud[list(keep[1:])] = 0
        silenced = layer(
            x, source=z, probe=hw.Probe("heads", callback=lambda _, o, loud=loud: o * loud)
        )
        check_close(cases.load_layer(again, twice)(x, source=z), silenced)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_a_cut_layer_decodes_and_round_trips(name):
    spec = cases.as_causal(EVERY[name])
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    small, weights = head_axis_ops.keep_heads(
        spec, layer.state_dict(), [1, len(spec.score_head_of_output) - 1]
    )
    cut = cases.load_layer(small, weights)
    cache = cut.cache(batch=cases.BATCH, capacity=9)
    steps = torch.cat([cut(x[:, t : t + 1], cache=cache) for t in range(cases.TOKENS)], 1)
    check_close(steps, cut(x))
    assert hw.from_toml(str(small)) == small
    assert eval(repr(small), REPR_NAMES) == small


@pytest.mark.parametrize("name", [name for name in EVERY if not EVERY[name].heads.value_heads])
def test_sharing_equal_heads_changes_nothing(spec, layer, x, z):
    try:
        wide, weights = head_axis_ops.split_kv_heads(spec, layer.state_dict())
    except hw.SpecError as reason:
        pytest.skip(f"its heads cannot be split: {reason}")
    expected = layer(x, source=z)
    check_close(cases.load_layer(wide, weights)(x, source=z), expected)
    groups = [
        [h for h, read in enumerate(spec.heads.kv_head_of_query) if read == g]
        for g in range(spec.heads.kv)
    ]
    back, shared = head_axis_ops.share_kv_heads(wide, weights, groups)
    assert back.heads == spec.heads
    check_close(cases.load_layer(back, shared)(x, source=z), expected)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_permuting_outputs_changes_nothing(spec, layer, x, z):
    o = layer.head_outputs(x, source=z)
    y = layer.merge_heads(o)
    check_close(y, layer(x, source=z))
    parts = [
        layer.merge_heads(o * torch.eye(o.shape[2], dtype=o.dtype)[h][:, None])
        for h in range(o.shape[2])
    ]
    silent = layer.merge_heads(torch.zeros_like(o))
    check_close(sum(parts) - (len(parts) - 1) * silent, y)


def test_uneven_groups_under_a_norm_over_all_keys_are_refused():
    spec = cases.base(kv=3, modifiers=(hw.parts.QKNorm(scope="full"),))
    weights = cases.layer(spec).state_dict()
    with pytest.raises(hw.SpecError, match="use groups of equal size"):
        head_axis_ops.share_kv_heads(spec, weights, [[0, 1], [2]])
    uneven = cases.change_spec(
        spec, heads=hw.Heads(q=6, kv=3, dim=4, kv_head_of_query=(0, 0, 0, 1, 1, 2))
    )
    with pytest.raises(hw.SpecError, match="use groups of equal size"):
        head_axis_ops.split_kv_heads(uneven, weights)
