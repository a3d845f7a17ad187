"""Attention sites of transformers models: found, equal to their own weights,
and ablated exactly.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.observe.inspect.attention_sites import find_attention
from support.site_recording import record_eager_weights, record_sites
from support.transformers_models import FALLBACK, ZOO, run_model, without_columns


@pytest.mark.parametrize("name", ZOO)
def test_rows_are_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch):
    zoo = ZOO[name]
    model = zoo.build("eager")
    with record_eager_weights(monkeypatch) as recorded, record_sites(model) as keeps:
        run_model(model, zoo.inputs())
    own = {one.site.name: recorded[one.module] for one in find_attention(model)}
    result = [keeps]
    if (
        model._supports_sdpa
    ):  # which gives no weights, and may understand what eager spells out in a mask
        fused = zoo.build("sdpa")
        with record_sites(fused) as keeps:
            run_model(fused, zoo.inputs())
        result.append(keeps)
    for keeps in result:  # scores of T5 are not scaled, so float32 rounds them by more
        for site, keep in keeps.items():
            (core,) = keep.seen
            for head in range(own[site].shape[1]):
                assert torch.allclose(core.head_weights(head), own[site][:, head], atol=5e-5), (
                    site,
                    head,
                )
            assert torch.allclose(
                core.head_weights(2, slice(1, 3)), own[site][:, 2, 1:3], atol=5e-5
            )


@pytest.mark.parametrize("name", ZOO | FALLBACK)
def test_ablation_equals_removing_output_columns(name: str):
    """Also where no interface is asked."""
    zoo = (ZOO | FALLBACK)[name]
    model = zoo.build()
    sites = hw.sites(model)
    assert all(site.q == 4 for site in sites)
    whole = run_model(model, zoo.inputs())
    for site in sites[:: max(1, len(sites) // 3)]:
        with hw.ablate(model, [(site.name, 1), (site.name, 3)]):
            quiet = run_model(model, zoo.inputs())
        other = copy.deepcopy(model)
        for head in (1, 3):
            without_columns(other, site.path, zoo.out, head, 8)
        expected = run_model(other, zoo.inputs())
        assert (whole - expected).abs().max() > 1e-4, site.name
        assert (quiet - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), (
            site.name
        )
    assert torch.equal(run_model(model, zoo.inputs()), whole)


class Plain(nn.Module):
    """Vision attention as many write it: one map for q, k and v, and `proj` behind the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attention(Plain):
    """The same under a name that says so."""


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "tokens first"])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_layers(first: bool, training: bool):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 17, dropout=0.0, batch_first=first)
    model = nn.TransformerEncoder(
        layer, 2, enable_nested_tensor=first
    )  # which takes the fast path where it can
    model.train(training)
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        whole = model(x)
        with hw.ablate(model, [(1, 1)]):
            quiet = model(x)
        other = copy.deepcopy(model)
        other.layers[1].self_attn.out_proj.weight[:, 6:] = 0
        assert torch.allclose(quiet, other(x), atol=1e-6)
        assert not torch.allclose(quiet, whole, atol=1e-3)
        assert torch.equal(model(x), whole)
    assert torch.backends.mha.get_fastpath_enabled()


def test_multihead_attention_returns_its_weights_on_request():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, batch_first=True)
    x, k, v = torch.randn(2, 5, 12), torch.randn(2, 6, 7), torch.randn(2, 6, 5)
    mask = torch.randn(5, 6)
    for how in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        own, weights = layer(x, k, v, attn_mask=mask, **how)
        with record_sites(layer) as keeps:
            same, again = layer(x, k, v, attn_mask=mask, **how)
        assert torch.allclose(own, same, atol=1e-6)
        assert (weights is None) == (again is None)
        assert weights is None or torch.allclose(weights, again, atol=1e-6)
        (keep,) = keeps.values()
        full = layer(x, k, v, attn_mask=mask, average_attn_weights=False)[1]
        assert torch.allclose(keep.seen[0].head_weights(2, slice(1, 4)), full[:, 2, 1:4], atol=1e-6)


def test_an_attention_of_ones_own():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12)
    named, other = nn.Sequential(Attention()), nn.Sequential(Plain())
    assert [(site.q, site.dim) for site in hw.sites(named)] == [(3, 4)]
    assert hw.sites(other) == []
    hw.declare(other[0], heads=3, output="proj")
    for model in (named, other):
        with torch.no_grad(), hw.ablate(model, [(0, 1)]):
            quiet = model(x)
        with torch.no_grad():
            model[0].proj.weight[:, 4:8] = 0
            assert torch.allclose(quiet, model(x), atol=1e-6)


def test_head_outputs_are_replaced():
    zoo = ZOO["bert"]
    model = zoo.build()
    value = torch.randn(8)
    with record_sites(model) as keeps, hw.patch(model, {(0, 1): value}):
        patched = run_model(model, zoo.inputs())
    entry = keeps["encoder.0.attention"]
    assert entry.seen
    with hw.ablate(model, [(0, 1)]):
        assert not torch.equal(run_model(model, zoo.inputs()), patched)
    at = torch.zeros(2, 11, dtype=torch.bool)
    whole = run_model(model, zoo.inputs())
    with hw.patch(model, {(0, 1): value}, tokens=at):
        assert torch.equal(run_model(model, zoo.inputs()), whole)


def test_unsupported_sites_give_a_reason():
    model = ZOO["llama"].build()
    compiled = torch.compile(model, backend="eager")
    assert "compiled" in hw.sites(compiled)[0].ablate.reason
    with pytest.raises(ValueError, match="compiled"), hw.ablate(compiled, [(0, 1)]):
        pass
    with pytest.raises(ValueError, match=r"cannot be observed: .*compiled"):
        hw.head_means(compiled, [ZOO["llama"].inputs()], [(0, 1)])
    assert "threads" in hw.sites(nn.DataParallel(model))[0].ablate.reason
    assert "meta" in hw.sites(model.to("meta"))[0].ablate.reason
    with pytest.raises(ValueError, match="no attention"), hw.ablate(nn.Linear(3, 3), [(0, 1)]):
        pass
