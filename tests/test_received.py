"""How much each token is read is the column sums of all weights, however many bands they come in."""

from __future__ import annotations

import torch

import headwise as hw
from headwise.blueprint import Block, Embedding, Head, Model, Stack
from headwise.heads import looking
from headwise.heads.looking import look
from headwise.heads.received import Received
from headwise.heads.scene import Scene, Tokens
from headwise.hub.finding import found


def test_columns_are_those_of_all_weights(monkeypatch):
    blocks = [Block(hw.design(model=12, heads=3, pattern=pattern)) for pattern in ("causal", "window(3)")]
    stack = Stack.of("decoder", 12, blocks, embedding=Embedding(17))
    net = hw.build(Model("seen", "decoder", (stack,), (Head("tokens", 17),)), seed=0)
    ids, none = torch.arange(13) % 17, torch.zeros(13, dtype=torch.bool)
    scene = Scene(ids[None], {"text": Tokens(ids, ("",) * 13, none, none, none, torch.arange(13), ids)})
    those, received, bands = found(net.eval()), Received(), []
    monkeypatch.setattr(looking, "CELLS", 3 * 13 * 2)

    def see(site, block):
        bands.append(site)
        received.see(site, block)

    look(net, those, scene, {one.site.name: ("text", "text") for one in those}, see)
    assert len(bands) > 2 * len(those)
    probes = {name: hw.Probe("weights") for name, _ in net.described.specs()}
    net.probes = probes
    net(ids[None])
    for one, probe in zip(those, probes.values(), strict=True):
        weights = probe.seen["weights"][0].double().sum(1)
        torch.testing.assert_close(received.sums[one.site.name], weights, rtol=1e-5, atol=1e-6, check_dtype=False)
