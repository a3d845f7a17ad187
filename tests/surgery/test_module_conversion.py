"""Conversion of any nn.Module to GQA and MHA: equal to rows averaged head by head, exact where
heads are equal.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import headwise as hw
from headwise.surgery import Pool, ToCollaborative, ToMHA  # noqa: F401 - used in refused.txt
from headwise.util.errors import SpecError
from support.refusals import refused_cases
from support.third_party_attentions import Wrapped
from support.vision_attentions import CASES as VISION_CASES, DIM, HEADS, WIDE

GROUPS = 2  # key-value heads of nn.Transformer after the conversion, of 4
MHA_WIDE, MHA_HEADS, MHA_DIM = 12, 4, 3


def average_heads(weight: Tensor, heads: list[list[slice]]) -> None:
    """Set the rows of all heads of a group to their mean, head by head."""
    for group in heads:
        mean = sum(weight[rows] for rows in group) / len(group)
        for rows in group:
            weight[rows] = mean


def rows_of_heads(
    first: int, width: int, stride: int, group_size: int, heads: int
) -> list[list[slice]]:
    """Rows of each head, in groups of neighbours."""
    rows = [slice(first + stride * head, first + stride * head + width) for head in range(heads)]
    return [rows[n : n + group_size] for n in range(0, heads, group_size)]


@torch.no_grad()
def average_vision_layer(layer: nn.Module) -> int:
    """Average all heads of k and v in place, and return the number of parameters that this makes
    equal.
    """
    layer = getattr(layer, "attn", layer)
    if hasattr(layer, "k_proj"):
        tensors = [layer.k_proj.weight, layer.v_proj.weight, layer.v_proj.bias]
        layout = [rows_of_heads(0, 4, 4, HEADS, HEADS)] * 3
    else:
        fused = layer.to_qkv if hasattr(layer, "to_qkv") else layer.qkv
        by_head = hasattr(layer, "dim_head")
        starts = (DIM, 2 * DIM) if by_head else (WIDE, 2 * WIDE)
        of_one = [
            rows_of_heads(start, DIM, 3 * DIM if by_head else DIM, HEADS, HEADS) for start in starts
        ]
        tensors = [tensor for tensor in fused.parameters() for _ in of_one]
        layout = of_one * 2
    removed = 0
    for tensor, heads in zip(tensors, layout, strict=False):
        average_heads(tensor.data, heads)
        removed += (HEADS - 1) * tensor[heads[0][0]].numel()
    return removed


@pytest.mark.parametrize("name", VISION_CASES)
@torch.no_grad()
def test_modules_of_vision_libraries_share_keys_and_values(name: str, tmp_path: Path):
    """Against rows averaged by hand; read from a file into a converted copy of a model with other
    weights.
    """
    model, x = VISION_CASES[name].build()
    model, x = model.double(), x.double()
    hw.sites(model, x)
    expected, before = copy.deepcopy(model), model(x)
    removed = sum(average_vision_layer(layer) for layer in expected)
    done = hw.convert_module(model, 1, x)
    assert done.removed_params == removed
    assert list(done.groups.values()) == [((0, 1, 2),)] * 2
    assert torch.allclose(done.after(x), expected(x), atol=1e-12, rtol=0)
    assert not torch.allclose(done.after(x), before, atol=1e-3)
    assert torch.equal(model(x), before)
    save_file(done.after.state_dict(), tmp_path / "model.safetensors")
    other = VISION_CASES[name].make()
    fresh = nn.Sequential(other, VISION_CASES[name].make()).double().eval()
    hw.sites(fresh, x)
    loaded = hw.convert_module(fresh, 1, x).after
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(loaded(x), done.after(x))


def make_transformer(seed: int = 0) -> nn.Transformer:
    torch.manual_seed(seed)
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 7}
    model = nn.Transformer(MHA_WIDE, MHA_HEADS, **sizes, batch_first=True).eval().double()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 4
    return model


SOURCE, TARGET = (
    torch.randn(2, n, MHA_WIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    for n in (7, 5)
)


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning")
@torch.no_grad()
def test_nn_transformer_shares_keys_and_values(tmp_path: Path):
    """Encoder, decoder and cross attention with masks, with and without torch's fused layers."""
    model, expected = make_transformer(), make_transformer()
    attentions = [
        module for module in expected.modules() if isinstance(module, nn.MultiheadAttention)
    ]
    for attention in attentions:
        for tensor in (attention.in_proj_weight, attention.in_proj_bias):
            for start in (MHA_WIDE, 2 * MHA_WIDE):
                average_heads(
                    tensor.data,
                    rows_of_heads(start, MHA_DIM, MHA_DIM, MHA_HEADS // GROUPS, MHA_HEADS),
                )
    done = hw.convert_module(model, Pool(GROUPS), (SOURCE, TARGET))
    assert done.removed_params == len(attentions) * 2 * (MHA_HEADS - GROUPS) * MHA_DIM * (
        MHA_WIDE + 1
    )
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        "tgt_is_causal": True,
    }
    masks |= {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    y = done.after(SOURCE, TARGET, **masks)
    assert torch.allclose(y, expected(SOURCE, TARGET, **masks), atol=1e-12, rtol=0)
    assert not torch.allclose(y, model(SOURCE, TARGET, **masks), atol=1e-3)
    save_file(done.after.state_dict(), tmp_path / "model.safetensors")
    loaded = hw.convert_module(make_transformer(3), GROUPS, (SOURCE, TARGET)).after
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(loaded(SOURCE, TARGET, **masks), y)
    cross = hw.convert_module(model, 1, (SOURCE, TARGET), kind="cross")
    assert [re.sub(r".*\.", "", name) for name in cross.groups] == ["cross"]
    assert cross.removed_params == 2 * 3 * MHA_DIM * (MHA_WIDE + 1)


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning")
@torch.no_grad()
def test_heads_that_are_equal_are_shared_exactly():
    model = make_transformer()
    for attention in model.modules():
        if isinstance(attention, nn.MultiheadAttention):
            for tensor in (attention.in_proj_weight.data, attention.in_proj_bias.data):
                parts = tensor[MHA_WIDE:].unflatten(0, (2, GROUPS, -1, MHA_DIM))
                parts[:, :, 1] = parts[:, :, 0]
    done = hw.convert_module(model, GROUPS, (SOURCE, TARGET))
    assert torch.allclose(done.after(SOURCE, TARGET), model(SOURCE, TARGET), atol=1e-12, rtol=0)
    assert done.removed_params > 0


def test_shared_heads_are_trained_together():
    model = make_transformer()
    model.encoder.layers[0].self_attn.in_proj_bias.requires_grad_(False)
    after = hw.convert_module(model, 1, (SOURCE, TARGET)).after.train()
    optimizer = torch.optim.SGD([p for p in after.parameters() if p.requires_grad], lr=0.1)
    after(SOURCE, TARGET).square().sum().backward()
    optimizer.step()
    attention = after.encoder.layers[0].self_attn
    keys = attention.in_proj_weight[MHA_WIDE : 2 * MHA_WIDE].unflatten(0, (MHA_HEADS, -1))
    assert torch.equal(keys, keys[:1].expand_as(keys))
    assert not torch.equal(
        keys,
        model.encoder.layers[0].self_attn.in_proj_weight[MHA_WIDE : 2 * MHA_WIDE].view_as(keys),
    )
    assert attention.parametrizations.in_proj_bias.original.grad is None


# --- A module that reads its number of key-value heads --------------------------------------------


class Grouped(nn.Module):
    """Grouped queries; values are wider than keys."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.kv_channels = 6, 3, 12
        self.q, self.k = nn.Linear(10, 24), nn.Linear(10, 12, bias=False)
        self.v, self.o = nn.Linear(10, 15), nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = (
            self.k(x)
            .view(*x.shape[:2], self.num_kv_heads, self.kv_channels // self.num_kv_heads)
            .transpose(1, 2)
        )
        v = self.v(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        z = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.o(z.transpose(1, 2).flatten(2))


def make_grouped() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Grouped(), Grouped()).eval().double()
    site = hw.AttentionSite(
        q="q", k="k", v="v", out="o", heads=6, kv_heads=3, attributes={"kv_channels": "k"}
    )
    for layer in model:
        hw.declare(layer, site)
    return model, torch.randn(2, 7, 10, dtype=torch.float64)


@torch.no_grad()
def test_a_module_with_key_value_heads_becomes_mha_and_returns():
    model, x = make_grouped()
    mha = hw.convert_module(model, ToMHA(), x)
    assert [(site.q, site.kv) for site in hw.sites(mha.after)] == [(6, 6)] * 2
    assert mha.removed_params == -2 * 3 * (4 * 10 + 5 * 11)
    assert torch.allclose(mha.after(x), model(x), atol=1e-13, rtol=0)
    back = hw.convert_module(mha.after, 3, x).after
    for name, parameter in model.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter)
    mqa = hw.convert_module(model, 1, x).after
    assert (mqa[1].num_kv_heads, mqa[1].kv_channels, mqa[1].k.out_features) == (1, 4, 4)
    assert torch.allclose(mqa[0].k.weight, model[0].k.weight.view(3, 4, 10).mean(0), atol=1e-15)
    pruned = hw.prune_module(mqa, [(0, 4)], x).after
    assert [(site.q, site.kv) for site in hw.sites(pruned)] == [(5, 1), (6, 1)]


# --- Refusals -------------------------------------------------------------------------------------

ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 7, batch_first=True), 1).eval()
INPUT = torch.randn(2, 5, 12)


@pytest.mark.parametrize(
    ("conversion", "reason"), refused_cases(__file__, "conversions of modules", globals())
)
def test_conversions_that_a_module_cannot_express_are_refused(conversion: object, reason: str):
    with pytest.raises(SpecError, match=reason) as excinfo:
        hw.convert_module(ENCODER, conversion, INPUT)
    assert "\n" not in str(excinfo.value)


def test_modules_that_cannot_be_converted_are_refused():
    converted = hw.convert_module(ENCODER, 2, INPUT).after
    for change in (
        lambda: hw.convert_module(converted, 1, INPUT),
        lambda: hw.prune_module(converted, [(0, 1)], INPUT),
    ):
        with pytest.raises(SpecError, match=r"computed from others.*change the original model"):
            change()
    with pytest.raises(SpecError, match="no cross-attention"):
        hw.convert_module(ENCODER, 2, INPUT, kind="cross")
    with pytest.raises(SpecError, match=r"model\.eval"):
        hw.convert_module(copy.deepcopy(ENCODER).train(), 2, INPUT)
    biased = nn.Sequential(
        Wrapped(nn.MultiheadAttention(12, 4, add_bias_kv=True, batch_first=True))
    ).eval()
    with pytest.raises(SpecError, match="bias_kv differs between heads"):
        hw.convert_module(biased, 2, INPUT)
    with pytest.raises(SpecError, match="Sequential has no attention that headwise finds"):
        hw.convert_module(nn.Sequential(nn.Linear(2, 2)).eval(), 2, torch.randn(1, 2))
    own, _ = make_grouped()
    twice = nn.Sequential(own[0], own[0]).float().eval()
    with pytest.raises(SpecError, match=r"several depths|same weights"):
        hw.convert_module(twice, 1, torch.randn(1, 5, 10))


class OddRows(nn.Module):
    """q, k and v of each channel in turn: the rows of a head lie together, as by head, but in
    another order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 3, nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 2, 3)).permute(4, 0, 2, 1, 3)
        return self.proj(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


def test_rows_that_belong_to_heads_in_another_order_are_refused():
    torch.manual_seed(0)
    model, x = nn.Sequential(OddRows()).eval(), torch.randn(2, 5, 6)
    hw.declare(
        model[0], hw.AttentionSite(q="qkv", k="qkv", v="qkv", out="proj", heads=3, fused="by head")
    )
    with pytest.raises(
        SpecError, match=r"rows of qkv do not belong to 3 heads of q, k and v in order; declare"
    ):
        hw.convert_module(model, 1, x)
    silent = nn.Sequential(Wrapped(nn.MultiheadAttention(6, 3, batch_first=True))).eval()
    own, y = make_grouped()
    torch.nn.init.zeros_(own[1].o.weight)
    with pytest.raises(
        SpecError, match=r"1\.attention: its output does not depend on q, k and v on this example"
    ):
        hw.convert_module(own, 1, y)
    assert hw.convert_module(silent, 1, x).removed_params == 2 * 2 * 2 * 7


def test_prune_and_convert_name_the_functions_for_any_module():
    for change in (lambda: hw.convert(ENCODER, 2), lambda: hw.prune(ENCODER, 0.5)):
        with pytest.raises(
            SpecError, match=r"TransformerEncoder .*hw\.prune_module.*hw\.convert_module"
        ):
            change()


def test_a_norm_of_each_head_cannot_be_averaged():
    config = transformers.StableLmConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        qk_layernorm=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.StableLmForCausalLM(config).eval()
    with pytest.raises(SpecError, match=r"k_layernorm\.norms\.0\.weight belongs to some of its"):
        hw.convert(model, 1)
