"""`MultiHeadAttention` against the published formula, and `MultiheadAttention` against torch's
class.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.attention import MultiHeadAttention, MultiheadAttention

B, T, S, D, H = 2, 5, 7, 24, 4


def published(
    layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Concat(head_1 ... head_h) W^O with head_i = softmax(Q_i K_i^T / sqrt(d_k)) V_i, head by head
    (1706.03762).
    """
    dim = D // layer.heads
    heads: list[Tensor] = []
    for i in range(layer.heads):
        own, shared = slice(i * dim, (i + 1) * dim), i // (layer.heads // layer.kv_heads)
        kv = slice(shared * dim, (shared + 1) * dim)
        q = query @ layer.query.weight[own].T + layer.query.bias[own]
        k = key @ layer.key.weight[kv].T + layer.key.bias[kv]
        v = value @ layer.value.weight[kv].T + layer.value.bias[kv]
        scores = q @ k.transpose(1, 2) / dim**0.5
        heads.append(
            (scores if mask is None else scores.masked_fill(mask == 0, -torch.inf)).softmax(-1) @ v
        )
    return torch.cat(heads, -1) @ layer.output.weight.T + layer.output.bias


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_three_sequences_give_what_the_paper_defines(kv_heads: int, masked: bool):
    torch.manual_seed(0)
    layer = MultiHeadAttention(D, H, kv_heads=kv_heads).double()
    query, key, value = torch.randn(B, T, D), torch.randn(B, S, D), torch.randn(B, S, D)
    query, key, value = query.double(), key.double(), value.double()
    mask = (torch.rand(B, 1, S) > 0.3).int() if masked else None
    output = layer(query, key, value, mask, need_weights=True)
    torch.testing.assert_close(
        output, published(layer, query, key, value, mask), rtol=1e-8, atol=1e-9
    )
    assert layer.attn is not None
    assert layer.attn.shape == (B, H, T, S)
    torch.testing.assert_close(layer.attn.sum(-1).double(), torch.ones(B, H, T).double())
    layer(query, key, value)
    assert layer.attn is None


def both(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's layer and ours with the same weights."""
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(D, H, **options), MultiheadAttention(D, H, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)  # biases too
    ours.load_state_dict(theirs.state_dict())
    return theirs.double(), ours.double()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
]


WIDTHS = ({}, {"kdim": 6}, {"vdim": 10}, {"kdim": 6, "vdim": 10})
FLAGS = ("bias", "add_bias_kv", "add_zero_attn", "batch_first")


def draw_arguments(seed: int) -> tuple[dict[str, Any], list[Tensor], dict[str, Any]]:
    """Options of the class, inputs and arguments of a call; each seed draws all of them anew."""
    generator = torch.Generator().manual_seed(seed)

    def choose(options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    options: dict[str, Any] = choose(WIDTHS) | {flag: choose((True, False)) for flag in FLAGS}
    batch, queries, keys, batched = (
        choose((1, B)),
        choose((1, T)),
        choose((1, S)),
        choose((True, True, False)),
    )
    batch = batch if batched else 1
    widths = D, options.get("kdim", D), options.get("vdim", D)
    inputs = [
        normal(batch, n, width) for n, width in zip((queries, keys, keys), widths, strict=True)
    ]
    inputs = [
        x[0] if not batched else x if options["batch_first"] else x.transpose(0, 1) for x in inputs
    ]
    padding, mask = torch.zeros(batch, keys), torch.zeros(batch * H, queries, keys)
    padding[0, keys // 2 + 1 :] = 1  # the first key stays, so that torch gives no NaN
    mask = torch.rand(mask.shape, generator=generator) < 0.3
    mask[..., 0] = False
    mask = choose((mask, mask[0], None))
    call: dict[str, Any] = {
        "need_weights": choose((True, False)),
        "average_attn_weights": choose((True, False)),
    }
    is_added = choose((True, False))
    if mask is not None:
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf) + normal(
            *mask.shape
        )
        call["attn_mask"] = added if is_added else mask
    if choose((True, False)):
        padding = padding if batched else padding[0]
        added = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(
            padding.bool(), -torch.inf
        )
        call["key_padding_mask"] = added if is_added else padding.bool()
    return options, inputs, call


@pytest.mark.parametrize("start", [0, 40])
def test_any_arguments_give_outputs_weights_and_gradients_of_torch(start: int):
    for seed in range(start, start + 40):
        options, inputs, call = draw_arguments(seed)
        layers, results = both(**options), []
        for layer in layers:
            own = [tensor.clone().requires_grad_() for tensor in inputs]
            output, weights = layer(*own, **call)
            (
                output.square().sum() + (0 if weights is None else weights.double().square().sum())
            ).backward()
            gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
            results.append((output, weights, [tensor.grad for tensor in own], gradients))
        (theirs, their_weights, *their_gradients), (ours, our_weights, *our_gradients) = results
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert (our_weights is None) == (their_weights is None)
        if our_weights is not None:
            torch.testing.assert_close(our_weights.double(), their_weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(our_gradients, their_gradients, rtol=1e-5, atol=1e-6)


def test_the_drawn_arguments_cover_every_choice():
    drawn = [draw_arguments(seed) for seed in range(80)]
    for flag in FLAGS:
        assert {options[flag] for options, _, _ in drawn} == {True, False}
    for name in ("attn_mask", "key_padding_mask"):
        masks = [call.get(name) for _, _, call in drawn]
        assert {None if mask is None else mask.dtype for mask in masks} == {
            None,
            torch.bool,
            torch.float64,
        }
    assert {call["attn_mask"].dim() for _, _, call in drawn if "attn_mask" in call} == {2, 3}
    assert {inputs[0].dim() for _, inputs, _ in drawn} == {2, 3}
    assert {(options.get("kdim"), options.get("vdim")) for options, _, _ in drawn} == set(
        itertools.product((None, 6), (None, 10))
    )


@pytest.mark.slow
def test_inputs_of_the_own_tests_of_torch_give_its_results():
    script = Path(__file__).parent / "torch_module_inputs.py"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) == 128  # 64 inputs in two dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_in_each_dtype_are_those_of_torch(dtype: torch.dtype):
    theirs, ours = (layer.to(dtype) for layer in both(batch_first=True))
    x = torch.randn(B, T, D).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    (expected, expected_weights), (output, weights) = theirs(x, x, x), ours(x, x, x)
    assert output.dtype == expected.dtype == dtype
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights.to(dtype), expected_weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(0, T, S), (B, 0, S)])
def test_empty_batches_and_queries_are_those_of_torch(shape: tuple[int, int, int]):
    theirs, ours = both(batch_first=True)
    batch, queries, keys = shape
    query, key = torch.randn(batch, queries, D).double(), torch.randn(batch, keys, D).double()
    for expected, result in zip(theirs(query, key, key), ours(query, key, key), strict=True):
        torch.testing.assert_close(result.double(), expected)


def test_weights_load_in_both_directions():
    for options in OPTIONS:
        theirs, ours = both(**options)
        assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == {
            name: tensor.shape for name, tensor in theirs.state_dict().items()
        }
        again = nn.MultiheadAttention(D, H, **options).double()
        again.load_state_dict(ours.state_dict())
        assert all(
            torch.equal(tensor, theirs.state_dict()[name])
            for name, tensor in again.state_dict().items()
        )


def test_a_transformer_of_torch_runs_with_our_layers():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True)
    x = torch.randn(B, T, D)
    expected = block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True)
    ours = MultiheadAttention(D, H, batch_first=True)
    ours.load_state_dict(block.self_attn.state_dict())
    block.self_attn = ours
    output = block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
