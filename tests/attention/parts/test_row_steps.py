"""Steps that change all scores of a query together, against renderings of their papers' formulas,
one query at a time, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.interfaces import RowStep
from headwise.attention.masking.sequence_info import SequenceInfo
from support.layer_checks import decode_in_chunks, layer_gradients, saved_bytes

TOKENS, WIDTH, HEADS, DIM = 11, 24, 3, 8
State = Mapping[str, Tensor]


def forgetting_scores(qk: Tensor, x: Tensor, q: Tensor, state: State) -> Tensor:
    """q_i.k_j / sqrt(d) + sum over l = j + 1 .. i of log f_l (2503.02130, section 3)."""
    gates = torch.sigmoid(x @ state["forget_gate.gate"].T + state["forget_gate.bias"])
    scores = qk.clone()
    for i in range(TOKENS):
        for j in range(i):
            scores[:, i, j] += gates[j + 1 : i + 1].log().sum(0)
    return scores


def contextual_scores(qk: Tensor, x: Tensor, q: Tensor, state: State) -> Tensor:
    """q_i.k_j / sqrt(d) + q_i.e[p_ij] (2405.18719, section 4), with the scaled gates and the limit
    of the listing.
    """
    table = state["contextual_positions.embedding"]
    scores = qk.clone()
    for h in range(HEADS):
        for i in range(TOKENS):
            for j in range(i + 1):
                p = sum(1 / (1 + math.exp(-qk[h, i, k].item())) for k in range(j, i + 1))
                p_tensor = torch.sigmoid(qk[h, i, j : i + 1]).sum().clamp(max=len(table) - 1)
                floor = min(math.floor(p), len(table) - 1)
                ceiling = min(math.ceil(p), len(table) - 1)
                if floor == ceiling:
                    embedding = table[floor]
                else:
                    embedding = (p_tensor - floor) * table[ceiling]
                    embedding = embedding + (ceiling - p_tensor) * table[floor]
                scores[h, i, j] += q[i, h] @ embedding
    return scores


def selective_scores(qk: Tensor, x: Tensor, q: Tensor, state: State) -> Tensor:
    """QK^T / sqrt(d) - F with F_ij = sum of S_kj over k < i (2410.02703, section 3): S is the ReLU
    of the first head's causal scores, zero on its diagonal and in its first column.
    """
    scores = qk.clone()
    for i in range(TOKENS):
        for j in range(1, i):
            for k in range(j + 1, i):
                scores[:, i, j] -= qk[0, k, j].clamp(min=0)
    return scores


def convolved_scores(qk: Tensor, x: Tensor, q: Tensor, state: State) -> Tensor:
    """Conv2d of the scores with 0 above the diagonal (2504.00927, section 3), written as its sum;
    the last row and the middle column of a kernel belong to the pair itself.
    """
    kernel = state["key_query_convolution.kernel"]
    c_q, c_k = kernel.shape[1:]
    masked = qk.tril()
    scores = torch.zeros_like(qk)
    for i in range(TOKENS):
        for j in range(i + 1):
            for m in range(c_q):
                for n in range(c_k):
                    row, column = i + m - (c_q - 1), j + n - c_k // 2
                    if row >= 0 and 0 <= column < TOKENS:
                        scores[:, i, j] += kernel[:, m, n] * masked[:, row, column]
    return scores


Formula = Callable[[Tensor, Tensor, Tensor, State], Tensor]
STEPS: dict[str, tuple[RowStep, Formula]] = {
    "ForgetGate": (hw.parts.ForgetGate(), forgetting_scores),
    "ContextualPositions": (hw.parts.ContextualPositions(4), contextual_scores),
    "SelectiveAttention": (hw.parts.SelectiveAttention(), selective_scores),
    "KeyQueryConvolution": (hw.parts.KeyQueryConvolution(3, 5), convolved_scores),
}


def make_layer(name: str, backend: str | None = None) -> hw.Attention:
    spec = hw.design(model=WIDTH, heads=HEADS, pattern="causal", modifiers=(STEPS[name][0],))
    torch.manual_seed(1)
    layer = hw.Attention(spec, backend=backend).double().eval()
    for weight in layer.state_dict().values():
        weight.copy_(torch.randn_like(weight) / 2)
    return layer


def render(layer: hw.Attention, x: Tensor, formula: Formula) -> Tensor:
    """The output [T, D] of a causal layer, each score by a formula."""
    state = dict(layer.named_parameters())
    q, k, v = ((x @ state[f"project.{side}"].T).unflatten(-1, (HEADS, DIM)) for side in "qkv")
    qk = torch.stack([q[:, h] @ k[:, h].T for h in range(HEADS)]) / math.sqrt(DIM)
    scores = formula(qk, x, q, state)
    rows = []
    for i in range(len(x)):
        heads = [scores[h, i, : i + 1].softmax(0) @ v[: i + 1, h] for h in range(HEADS)]
        rows.append(torch.cat(heads) @ state["output.o"].T)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("name", STEPS)
def test_a_layer_and_its_gradients_are_the_formula(name: str, backend: str):
    layer = make_layer(name, backend)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    ours = layer(x[None])[0]
    theirs = render(layer, x, STEPS[name][1])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    expected = layer_gradients(layer, theirs, x)
    for parameter, grad in layer_gradients(layer, ours, x).items():
        torch.testing.assert_close(grad, expected[parameter], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["smallest", "static"])
@pytest.mark.parametrize("name", STEPS)
def test_decoding_with_a_cache_is_the_formula(name: str, kind: str):
    layer = make_layer(name)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    expected = render(layer, x, STEPS[name][1])
    for chunks in [(1,) * TOKENS, (4, 1, 6)]:
        cache = layer.cache(batch=1, capacity=TOKENS + 2, kind=kind)
        ours = decode_in_chunks(layer, x[None], chunks, cache)[0]
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", STEPS)
def test_a_long_text_is_computed_in_linear_memory(name: str):
    layer = make_layer(name, "chunked").float()
    short, long = (saved_bytes(layer, count) for count in (512, 1024))
    layer.backend_name = "dense"
    assert long / short <= 2.2 < 3 < saved_bytes(layer, 1024) / saved_bytes(layer, 512)


@pytest.mark.parametrize("name", ["SelectiveAttention", "KeyQueryConvolution"])
def test_blocks_and_cached_chunks_read_what_is_before_them(name: str):
    layer = make_layer(name, "dense")
    x = torch.randn(2, 300, WIDTH, dtype=torch.float64)
    expected = layer(x)
    layer.backend_name = "chunked"
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-10)
    layer.backend_name = None
    cache = layer.cache(batch=2, capacity=300)
    ours = decode_in_chunks(layer, x, (140, 1, 159), cache)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", [None, "chunked"])
@pytest.mark.parametrize("name", STEPS)
def test_a_fresh_text_beside_one_with_a_cache_reads_its_own_past(name: str, backend: str | None):
    """8 slots for 8 new tokens: as many queries as keys, although a text has earlier tokens."""
    layer = make_layer(name, backend)
    texts = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    cache = layer.cache(batch=2, capacity=8)
    layer(texts[:, :6], sequence=SequenceInfo.from_batch(texts[:, :6], lengths=[6, 0]), cache=cache)
    new = torch.stack([texts[0].roll(2, 0), texts[1]])
    position = torch.stack([torch.tensor([6, 7, 0, 0, 0, 0, 0, 0]), torch.arange(8)])
    segment = torch.tensor([[0] * 2 + [-1] * 6, [0] * 8])
    ours = layer(new, sequence=SequenceInfo(position, segment), cache=cache)
    expected = layer(texts)
    torch.testing.assert_close(ours[0, :2], expected[0, 6:], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", STEPS)
def test_a_mask_of_the_caller_hides_tokens_also_from_the_step(name: str):
    """As if the hidden tokens were not there."""
    layer = make_layer(name, "dense")
    x = torch.randn(1, 140, WIDTH, dtype=torch.float64)
    real = torch.arange(140) >= 3
    mask = real.expand(1, 1, 140, 140)
    position = torch.arange(140)[None] - 3
    expected = layer(x, sequence=SequenceInfo(position.clamp(min=0), real.long()[None] - 1))
    torch.testing.assert_close(layer(x, mask=mask)[:, 3:], expected[:, 3:], rtol=1e-9, atol=1e-10)


def test_positions_out_of_order_are_refused():
    for preset in ("forgetting", "cope", "selective", "mta", "stick_breaking"):
        layer = hw.Attention(hw.design(preset=preset, model=WIDTH, heads=HEADS))
        x = torch.randn(1, 4, WIDTH)
        layer(x, sequence=SequenceInfo(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]])))
        fallen = SequenceInfo(torch.tensor([[0, 2, 1, 3]]), torch.zeros(1, 4, dtype=torch.long))
        for sequence in (fallen, fallen.to("cpu"), fallen.rows(slice(0, 1))):
            with pytest.raises(ValueError, match="sort the tokens of each segment by position"):
                layer(x, sequence=sequence)


@pytest.mark.parametrize("name", STEPS)
def test_a_mask_for_each_head(name: str):
    layer = make_layer(name, "dense")
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    mask = torch.rand(1, HEADS, TOKENS, TOKENS) < 0.8
    if name in ("SelectiveAttention", "KeyQueryConvolution"):
        with pytest.raises(ValueError, match=f"{name} needs one mask for all heads"):
            layer(x, mask=mask)
        return
    scores = hw.Probe("scores")
    layer(x, mask=mask, probe=scores)
    for head in range(HEADS):
        own = hw.Probe("scores")
        layer(x, mask=mask[:, head : head + 1], probe=own)
        expected = own.tensors["scores"][:, head]
        torch.testing.assert_close(scores.tensors["scores"][:, head], expected)


@pytest.mark.parametrize("depth", [0, 7])
def test_the_norm_of_multi_token_attention_shrinks_with_depth(depth: int):
    spec = hw.design(preset="mta", model=WIDTH, heads=HEADS).at_depth(depth, 8)
    modifiers = (*spec.modifiers[:-1], hw.parts.HeadNorm())
    layer = hw.Attention(spec).double()
    plain = hw.Attention(replace(spec, modifiers=modifiers)).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    initial_lambda = 0.8 - 0.6 * math.exp(-0.3 * depth)
    torch.testing.assert_close(layer(x), (1 - initial_lambda) * plain(x))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "later keys": ({"pattern": "full()"}, "later keys"),
    "a source": ({"pattern": "causal()", "source": WIDTH}, "leave source out"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_refuses_keys_without_order(name: str, case: str):
    options, reason = REFUSED[case]
    with pytest.raises(hw.SpecError, match=reason):
        hw.design(model=WIDTH, heads=HEADS, modifiers=(STEPS[name][0],), **options)


@pytest.mark.parametrize("name", ["SelectiveAttention", "KeyQueryConvolution"])
def test_a_step_over_raw_scores_refuses_what_it_is_not_defined_for(name: str):
    step = STEPS[name][0]
    words: dict[str, Any] = {"model": WIDTH, "heads": HEADS}
    with pytest.raises(hw.SpecError, match=r"unlike in window\(4\)|window\(4\) may hide"):
        hw.design(**words, pattern="window(4)", modifiers=(step,))
    with pytest.raises(hw.SpecError, match="write it before Softcap"):
        hw.design(**words, pattern="causal", modifiers=(hw.parts.Softcap(5.0), step))
    assert hw.design(**words, pattern="causal", modifiers=(step, hw.parts.Softcap(5.0)))


def test_a_convolution_starts_as_plain_attention():
    words: dict[str, Any] = {"model": WIDTH, "heads": HEADS, "pattern": "causal"}
    layer = hw.Attention(hw.design(**words, modifiers=(hw.parts.KeyQueryConvolution(),))).double()
    plain = hw.Attention(hw.design(**words)).double()
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))
    with pytest.raises(hw.SpecError, match="has no middle key"):
        hw.design(**words, modifiers=(hw.parts.KeyQueryConvolution(keys=4),))


def test_a_head_that_selects_is_kept_for_the_others():
    spec = hw.design(
        model=WIDTH, heads=HEADS, pattern="causal", modifiers=(STEPS["SelectiveAttention"][0],)
    )
    assert spec.required_score_heads(2) == {0, 2}
