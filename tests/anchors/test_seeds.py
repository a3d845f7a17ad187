"""The library against the listings of five source documents: equal wherever a query may read
anything at all.

Where it may not, the listings average the values of the forbidden keys and we read zero; both is
asserted.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from anchors import seeds

BATCH, TOKENS, SOURCE, HEADS, DIM = 2, 7, 11, 3, 4
MODEL, WIDE = HEADS * DIM, 17
BACKENDS = ("dense", "sdpa")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def adopted(
    spec: hw.AttentionSpec, backend: str | None = None, **weights: nn.Module
) -> hw.Attention:
    """Our layer in float64 with the weights of these linear maps, named q, k, v and o."""
    layer = hw.Attention(spec, backend=backend).double()
    state = layer.state_dict()
    for letter, linear in weights.items():
        name = f"output.{letter}" if letter == "o" else f"project.{letter}"
        state[name] = linear.weight
        if linear.bias is not None:
            assert f"{name}_bias" in state, f"our layer has no place for the bias of {letter}"
            state[f"{name}_bias"] = linear.bias
    layer.load_state_dict(state)
    return layer


def of_four(theirs: nn.Module, backend: str | None = None, **options: object) -> hw.Attention:
    """Our layer with the four linear maps of their MultiHeadedAttention."""
    spec = hw.design(model=MODEL, heads=HEADS, bias="qkvo", **options)
    return adopted(spec, backend, **dict(zip("qkvo", theirs.linears, strict=True)))


def holed(batch: int, queries: int, keys: int) -> Tensor:
    """A mask [B, T, S] with about half its keys visible; the second query of the first row sees
    nothing.
    """
    mask = torch.rand(batch, queries, keys) < 0.5
    mask[..., 0] = True
    mask[0, 1] = False
    return mask


# --- 000 and 001 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_projections(qkv_bias: bool):
    theirs = seeds.scattered(seeds.Projections(MODEL, HEADS * 5, qkv_bias=qkv_bias))
    spec = hw.design(model=MODEL, heads=HEADS, dim=5, bias="qkv" if qkv_bias else "")
    layer = adopted(spec, q=theirs.query, k=theirs.key, v=theirs.value)
    x, probe = numbers(BATCH, TOKENS, MODEL), hw.Probe("q", "k", "v")
    layer(x, probe=probe)
    for letter, expected in zip("qkv", theirs(x), strict=True):
        check_close(probe.tensors[letter].flatten(2), expected)
    counted = sum(parameter.numel() for parameter in theirs.parameters())
    assert hw.costs.count_parameters(spec) - MODEL * HEADS * 5 == counted


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_dot_products_of_four_axes(backend: str):
    theirs = seeds.scattered(seeds.Projections(MODEL, MODEL, qkv_bias=True))
    layer = adopted(
        hw.design(model=MODEL, heads=HEADS, bias="qkv"),
        backend,
        q=theirs.query,
        k=theirs.key,
        v=theirs.value,
    )
    x = numbers(BATCH, TOKENS, MODEL)
    q, k, v = (side.view(BATCH, TOKENS, HEADS, DIM).transpose(1, 2) for side in theirs(x))
    check_close(
        layer.head_outputs(x), seeds.ScaledDotProductAttention(DIM)(q, k, v).transpose(1, 2)
    )


# --- 002: Llama 3 ---------------------------------------------------------------------------------

THETA = 500_000.0


def llama(kv: int) -> tuple[nn.Module, hw.Attention]:
    theirs = seeds.scattered(seeds.LlamaAttention(24, 6, kv, BATCH, 16))
    rotary = hw.parts.Rotary(base=THETA, pairs="interleaved")
    spec = hw.design(model=24, heads=6, kv=kv, pattern="causal()", modifiers=(rotary,))
    return theirs, adopted(spec, q=theirs.wq, k=theirs.wk, v=theirs.wv, o=theirs.wo)


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_llama_in_one_pass(kv: int):
    theirs, layer = llama(kv)
    x = numbers(BATCH, 13, 24)
    with torch.no_grad():
        check_close(layer(x), theirs(x, 0, seeds.rotations(4, 16, THETA)))


@pytest.mark.parametrize("chunks", [(5, 1, 1, 1, 5), (1,) * 13, (12, 1), (3, 7, 3)])
def test_llama_with_its_cache(chunks: tuple[int, ...]):
    theirs, layer = llama(2)
    turns, cache, start = seeds.rotations(4, 16, THETA), layer.cache(batch=BATCH, capacity=16), 0
    with torch.no_grad():
        for x in numbers(BATCH, 13, 24).split(chunks, 1):
            check_close(layer(x, cache=cache), theirs(x, start, turns))
            start += x.shape[1]
        check_close(cache.entry["k"][:, :13], theirs.cache_k[:, :13])
        check_close(cache.entry["v"][:, :13], theirs.cache_v[:, :13])


def test_the_other_pairing_is_another_function():
    """Half-split pairs, as Hub checkpoints have them, differ from the listing's
    neighbouring ones.
    """
    theirs, layer = llama(2)
    halves = hw.design(
        model=24, heads=6, kv=2, pattern="causal()", modifiers=(hw.parts.Rotary(base=THETA),)
    )
    other = hw.Attention(halves).double()
    other.load_state_dict(layer.state_dict())
    x = numbers(BATCH, 13, 24)
    with torch.no_grad():
        assert (other(x) - theirs(x, 0, seeds.rotations(4, 16, THETA))).abs().max() > 1e-3


# --- 002: the annotated transformer ---------------------------------------------------------------


def test_multi_headed_attention_under_any_mask():
    theirs = seeds.scattered(seeds.MultiHeadedAttention(HEADS, MODEL))
    x = numbers(BATCH, TOKENS, MODEL)
    z = numbers(BATCH, SOURCE, MODEL)
    mask = holed(BATCH, TOKENS, SOURCE)
    layer, probe = of_four(theirs), hw.Probe("weights", "heads")
    with torch.no_grad():
        ours, expected = layer(x, source=z, mask=mask[:, None], probe=probe), theirs(x, z, z, mask)
    visible = mask.any(-1)
    check_close(ours[visible], expected[visible])
    check_close(
        probe.tensors["weights"].transpose(1, 2)[visible], theirs.weights.transpose(1, 2)[visible]
    )
    check_blind(layer, theirs, ours, expected, probe.tensors["heads"], visible, z)


def check_blind(
    layer: hw.Attention,
    theirs: nn.Module,
    ours: Tensor,
    expected: Tensor,
    heads: Tensor,
    recorded: Tensor,
    z: Tensor,
) -> None:
    """A query without a visible key: theirs is the mean of all forbidden values, ours nothing but
    the bias.
    """
    assert not recorded.all()
    assert (heads[~recorded] == 0).all()
    bias = layer.state_dict()["output.o_bias"]
    check_close(ours[~recorded], bias.expand_as(ours[~recorded]))
    assert theirs.weights.transpose(1, 2)[~recorded].sub(1 / z.shape[1]).abs().max() < 1e-12
    mean = theirs.linears[3](theirs.linears[2](z).mean(1, keepdim=True)).expand_as(expected)
    check_close(expected[~recorded], mean[~recorded])
    assert (ours[~recorded] - expected[~recorded]).abs().min() > 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_self_attention(backend: str):
    theirs = seeds.scattered(seeds.MultiHeadedAttention(HEADS, MODEL))
    x = numbers(BATCH, TOKENS, MODEL)
    later = torch.ones(1, TOKENS, TOKENS).tril()
    check_close(of_four(theirs, backend, pattern="causal()")(x), theirs(x, x, x, later))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_as_a_mask_of_keys(backend: str):
    """Padding queries read there and not here; of rows with a token every live query agrees."""
    theirs = seeds.scattered(seeds.MultiHeadedAttention(HEADS, MODEL))
    x, lengths = numbers(3, TOKENS, MODEL), torch.tensor([5, 0, TOKENS])
    layer, tokens = of_four(theirs, backend), hw.SequenceInfo.from_batch(x, lengths=lengths)
    src_mask = (torch.arange(TOKENS) < lengths[:, None])[:, None]
    ours, expected, live = layer(x, sequence=tokens), theirs(x, x, x, src_mask), tokens.is_real
    check_close(ours[live], expected[live])
    check_close(ours[~live], layer.state_dict()["output.o_bias"].expand_as(ours[~live]))
    assert (ours[1] - expected[1]).abs().min() > 1e-6, (
        "the empty row reads zero here and a mean there"
    )


def norm(x: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Unbiased deviation, epsilon outside the root; from the biased variance, so as not to say it
    as they do.
    """
    width = x.shape[-1]
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred.square().sum(-1, keepdim=True) / (width - 1)).sqrt() + eps) * a + b


