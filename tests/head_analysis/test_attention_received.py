"""How much each token is read is the column sums of all weights, however many bands they come in."""

from __future__ import annotations

import torch

import headwise as hw
from headwise.head_analysis import weight_bands
from headwise.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.head_analysis.weight_bands import AttentionReceived, stream_weight_bands
from headwise.inspect.attention_sites import find_attention
from headwise.model_spec import BlockSpec, EmbeddingSpec, ModelSpec, OutputHeadSpec, StackSpec


def test_columns_are_those_of_all_weights(monkeypatch):
    blocks = [BlockSpec(hw.design(model=12, heads=3, pattern=pattern)) for pattern in ("causal", "window(3)")]
    stack = StackSpec.from_blocks("decoder", 12, blocks, embedding=EmbeddingSpec(17))
    net = hw.build(ModelSpec("seen", "decoder", (stack,), (OutputHeadSpec("tokens", 17),)), seed=0)
    ids, none = torch.arange(13) % 17, torch.zeros(13, dtype=torch.bool)
    scene = Example(ids[None], {"text": TokenAnnotations(ids, ("",) * 13, none, none, none, torch.arange(13), ids)})
    those, received, bands = find_attention(net.eval()), AttentionReceived(), []
    monkeypatch.setattr(weight_bands, "MAX_CELLS", 3 * 13 * 2)

    def see(site, block):
        bands.append(site)
        received.add_band(site, block)

    stream_weight_bands(net, those, scene, {one.site.name: ("text", "text") for one in those}, see)
    assert len(bands) > 2 * len(those)
    probes = {name: hw.Probe("weights") for name, _ in net.spec.attention_specs()}
    net.probes = probes
    net(ids[None])
    for one, probe in zip(those, probes.values(), strict=True):
        weights = probe.tensors["weights"][0].double().sum(1)
        torch.testing.assert_close(received.sums[one.site.name], weights, rtol=1e-5, atol=1e-6, check_dtype=False)
