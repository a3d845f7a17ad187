"""Pruning of declared modules: the pruned module equals the ablated one and shrinks by the counted
number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.surgery.resized_attention import SplitMultiheadAttention
from headwise.util.errors import SpecError
from support.refusals import refused_cases
from support.third_party_attentions import Wrapped
from support.vision_attentions import CASES as VISION_CASES, DIM as VISION_DIM, WIDE as VISION_WIDE

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
        k, v = (
            one(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
            for one in (self.keys, self.values)
        )
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
    q="ask",
    k="keys",
    v="values",
    out="last",
    heads=HEADS,
    kv_heads=KV,
    attributes={"n_q": "heads", "inner": "q"},
)
FUSED = hw.AttentionSite(q="qkv", k="qkv", v="qkv", out="proj", heads=HEADS)


def build(make: Callable[[], nn.Module], site: hw.AttentionSite) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).eval()
    for layer in model:
        hw.declare(layer, site)
    return model, torch.randn(3, 7, WIDE)


# q and k have 4 channels a head, v 5; a query head loses its rows of q, its columns of `last` and
# its scale.
QUERY_HEAD, KV_HEAD = DIM * (WIDE + 1) + 5 * WIDE + 1, DIM * WIDE + 5 * (WIDE + 1)
FUSED_HEAD = 3 * DIM * (WIDE + 1) + DIM * WIDE
CASES = {
    "one of each group": (Grouped, GROUPED, [(0, 1), (0, 2), (0, 5)], 3 * QUERY_HEAD),
    "a whole group": (Grouped, GROUPED, [(1, 2), (1, 3)], 2 * QUERY_HEAD + KV_HEAD),
    "groups of two layers": (
        Grouped,
        GROUPED,
        [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)],
        6 * QUERY_HEAD + 3 * KV_HEAD,
    ),
    "by projection": (lambda: Fused(False), FUSED, [(0, 0), (0, 4), (1, 5)], 3 * FUSED_HEAD),
    "by head": (
        lambda: Fused(True),
        replace(FUSED, fused="by head"),
        [(0, 0), (0, 4), (1, 5)],
        3 * FUSED_HEAD,
    ),
}


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
    sizes = [
        sum(parameter.numel() for parameter in one.parameters()) for one in (model, done.after)
    ]
    assert sizes[0] - sizes[1] == done.removed_params == count
    y = torch.randn(2, 11, WIDE)
    for inputs in (x, y):
        assert torch.allclose(done.after(inputs), other(inputs), atol=1e-5)
    assert not torch.allclose(done.after(x), whole, atol=1e-2)
    assert done.difference < 1e-5
    assert sorted(done.removed_heads) == [
        (f"model.{layer}.attention", head) for layer, head in heads
    ]
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
    at_once = hw.prune_module(
        model, [(0, 0), (0, 1), (0, 4), (0, 5), (1, 0), (1, 1), (1, 3), (1, 5)], x
    ).after
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


class Literal(Fused):
    """Its number of heads is written in its forward, so that it runs with no other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@torch.no_grad()
def test_the_cut_is_found_at_the_module_if_the_last_layer_is_zero():
    """A classifier starts with zeros: outputs of the model alone would agree for any cut. The
    declared order of rows is wrong, and is not needed.
    """
    model, x = build(lambda: Fused(True), FUSED)
    other = copy.deepcopy(model[0])
    other.proj.weight[:, :DIM] = 0
    silent = nn.Sequential(model, nn.Linear(WIDE, 2)).eval()
    nn.init.zeros_(silent[1].weight)
    after = hw.prune_module(silent, [(0, 0)], x).after
    assert torch.allclose(after[0][0](x), other(x), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "site"),
    [
        (Grouped, replace(GROUPED, attributes={})),
        (lambda: Fused(True), FUSED),
        (lambda: Fused(False), replace(FUSED, fused="by head")),
    ],
)
@torch.no_grad()
def test_a_cut_needs_no_sizes_no_tensors_of_heads_and_no_order_of_rows(make: Any, site: Any):
    model, x = build(make, site)
    other = copy.deepcopy(model)
    last = other[0].get_submodule(site.out).weight
    last[:, : 2 * last.shape[1] // HEADS] = 0
    after = hw.prune_module(model, [(0, 0), (0, 1)], x).after
    assert torch.allclose(after(x), other(x), atol=1e-5)
    assert sum(p.numel() for p in after.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "site", "heads", "reason"), refused_cases(__file__, "cuts of modules", globals(), 3)
)
def test_a_cut_that_is_not_exact_is_refused(make: Any, site: Any, heads: Any, reason: str):
    model, x = build(make, site)
    with pytest.raises(ValueError, match=reason) as excinfo:
        hw.prune_module(model, heads, x)
    assert "\n" not in str(excinfo.value)