def test_the_norm_of_the_listing_is_not_that_of_torch():
    theirs, x = seeds.scattered(seeds.LayerNorm(MODEL)), numbers(BATCH, TOKENS, MODEL)
    check_close(norm(x, theirs.a, theirs.b, theirs.eps), theirs(x))
    assert (
        F.layer_norm(x, (MODEL,), theirs.a, theirs.b, theirs.eps) - theirs(x)
    ).abs().max() > 1e-2


def encoded(theirs: nn.Module, ours: hw.Attention, x: Tensor, tokens: hw.SequenceInfo) -> Tensor:
    """An encoder layer around our attention: norm first, then what is read is added."""
    first, second = (connection.norm for connection in theirs.sublayer)
    x = x + ours(norm(x, first.a, first.b, first.eps), sequence=tokens)
    return x + theirs.feed_forward(norm(x, second.a, second.b, second.eps))


def test_encoder_layer():
    inner = seeds.MultiHeadedAttention(HEADS, MODEL)
    theirs = seeds.scattered(seeds.EncoderLayer(MODEL, inner, seeds.feed_forward(MODEL, WIDE)))
    x = numbers(BATCH, TOKENS, MODEL)
    tokens = hw.SequenceInfo.from_batch(x, lengths=[TOKENS, 5])
    ours = encoded(theirs, of_four(theirs.self_attn), x, tokens)
    expected = theirs(x, tokens.is_real[:, None])
    check_close(ours[tokens.is_real], expected[tokens.is_real])


