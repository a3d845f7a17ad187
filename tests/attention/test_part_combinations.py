"""Combinations of parts: pruned rows and values, states, forms, query blocks, ring caches and
sources.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention import head_axis_ops
from headwise.attention.backends import BACKENDS, CallSignature
from support import layer_cases as cases
from support.layer_cases import check_close
from support.layer_checks import torch_flops


def test_a_state_in_half_precision_sums_thousands():
    torch.manual_seed(0)
    exact = hw.Attention(hw.design(preset="linear", model=32, heads=2))
    x = 3 * torch.randn(2, 1024, 32)
    # not one segment: a single chunk, whose shares reach far
    tokens = hw.SequenceInfo.from_batch(x, lengths=[1024, 1000])
    coarse = exact.half().head_outputs(x.half(), sequence=tokens)
    fine = exact.float().head_outputs(x, sequence=tokens)
    check_close(coarse[:, 900:1000].float(), fine[:, 900:1000], rtol=0.1, atol=0.02)


@pytest.mark.parametrize("on", ["scores", "weights"])
@pytest.mark.parametrize("merge", [hw.parts.ConcatMerge(), hw.parts.SumMerge()], ids=repr)
@pytest.mark.parametrize(("heads", "rows", "keep"), [(1, 2, [0]), (2, 4, [0, 1]), (3, 2, [1])])
def test_a_cut_behind_another_number_of_rows(heads, rows, keep, merge, on):
    modifiers = (hw.parts.TalkingHeads(on=on, heads=rows),)
    spec = hw.design(model=8, heads=heads, dim=4, merge=merge, modifiers=modifiers)
    layer, x = cases.layer(spec), torch.randn(2, 5, 8, dtype=torch.float64)
    loud = torch.zeros(rows, 1, dtype=x.dtype)
    loud[keep] = 1
    silenced = layer(x, probe=hw.Probe("heads", callback=lambda _, o: o * loud))
    small, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), keep)
    cut = cases.load_layer(small, weights)
    check_close(cut(x), silenced)


@pytest.mark.parametrize("rank", [4, 7])
def test_an_average_of_latent_values_is_no_sum_of_them(rank):
    latent = hw.parts.MLAProjection(rank=rank, rope=0)
    layer = cases.layer(
        hw.design(
            model=8,
            heads=2,
            project=latent,
            normaliser=hw.parts.AverageNormaliser(),
            pattern="causal",
        )
    )
    x, cache = torch.randn(1, 6, 8, dtype=torch.float64), layer.cache(batch=1, capacity=9)
    parts = [
        layer(x[:, :3], cache=cache),
        *(layer(x[:, t : t + 1], cache=cache) for t in (3, 4, 5)),
    ]
    check_close(torch.cat(parts, 1), layer(x))


def test_the_order_of_writing_is_the_order_of_phases():
    late, early = hw.parts.TalkingHeads(on="weights", heads=5), hw.parts.TalkingHeads(heads=2)
    one, other = (
        hw.design(model=12, heads=3, modifiers=both) for both in ((late, early), (early, late))
    )
    assert one == other


def test_impossible_conversions_give_reasons():
    spec = hw.design(model=8, heads=4, modifiers=(hw.parts.TalkingHeads(on="weights", heads=2),))
    with pytest.raises(hw.SpecError, match="have different groups"):
        head_axis_ops.share_kv_heads(spec, hw.Attention(spec).state_dict(), [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("backend", "words", "tokens", "source"),
    [
        ("linear", {"preset": "linear"}, 1, None),
        ("linear", {"preset": "average"}, 1, None),
        ("linear", {"preset": "linear", "source": 12}, 5, 9),
        (
            "chunked",
            {"pattern": "causal", "modifiers": (hw.parts.TalkingHeads(),), "source": 12},
            300,
            280,
        ),
        ("block_sparse", {"pattern": "window(20)", "source": 12}, 300, 280),
    ],
)
def test_flops_of_a_source_and_of_a_single_query(backend, words, tokens, source):
    spec = hw.design(**({"model": 16, "heads": 2} | words))
    layer = hw.Attention(spec, backend=backend)
    z = None if source is None else torch.randn(1, source, 12)
    work, job = (
        hw.costs.CallSize(1, tokens, source or tokens, source or tokens),
        CallSignature(spec, spec.core, single_query=tokens == 1),
    )
    if hasattr(BACKENDS[backend], "count_formed_pairs"):
        work = replace(work, pairs=BACKENDS[backend].count_formed_pairs(job, work))
    result = BACKENDS[backend].executed_flops(job, work)
    assert torch_flops(layer, torch.randn(1, tokens, 16), source=z) == costs.executed_flops(
        spec, work, result
    )


def test_a_ring_returns_its_tokens_in_order():
    spec = cases.base(pattern="window(150)")
    layer = cases.layer(spec)
    x, cache = torch.randn(2, 900, 10, dtype=torch.float64), layer.cache(batch=2, capacity=900)
    starts, append = [], cache.append

    def watched(entry, at):
        result, where = append(entry, at)
        starts.append(where.start)
        return result, where

    cache.append = watched
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 310), (310, 600), (600, 900))]
    check_close(torch.cat(parts, 1), layer(x))
    assert starts == [0, 160, 450]