def test_models_that_cannot_be_pruned_are_refused():
    model, x = build(lambda: Fused(False), FUSED)
    with pytest.raises(ValueError, match=r"model\.eval"):
        hw.prune_module(model.train(), [(0, 0)], x)
    other, _ = build(Grouped, GROUPED)
    hw.declare(other[0], heads=HEADS, output="last")
    with pytest.raises(ValueError, match=r"shared by 1, 2, 2 query heads"):  # of 3 key-value heads
        hw.prune_module(other.eval(), [(0, 0)], x)
    model.eval()
    tied = Tied().eval()
    for layer in tied:
        hw.declare(layer, FUSED)
    with pytest.raises(ValueError, match=r"1\.proj\.weight has the same weights"):
        hw.prune_module(tied, [(0, 0)], x)
    again = nn.Sequential(model[1], model[1]).eval()
    with pytest.raises(ValueError, match=r"same weights|several depths"):
        hw.prune_module(again, [(0, 0)], x)


@pytest.mark.parametrize(("site", "reason"), refused_cases(__file__, "declarations", globals()))
def test_a_declaration_that_does_not_fit_the_module_is_refused(site: Any, reason: str):
    module = Fused(False) if site.q == "qkv" else Grouped()
    with pytest.raises(ValueError, match=reason):
        hw.declare(module, site)
    assert hw.sites(nn.Sequential(module)) == []
    with pytest.raises(ValueError, match="leave them out"):
        hw.declare(module, site, heads=3)


# --- Modules of vision libraries that nobody declared ---------------------------------------------

VISION_HEAD = 3 * VISION_DIM * (VISION_WIDE + 1) + VISION_DIM * VISION_WIDE


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("timm vit", VISION_HEAD),
        ("timm deit", VISION_HEAD),
        ("timm maxvit", VISION_HEAD),
        ("vit-pytorch", VISION_HEAD - 3 * VISION_DIM),
    ],
)
@torch.no_grad()
def test_modules_of_vision_libraries_are_pruned_without_a_declaration(name: str, removed: int):
    """Rows of the fused projection lie by projection, or by head in MaxViT; vit-pytorch's has no
    bias.
    """
    model, x = VISION_CASES[name].build()
    expected = copy.deepcopy(model)
    weight = expected[1].get_submodule(VISION_CASES[name].projection).weight
    weight[:, VISION_DIM : 2 * VISION_DIM] = 0
    pruned = hw.prune_module(model, [(1, 1)], x)
    assert pruned.removed_params == removed
    assert torch.allclose(pruned.after(x), expected(x), atol=1e-5)
    assert (
        sum(p.numel() for p in model.parameters())
        - sum(p.numel() for p in pruned.after.parameters())
        == removed
    )
    assert [site.heads for site in hw.sites(pruned.after)] == [3, 2]


def test_a_module_whose_norm_joins_heads_is_not_pruned():
    model, x = VISION_CASES["timm eva02"].build()
    with pytest.raises(SpecError, match=r"cannot run|differs from the ablated one"):
        hw.prune_module(model, [(1, 1)], x)


# --- nn.MultiheadAttention ------------------------------------------------------------------------

MHA_WIDE, MHA_HEADS, MHA_DIM = 15, 3, 5
MHA_HEAD = 3 * MHA_DIM * (MHA_WIDE + 1) + MHA_DIM * MHA_WIDE


def ablate_by_weights(attention: nn.MultiheadAttention, head: int) -> None:
    attention.out_proj.weight.data[:, head * MHA_DIM : (head + 1) * MHA_DIM] = 0


