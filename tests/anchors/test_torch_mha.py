"""torch.nn.MultiheadAttention with our weights: outputs, weights and every gradient, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

B, T, S = 2, 7, 11
HEADS, DIM, SOURCE = 3, 5, 13
MODEL = HEADS * DIM
EXACT = {"rtol": 0.0, "atol": 1e-12}
BIASES = {True: "qkvo", False: ""}
assert_close = torch.testing.assert_close


def theirs_like(
    *, heads: int = HEADS, bias: bool = True, source: int | None = None
) -> nn.MultiheadAttention:
    """Their module in float64, every number drawn anew: theirs start with biases of zero."""
    other = nn.MultiheadAttention(
        heads * DIM, heads, bias=bias, kdim=source, vdim=source, batch_first=True
    ).double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return other


def by_our_names(other: nn.MultiheadAttention, gradients: bool = False) -> dict[str, Tensor]:
    """Their parameters, or the gradients of these, under the names of our state dict."""

    def tensor_of(parameter: Tensor) -> Tensor:
        found = parameter.grad if gradients else parameter.detach()
        if found is None:
            raise ValueError("a parameter of nn.MultiheadAttention got no gradient")
        return found

    fused = other.in_proj_weight is not None
    separate = (other.q_proj_weight, other.k_proj_weight, other.v_proj_weight)
    weights = (
        tensor_of(other.in_proj_weight).chunk(3)
        if fused
        else [tensor_of(weight) for weight in separate]
    )
    named = dict(zip(("project.q", "project.k", "project.v"), weights, strict=True))
    named["output.o"] = tensor_of(other.out_proj.weight)
    if other.in_proj_bias is not None:
        biases = tensor_of(other.in_proj_bias).chunk(3)
        named |= dict(
            zip(("project.q_bias", "project.k_bias", "project.v_bias"), biases, strict=True)
        )
        named["output.o_bias"] = tensor_of(other.out_proj.bias)
    return named


def ours_like(other: nn.MultiheadAttention, **options: object) -> hw.Attention:
    """Our layer with their weights."""
    bias = BIASES[other.in_proj_bias is not None]
    spec = hw.design(model=other.embed_dim, heads=other.num_heads, bias=bias, **options)
    layer = hw.Attention(spec).double()
    layer.load_state_dict(by_our_names(other))
    return layer


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check_same_gradients(
    ours: Tensor, theirs: Tensor, layer: hw.Attention, other: nn.MultiheadAttention
) -> None:
    """The same random reading of both outputs, back to every parameter."""
    reading = numbers(*ours.shape)
    (ours * reading).sum().backward()
    (theirs * reading).sum().backward()
    got = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert_close(got, by_our_names(other, gradients=True), rtol=0.0, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pattern", ["full()", "causal()"])
def test_self_attention(bias: bool, pattern: str):
    other = theirs_like(bias=bias)
    layer = ours_like(other, pattern=pattern)
    x = numbers(B, T, MODEL)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) if pattern == "causal()" else None
    theirs, _ = other(x, x, x, attn_mask=hidden)
    ours = layer(x)
    assert_close(ours, theirs, **EXACT)
    check_same_gradients(ours, theirs, layer, other)


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_of_another_width(bias: bool):
    other = theirs_like(bias=bias, source=SOURCE)
    layer = ours_like(other, source=SOURCE)
    x, z = numbers(B, T, MODEL), numbers(B, S, SOURCE)
    theirs, _ = other(x, z, z)
    ours = layer(x, source=z)
    assert_close(ours, theirs, **EXACT)
    check_same_gradients(ours, theirs, layer, other)


def test_a_source_is_remembered_once():
    other = theirs_like(source=SOURCE)
    layer = ours_like(other, source=SOURCE)
    x, z = numbers(B, T, MODEL), numbers(B, S, SOURCE)
    lengths = torch.tensor([S, 5])
    padded = torch.arange(S) >= lengths[:, None]
    theirs, _ = other(x, z, z, key_padding_mask=padded)
    sequence = layer.project_source(z, sequence=hw.SequenceInfo.from_batch(z, lengths=lengths))
    steps = [layer(x[:, t : t + 1], source=sequence) for t in range(T)]
    assert_close(torch.cat(steps, 1), theirs, **EXACT)


def test_weights_of_every_head():
    other = theirs_like()
    layer, probe = ours_like(other, pattern="causal()"), hw.Probe("weights")
    x = numbers(B, T, MODEL)
    hidden = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
    _, weights = other(x, x, x, attn_mask=hidden, average_attn_weights=False)
    layer(x, probe=probe)
    assert weights.shape == (B, HEADS, T, T)
    assert_close(probe.tensors["weights"], weights, **EXACT)


@pytest.mark.parametrize("per_head", [False, True])
def test_boolean_mask(per_head: bool):
    """Theirs says what is hidden, ours what may be read."""
    other = theirs_like(source=SOURCE)
    layer, probe = ours_like(other, source=SOURCE), hw.Probe("weights")
    x, z = numbers(B, T, MODEL), numbers(B, S, SOURCE)
    hidden = torch.rand(B, HEADS, T, S) < 0.5 if per_head else torch.rand(1, 1, T, S) < 0.5
    hidden[..., 3] = False
    theirs, weights = other(
        x,
        z,
        z,
        attn_mask=hidden.flatten(0, 1) if per_head else hidden[0, 0],
        average_attn_weights=False,
    )
    ours = layer(x, source=z, mask=~hidden)
    assert_close(ours, theirs, **EXACT)
    check_same_gradients(ours, theirs, layer, other)
    layer(x, source=z, mask=~hidden, probe=probe)
    assert_close(probe.tensors["weights"], weights, **EXACT)


@pytest.mark.parametrize("pattern", ["full()", "causal()"])
def test_key_padding(pattern: str):
    other = theirs_like()
    layer = ours_like(other, pattern=pattern)
    x, lengths = numbers(B, T, MODEL), [T, 4]
    live = torch.arange(T) < torch.tensor(lengths)[:, None]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) if pattern == "causal()" else None
    theirs, _ = other(x, x, x, key_padding_mask=~live, attn_mask=hidden)
    ours = layer(x, sequence=hw.SequenceInfo.from_batch(x, lengths=lengths))
    assert_close(ours[live], theirs[live], **EXACT)
    # padding reads nothing
    assert_close(ours[~live], layer.output["o_bias"].expand(T - 4, -1), **EXACT)
    check_same_gradients(ours[live], theirs[live], layer, other)


def test_nothing_to_read_is_nan_there_and_the_bias_here():
    other = theirs_like(source=SOURCE)
    layer = ours_like(other, source=SOURCE)
    x, z = numbers(B, T, MODEL), numbers(B, S, SOURCE)
    lengths = torch.tensor([S, 0])
    theirs, _ = other(x, z, z, key_padding_mask=torch.arange(S) >= lengths[:, None])
    sequence = layer.project_source(z, sequence=hw.SequenceInfo.from_batch(z, lengths=lengths))
    probe = hw.Probe("weights")
    assert theirs[1].isnan().all()
    # fused, then weight by weight
    for ours in (layer(x, source=sequence), layer(x, source=sequence, probe=probe)):
        assert_close(ours[1], layer.output["o_bias"].expand(T, -1), **EXACT)
        assert_close(ours[0], theirs[0], **EXACT)
        ours.sum().backward(retain_graph=True)
    assert (probe.tensors["weights"][1] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_their_fast_path_agrees(monkeypatch: pytest.MonkeyPatch):
    """In evaluation, without gradients and with an even number of heads, theirs runs one fused
    operator.
    """
    other = theirs_like(heads=4).eval()
    layer = ours_like(other).eval()
    fused, calls = torch._native_multi_head_attention, []

    def counted(*args: object, **named: object) -> object:
        calls.append(len(args))
        return fused(*args, **named)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    x, lengths = numbers(B, T, 4 * DIM), torch.tensor([T, 4])
    live = torch.arange(T) < lengths[:, None]
    with torch.no_grad():
        theirs, _ = other(x, x, x, need_weights=False)
        padded, _ = other(x, x, x, key_padding_mask=~live, need_weights=False)
        assert len(calls) == 2
        assert_close(layer(x), theirs, **EXACT)
        assert_close(
            layer(x, sequence=hw.SequenceInfo.from_batch(x, lengths=lengths))[live],
            padded[live],
            **EXACT,
        )