def test_decoder_layer():
    parts = [seeds.MultiHeadedAttention(HEADS, MODEL) for _ in range(2)]
    theirs = seeds.scattered(seeds.DecoderLayer(MODEL, *parts, seeds.feed_forward(MODEL, WIDE)))
    x, memory = numbers(BATCH, TOKENS, MODEL), numbers(BATCH, SOURCE, MODEL)
    own, cross = of_four(theirs.self_attn, pattern="causal()"), of_four(theirs.src_attn)
    at = hw.SequenceInfo.from_batch(memory, lengths=[SOURCE, 6])
    n1, n2, n3 = (connection.norm for connection in theirs.sublayer)
    y = x + own(norm(x, n1.a, n1.b, n1.eps))
    y = y + cross(norm(y, n2.a, n2.b, n2.eps), source=cross.project_source(memory, sequence=at))
    y = y + theirs.feed_forward(norm(y, n3.a, n3.b, n3.eps))
    later = torch.ones(1, TOKENS, TOKENS).tril()
    check_close(y, theirs(x, memory, at.is_real[:, None], later))


# --- 003 ------------------------------------------------------------------------------------------


def test_three_axes_and_a_mask_of_three_axes():
    """Their head is a batch row of its own; the same mask for every head, and one row that sees
    nothing.
    """
    spec = hw.design(model=MODEL, heads=HEADS, dim=5, vdim=DIM)
    layer, probe = hw.Attention(spec).double(), hw.Probe("q", "k", "v", "weights", "heads")
    x = numbers(BATCH, TOKENS, MODEL)
    z = numbers(BATCH, SOURCE, MODEL)
    mask = holed(BATCH, TOKENS, SOURCE)
    layer(x, source=z, mask=mask[:, None], probe=probe)
    visible = mask.any(-1)
    for h in range(HEADS):
        q, k, v = (probe.tensors[side][:, :, h] for side in "qkv")
        read, weights = seeds.scaled_dot_product_attention(q, k, v, mask)
        check_close(probe.tensors["heads"][:, :, h][visible], read[visible])
        check_close(probe.tensors["weights"][:, h][visible], weights[visible])
        check_close(read[0, 1], v[0].mean(0))
        assert (probe.tensors["heads"][0, 1, h] == 0).all()
        assert (probe.tensors["weights"][0, h, 1] == 0).all()
        assert read[0, 1].abs().max() > 1e-3