def make_transformer(batch_first: bool) -> nn.Transformer:
    torch.manual_seed(0)
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 17}
    model = nn.Transformer(
        MHA_WIDE, MHA_HEADS, **sizes, batch_first=batch_first, dropout=0.1
    ).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 4
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.no_grad()
def test_an_encoder_on_nested_tensors_is_pruned():
    """torch packs padded rows into nested tensors in eval mode, which only its
    fused layers take.
    """
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(10, 2, 7, batch_first=True), 2).eval()
    expected, x = copy.deepcopy(model), torch.randn(2, 5, 10)
    assert expected.use_nested_tensor
    expected.layers[1].self_attn.out_proj.weight[:, 5:] = 0
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    pruned = hw.prune_module(model, [(1, 1)], x).after
    both = [one(x, src_key_padding_mask=padding)[~padding] for one in (pruned, expected)]
    assert torch.allclose(*both, atol=1e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_heads_of_nn_transformer_are_pruned(batch_first: bool):
    """Encoder, decoder and cross attention, with causal and padding masks, against output columns
    of zeros.
    """
    model, expected = make_transformer(batch_first), make_transformer(batch_first)
    source, target = (torch.randn(2, n, MHA_WIDE).transpose(0, 1) for n in (7, 5))
    if batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5),
        "src_key_padding_mask": padding,
    }
    masks |= {"memory_key_padding_mask": padding, "tgt_is_causal": True}
    sites = {site.path: site.name for site in hw.sites(model)}
    places = {
        "encoder.layers.1.self_attn": 0,
        "decoder.layers.0.self_attn": 2,
        "decoder.layers.0.multihead_attn": 1,
    }
    for path, head in places.items():
        ablate_by_weights(expected.get_submodule(path), head)
    pruned = hw.prune_module(
        model, [(sites[path], head) for path, head in places.items()], (source, target)
    )
    assert pruned.removed_params == 3 * MHA_HEAD
    actual = pruned.after(source, target, **masks)
    assert torch.allclose(actual, expected(source, target, **masks), atol=1e-5)
    assert not torch.allclose(actual, model(source, target, **masks), atol=1e-3)
    again = hw.prune_module(
        pruned.after, [(sites["encoder.layers.1.self_attn"], 0)], (source, target)
    )
    ablate_by_weights(expected.get_submodule("encoder.layers.1.self_attn"), 1)
    assert torch.allclose(
        again.after(source, target, **masks), expected(source, target, **masks), atol=1e-5
    )


ATTENTION_CALLS = {
    "plain": {},
    "weights of heads": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "causal": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
    "added": {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5)},
    "mask for each head": {"attn_mask": torch.linspace(-2, 1, 150).view(6, 5, 5)},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
}


@pytest.mark.parametrize("widths", [{}, {"kdim": 4, "vdim": 6}, {"bias": False}])
@pytest.mark.parametrize("call", ATTENTION_CALLS)
def test_split_attention_equals_that_of_torch(call: str, widths: dict[str, int]):
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(MHA_WIDE, MHA_HEADS, batch_first=True, **widths).eval()
    split = SplitMultiheadAttention(attention)
    wide = (MHA_WIDE, widths.get("kdim", MHA_WIDE), widths.get("vdim", MHA_WIDE))
    inputs = [torch.randn(2, 5, channels) for channels in wide]
    expected, actual = (
        attention(*inputs, **ATTENTION_CALLS[call]),
        split(*inputs, **ATTENTION_CALLS[call]),
    )
    assert torch.allclose(actual[0], expected[0], atol=1e-5)
    assert (actual[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        assert torch.allclose(actual[1], expected[1], atol=1e-5)
    if call in ("plain", "weights of heads"):
        one, other = (
            layer(*(x[0] for x in inputs), **ATTENTION_CALLS[call]) for layer in (attention, split)
        )
        assert torch.allclose(one[0], other[0], atol=1e-5)
        assert torch.allclose(one[1], other[1], atol=1e-5)


def test_attention_with_added_keys_is_refused():
    model = nn.Sequential(
        Wrapped(nn.MultiheadAttention(MHA_WIDE, MHA_HEADS, add_zero_attn=True))
    ).eval()
    with pytest.raises(SpecError, match="add_zero_attn"):
        hw.prune_module(model, [(0, 1)], torch.randn(4, 2, MHA_WIDE))
