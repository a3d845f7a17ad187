"""Pruning of declared modules: the pruned module equals the ablated one and shrinks by the counted number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

WIDE, HEADS, KV, DIM = 10, 6, 3, 4


class Grouped(nn.Module):
    """Grouped queries, with its own scale for each head and sizes in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_q, self.num_kv_heads, self.inner = HEADS, KV, HEADS * DIM
        self.ask, self.keys = nn.Linear(WIDE, HEADS * DIM), nn.Linear(WIDE, KV * DIM, bias=False)
        self.values, self.last = nn.Linear(WIDE, KV * 5), nn.Linear(HEADS * 5, WIDE)
        self.scale = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.register_buffer("slopes", torch.arange(HEADS) / 7)

    def forward(self, x: Tensor) -> Tensor:
        q = self.ask(x).view(*x.shape[:2], self.n_q, self.inner // self.n_q).transpose(1, 2)
        k, v = (one(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for one in (self.keys, self.values))
        k, v = (y.repeat_interleave(self.n_q // self.num_kv_heads, 1) for y in (k, v))
        s = q @ k.transpose(-2, -1) * self.scale
        places = torch.arange(x.shape[1])
        s = s - self.slopes[:, None, None] * (places[:, None] - places).abs()
        return x + self.last((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """One projection; rows by projection or by head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head, self.num_heads = by_head, HEADS
        self.qkv, self.proj = nn.Linear(WIDE, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        if self.by_head:
            q, k, v = y.unflatten(-1, (self.num_heads, 3, DIM)).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = y.unflatten(-1, (3, self.num_heads, DIM)).permute(2, 0, 3, 1, 4)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


GROUPED = hw.AttentionSite(
    q="ask", k="keys", v="values", out="last", heads=HEADS, kv_heads=KV,
    attributes={"n_q": "heads", "inner": "q"}, per_head={"scale": 0, "slopes": 0},
)  # fmt: skip
FUSED = hw.AttentionSite(q="qkv", k="qkv", v="qkv", out="proj", heads=HEADS)


def build(make: Callable[[], nn.Module], site: hw.AttentionSite) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).eval()
    for layer in model:
        hw.declare(layer, site)
    return model, torch.randn(3, 7, WIDE)


# q and k have 4 channels a head, v 5; a query head loses its rows of q, its columns of `last` and its scale.
QUERY_HEAD, KV_HEAD = DIM * (WIDE + 1) + 5 * WIDE + 1, DIM * WIDE + 5 * (WIDE + 1)
FUSED_HEAD = 3 * DIM * (WIDE + 1) + DIM * WIDE
CASES = {
    "one of each group": (Grouped, GROUPED, [(0, 1), (0, 2), (0, 5)], 3 * QUERY_HEAD),
    "a whole group": (Grouped, GROUPED, [(1, 2), (1, 3)], 2 * QUERY_HEAD + KV_HEAD),
    "groups of two layers": (
        Grouped, GROUPED, [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)], 6 * QUERY_HEAD + 3 * KV_HEAD,
    ),
    "by projection": (lambda: Fused(False), FUSED, [(0, 0), (0, 4), (1, 5)], 3 * FUSED_HEAD),
    "by head": (lambda: Fused(True), replace(FUSED, fused="by head"), [(0, 0), (0, 4), (1, 5)], 3 * FUSED_HEAD),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_pruned_module_equals_the_ablated_one_and_shrinks_by_the_counted_number(name: str):
    make, site, heads, count = CASES[name]
    model, x = build(make, site)
    state, whole = copy.deepcopy(model.state_dict()), model(x)
    other = copy.deepcopy(model)
    for layer, head in heads:
        last = other[layer].get_submodule(site.out)
        width = last.in_features // HEADS
        last.weight[:, head * width : (head + 1) * width] = 0
    done = hw.prune_module(model, heads, x)
    sizes = [sum(parameter.numel() for parameter in one.parameters()) for one in (model, done.after)]
    assert sizes[0] - sizes[1] == done.removed_params == count
    y = torch.randn(2, 11, WIDE)
    for inputs in (x, y):
        assert torch.allclose(done.after(inputs), other(inputs), atol=1e-5)
    assert not torch.allclose(done.after(x), whole, atol=1e-2)
    assert done.difference < 1e-5
    assert sorted(done.removed_heads) == [(f"model.{layer}.attention", head) for layer, head in heads]
    assert torch.equal(model(x), whole)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


@torch.no_grad()
def test_a_pruned_module_is_declared_and_can_be_pruned_again():
    model, x = build(Grouped, GROUPED)
    once = hw.prune_module(model, [(0, 0), (0, 1), (1, 1), (1, 3), (1, 5)], x).after
    assert [(site.q, site.kv, site.dim, site.prune.possible) for site in hw.sites(once)] == [
        (4, 2, 5, True),
        (3, 3, 5, True),
    ]
    twice = hw.prune_module(once, [(0, 2), (0, 3), (1, 0)], x).after
    at_once = hw.prune_module(model, [(0, 0), (0, 1), (0, 4), (0, 5), (1, 0), (1, 1), (1, 3), (1, 5)], x).after
    for one, other in zip(twice.parameters(), at_once.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (twice[0].n_q, twice[0].num_kv_heads, twice[0].inner) == (2, 1, 2 * DIM)


def test_parameters_can_be_trained_after_pruning():
    model, x = build(Grouped, GROUPED)
    model[0].keys.weight.requires_grad_(False)
    after = hw.prune_module(model, [(0, 0), (0, 1)], x).after
    after(x).sum().backward()
    assert after[0].ask.weight.grad.shape == (4 * DIM, WIDE)
    assert not after[0].keys.weight.requires_grad
    assert isinstance(after[0].scale, nn.Parameter)
    assert not isinstance(after[0].slopes, nn.Parameter)


class Tied(nn.Sequential):
    """Two layers with one output projection."""

    def __init__(self) -> None:
        super().__init__(Fused(False), Fused(False))
        self[1].proj = self[0].proj


REFUSED = {
    "not equal groups": (Grouped, GROUPED, [(0, 1)], r"shared by 1, 2, 2 query heads; keep the same number"),
    "all heads": (Grouped, GROUPED, [(0, "all")], "cannot remove all 6 heads"),
    "unknown head": (Grouped, GROUPED, [(0, 9)], "no head 9"),
    "no head": (Grouped, GROUPED, [], "no head would be removed"),
    "sizes": (Grouped, replace(GROUPED, attributes={}), [(0, 0), (0, 1)], r"cannot run: .*attributes"),
    "per head": (Grouped, replace(GROUPED, per_head={"scale": 0}), [(0, 0), (0, 1)], r"cannot run: .*per_head"),
    "wrong rows": (lambda: Fused(True), FUSED, [(0, 0)], r"differs from the ablated one by .*per_head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cut_that_is_not_exact_is_refused(name: str):
    make, site, heads, reason = REFUSED[name]
    model, x = build(make, site)
    with pytest.raises(ValueError, match=reason) as excinfo:
        hw.prune_module(model, heads, x)
    assert "\n" not in str(excinfo.value)


def test_models_that_cannot_be_pruned_are_refused():
    model, x = build(lambda: Fused(False), FUSED)
    with pytest.raises(ValueError, match=r"model\.eval"):
        hw.prune_module(model.train(), [(0, 0)], x)
    hw.declare(model[0], heads=HEADS, output="proj")
    with pytest.raises(ValueError, match=r"not declared; call hw.declare\(module, hw.AttentionSite"):
        hw.prune_module(model.eval(), [(0, 0)], x)
    tied = Tied().eval()
    for layer in tied:
        hw.declare(layer, FUSED)
    with pytest.raises(ValueError, match=r"1\.proj\.weight has the same weights"):
        hw.prune_module(tied, [(0, 0)], x)
    again = nn.Sequential(model[1], model[1]).eval()
    with pytest.raises(ValueError, match=r"same weights|several depths"):
        hw.prune_module(again, [(0, 0)], x)


WRONG = {
    "no child": (replace(FUSED, out="nothing"), "no projection 'nothing'"),
    "groups": (replace(GROUPED, kv_heads=4), "make no equal groups"),
    "two children": (replace(GROUPED, k="ask"), "neither three children nor one"),
    "layout": (replace(FUSED, fused="by row"), "'by projection' or 'by head'"),
    "fused width": (replace(FUSED, heads=5), "are not 15 heads of q, k and v"),
    "widths": (replace(GROUPED, kv_heads=6), "are not those of 6 heads and 6 key-value heads"),
    "attribute": (replace(GROUPED, attributes={"n_q": "head"}), "is no 'head'; map int attributes"),
    "axis": (replace(GROUPED, per_head={"scale": 1}), "no axis 1 of 6 heads"),
    "parameter": (replace(GROUPED, per_head={"scales": 0}), "no axis 0 of 6 heads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_declaration_that_does_not_fit_the_module_is_refused(name: str):
    site, reason = WRONG[name]
    module = Fused(False) if site.q == "qkv" else Grouped()
    with pytest.raises(ValueError, match=reason):
        hw.declare(module, site)
    assert hw.sites(nn.Sequential(module)) == []
    with pytest.raises(ValueError, match="leave them out"):
        hw.declare(module, site, heads=3)
