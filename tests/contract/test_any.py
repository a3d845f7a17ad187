"""Specs that nobody thought of keep the same promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

import headwise as hw
from headwise import costs
from headwise.attention import head_axis_ops, reference
from headwise.attention.backends import BACKENDS, CallSignature
from support import layer_cases as cases, spec_strategies as strategies
from support.layer_cases import check_close
from support.layer_checks import decode_in_chunks, layer_gradients, torch_flops

pytestmark = pytest.mark.lengthy


@given(spec=strategies.specs())
def test_any_spec_is_the_references(spec):
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    x.requires_grad_()
    tokens = cases.sequence_infos(x)["packed"]
    truth = reference.reference_attention(layer, x, source=z, tokens=tokens)
    slopes = layer_gradients(layer, truth, x)
    for backend in cases.supporting_backends(spec, grad_enabled=True):
        layer.backend_name = backend
        ours = layer(x, source=z, sequence=tokens)
        check_close(ours, truth)
        for name, slope in layer_gradients(layer, ours, x).items():
            check_close(
                slope, slopes[name], rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


@given(spec=strategies.specs(forward=True))
def test_any_spec_decodes(spec):
    spec = replace(spec, source=None)
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    expected = layer(x)
    if spec.recurrent_part and spec.pattern.retention.last is not None:
        return
    for chunks in [(1,) * 7, (3, 1, 3)]:
        cache = layer.cache(batch=cases.BATCH, capacity=9)
        check_close(decode_in_chunks(layer, x, chunks, cache), expected)
        assert cache.nbytes == costs.cache_bytes(
            spec, batch=cases.BATCH, capacity=9, bytes_per_number=8
        )


def decoded_by(spec, context):
    """The cache that held all tokens but the last when this layer decoded it; None if it does not
    decode.
    """
    layer = cases.layer(spec)
    x = torch.randn(1, context, spec.model, dtype=torch.float64)
    try:
        cache = layer.cache(batch=1, capacity=context)
        if context > 1:
            layer(x[:, :-1], cache=cache)
        y = layer(x[:, -1:], cache=cache)
    except (hw.SpecError, ValueError):
        return None
    check_close(y, layer(x)[:, -1:])
    return cache


@given(spec=strategies.specs(), context=st.integers(1, 12))
def test_any_spec_has_the_cache_and_the_decode_step_that_are_counted(spec, context):
    spec = replace(spec, source=None).at_depth(0, 1)
    cache = decoded_by(spec, context)
    (counted,) = hw.cost(spec, hw.Workload(context=context, dtype="fp32"))
    assert (counted.decode_flops is None) == (cache is None)
    assert counted.cache_bytes == (cache.nbytes // 2 if cache else 0)


@given(spec=strategies.specs())
def test_any_spec_is_cut_and_counted(spec):
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    outs = len(spec.score_head_of_output)
    keep = list(range(0, outs, 2))
    loud = torch.zeros(outs, 1, dtype=x.dtype)
    loud[keep] = 1
    silenced = layer(x, source=z, probe=hw.Probe("heads", callback=lambda _, o: o * loud))
    small, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), keep)
    cut = cases.load_layer(small, weights)
    check_close(cut(x, source=z), silenced)
    assert costs.count_parameters(small) == sum(p.numel() for p in cut.parameters())
    assert hw.from_json(hw.to_json(small)) == small
    keys = cases.TOKENS if z is None else cases.SOURCE
    work = hw.costs.CallSize(cases.BATCH, cases.TOKENS, keys, keys)
    layer.backend_name = "dense"
    assert torch_flops(layer, x, source=z) == costs.counted_flops(spec, work)
    assert BACKENDS["dense"].executed_flops(
        CallSignature(spec, spec.core), work
    ) == spec.core.flops(work.batch * work.pairs)
