"""Layer-wise relevance propagation: rules by hand, conservation through whole
models, and refusals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.models import model_spec as bp
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.head_importance import estimate_importance
from headwise.observe.head_analysis.lrp import (
    ALPHA,
    BETA,
    STABILISER,
    RelevanceForward,
    attention_read,
    linear,
    propagate,
    sum_terms,
    why_no_relevance,
)
from headwise.observe.inspect.model_inputs import prepare_inputs
from support.importance_examples import (
    BERT,
    GPT2,
    LLAMA,
    WORDS,
    build_model,
    make_examples,
    random_ids,
    translator,
    with_uneven_attention,
)
from support.tiny_configs import model_config


def labelled(at: str) -> Any:
    """An encoder that says one of five classes of a text."""
    block = bp.BlockSpec(
        hw.design(model=12, heads=3),
        feed=bp.FeedForwardSpec(20, "silu", form="gated"),
        placement="sandwich",
    )
    stack = bp.StackSpec.from_blocks("encoder", 12, [block] * 2, embedding=bp.EmbeddingSpec(WORDS))
    head = bp.OutputHeadSpec(
        "class", 5, at=at, bias="learned", transform=bp.HeadTransformSpec(7), cap=3.0, scale=0.5
    )
    return with_uneven_attention(
        hw.build(bp.ModelSpec("small", "encoder", (stack,), (head,)), seed=0)
    )


NETS = {
    "pre": build_model(GPT2),
    "post, masked": build_model(BERT),
    "gated, grouped": build_model(LLAMA),
    "two stacks": translator(),
    "two stacks, post": translator(placement="post"),
    "first": labelled("first"),
    "mean": labelled("mean"),
    "last": labelled("last"),
    "parallel_two_norms": build_model(
        {
            "model_type": "gpt_neox",
            "hidden_size": 12,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "intermediate_size": 20,
            "vocab_size": WORDS,
            "rotary_pct": 0.5,
        }
    ),
    "parallel": build_model(
        model_config("gptj", n_embd=12, n_head=3, n_layer=2, vocab_size=WORDS, rotary_dim=2)
    ),
}


def divided(contributions: np.ndarray, relevance: float) -> np.ndarray:
    """The rule for one output, one contribution at a time (1905.09418)."""
    positive = sum(c for c in contributions if c > 0)
    negative = sum(c for c in contributions if c < 0)
    return np.array(
        [
            relevance
            * (ALPHA * c / (positive + STABILISER) if c > 0 else BETA * c / (negative - STABILISER))
            for c in contributions
        ]
    )


def scaled(found: list[np.ndarray], total: float) -> list[np.ndarray]:
    came = sum(one.sum() for one in found)
    return [one * total / came for one in found]


def received(out: torch.Tensor, relevance: np.ndarray, *inputs: torch.Tensor) -> list[np.ndarray]:
    return [one.numpy() for one in propagate(out, torch.from_numpy(relevance), inputs)]


def values(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).requires_grad_()


# --- rules ----------------------------------------------------------------------------------------


def test_a_linear_map_divides_relevance_by_the_rule(monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(0)
    x, weight, bias, result = (
        draw.normal(size=(3, 5)),
        draw.normal(size=(2, 5)),
        draw.normal(size=2),
        draw.random((3, 2)),
    )
    expected = np.zeros((3, 5))
    for t in range(3):
        for o in range(2):
            expected[t] += divided(weight[o] * x[t] + bias[o] / 5, result[t, o])
    (expected,) = scaled([expected], result.sum())
    for cells in (10, 2**22):  # a token at a time, and all at once
        monkeypatch.setattr("headwise.observe.head_analysis.lrp.MAX_CELLS", cells)
        tokens = values(x)
        with torch.no_grad():
            out = linear(tokens, torch.from_numpy(weight), torch.from_numpy(bias))
        np.testing.assert_allclose(out.detach(), x @ weight.T + bias)
        np.testing.assert_allclose(*received(out, result, tokens), expected, rtol=1e-10)


def test_reading_divides_among_tokens_and_heads_that_share_values():
    draw = np.random.default_rng(1)
    w, v, result = draw.normal(size=(3, 2, 5)), draw.normal(size=(5, 2, 4)), draw.random((2, 3, 4))
    reads, expected = (0, 1, 1), np.zeros((5, 2, 4))
    for h, t, c in np.ndindex(3, 2, 4):
        expected[:, reads[h], c] += divided(w[h, t] * v[:, reads[h], c], result[t, h, c])
    tokens = values(v)
    with torch.no_grad():
        out = attention_read(tokens, torch.from_numpy(w), reads)
    np.testing.assert_allclose(out.detach(), np.einsum("hts,shc->thc", w, v[:, list(reads)]))
    (expected,) = scaled([expected], result.sum())
    np.testing.assert_allclose(*received(out, result, tokens), expected, rtol=1e-10)


def test_a_sum_divides_among_its_terms():
    a, b, result = (
        np.array([[1.0, -2.0, 3.0]]),
        np.array([[3.0, -1.0, -1.0]]),
        np.array([[0.5, 0.25, 0.25]]),
    )
    own = [divided(np.array([x, y]), r) for x, y, r in zip(a[0], b[0], result[0], strict=True)]
    expected = scaled([np.array([one[0] for one in own]), np.array([one[1] for one in own])], 1.0)
    terms = [values(a), values(b)]
    with torch.no_grad():
        out = sum_terms(*terms)
    for found, share in zip(received(out, result, *terms), expected, strict=True):
        np.testing.assert_allclose(found[0], share, rtol=1e-10)


def test_relevance_without_inputs_is_refused():
    tokens = values(np.zeros((2, 3)))
    with torch.no_grad():
        out = linear(tokens, torch.ones(4, 3))
    with pytest.raises(ValueError, match="all inputs of an operation are zero"):
        received(out, np.ones((2, 4)), tokens)


def follow(
    net: Any, inputs: dict[str, torch.Tensor]
) -> tuple[RelevanceForward, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A run, and the relevance of its stacks' inputs and of its heads."""
    through = RelevanceForward(net, prepare_inputs(net, inputs, 0))
    found = []
    for named in (through.stack_inputs, through.head_outputs):
        relevance = through.relevance_of(list(named.values()))
        found.append(dict(zip(named, relevance, strict=True)))
    return through, found[0], found[1]


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(NETS))
def test_relevance_is_conserved(name: str):
    net = NETS[name]
    inputs = make_examples(net)[0].inputs
    result = net(**inputs).detach()
    through, stacks, heads = follow(net, inputs)
    torch.testing.assert_close(through.out, result.view_as(through.out))
    shares = [float(one.sum()) for one in stacks.values()]
    assert sum(shares) == pytest.approx(1, rel=1e-6)
    assert set(heads) == {site.name for site in hw.sites(net)}
    assert all(bool((one >= 0).all()) for one in heads.values())
    assert len(shares) == 1 or all(0.01 < share < 0.99 for share in shares)


def test_a_layer_by_hand():
    """One attention of two heads over two tokens, a residual, a head over words: every step in
    numpy.
    """
    block = bp.BlockSpec(hw.design(model=4, heads=2), placement="post", norm=bp.NormSpec("rms"))
    stack = bp.StackSpec.from_blocks("encoder", 4, [block], embedding=bp.EmbeddingSpec(WORDS))
    net = with_uneven_attention(
        hw.build(
            bp.ModelSpec("one", "encoder", (stack,), (bp.OutputHeadSpec("tokens", WORDS),)), seed=0
        )
    )
    text = random_ids(0, 2)
    probe = hw.Probe("weights", "heads")
    own = {name: value.detach().numpy() for name, value in net.named_parameters()}
    x = own["encoder.embedding.tokens"][text[0]]
    net.encoder.get_submodule("0").attentions["attention"](torch.from_numpy(x)[None], probe=probe)
    w, z = probe.tensors["weights"][0].detach().numpy(), probe.tensors["heads"][0].detach().numpy()
    y = z.reshape(2, 4) @ own["encoder.0.attention.output.o"].T
    h = (x + y) / np.sqrt(((x + y) ** 2).mean(-1, keepdims=True) + 1e-5)
    words = own["head.tokens.weight"]
    top = (h @ words.T).argmax(-1)

    back = scaled([np.stack([divided(words[top[t]] * h[t], 0.5) for t in range(2)])], 1.0)[
        0
    ]  # an rms hands it on
    both = np.array(
        [[divided(np.array([x[t, d], y[t, d]]), back[t, d]) for d in range(4)] for t in range(2)]
    )
    straight, result = scaled([both[..., 0], both[..., 1]], 1.0)
    o = own["encoder.0.attention.output.o"]
    pairs = [sum(divided(o[d] * z[t].ravel(), result[t, d]) for d in range(4)) for t in range(2)]
    (heads,) = scaled([np.stack(pairs)], result.sum())
    through, stacks, found = follow(net, {"x": text})
    np.testing.assert_allclose(through.out, h @ words.T, rtol=1e-9)
    np.testing.assert_allclose(found["encoder.0.attention"].reshape(2, 4), heads, rtol=1e-9)
    v = x @ own["encoder.0.attention.project.v"].T
    read = np.zeros((2, 4))
    for t, c in np.ndindex(2, 4):
        read[:, c] += divided(w[c // 2, t] * v[:, c], heads[t, c])
    (read,) = scaled([read], heads.sum())
    project = own["encoder.0.attention.project.v"]
    pairs = [sum(divided(project[c] * x[t], read[t, c]) for c in range(4)) for t in range(2)]
    (tokens,) = scaled([np.stack(pairs)], read.sum())
    np.testing.assert_allclose(stacks["encoder"], straight + tokens, rtol=1e-9)


def test_shares_of_a_site_add_up_to_one():
    net = translator()
    result = estimate_importance(net, make_examples(net, 3), method="lrp")
    assert result.objective == "largest logit"
    assert "constants" in result.notes[0]
    for site in hw.sites(net):
        shares = [one.value for one in result.heads if one.site == site.name]
        assert len(shares) == site.heads
        assert sum(shares) == pytest.approx(1)


# --- refusals -------------------------------------------------------------------------------------


def refused(net: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - what it says is given back
        estimate_importance(
            net, [Example({"x": random_ids(n)}, {}) for n in range(2)], method="lrp"
        )
    return str(caught.value)


def one_block(block: bp.BlockSpec, *heads: bp.OutputHeadSpec) -> Any:
    stack = bp.StackSpec.from_blocks("decoder", 12, [block], embedding=bp.EmbeddingSpec(WORDS))
    return with_uneven_attention(
        hw.build(
            bp.ModelSpec(
                "odd", "decoder", (stack,), heads or (bp.OutputHeadSpec("tokens", WORDS),)
            ),
            seed=0,
        )
    )


def test_unsupported_models_are_refused():
    own = hw.design(model=12, heads=3)
    mixed = hw.design(model=12, heads=3, modifiers=[hw.parts.HeadGate()])
    assert "is more than a weighted sum of values" in refused(one_block(bp.BlockSpec(mixed)))
    experts = bp.ExpertsSpec(bp.FeedForwardSpec(7), count=3, top_k=2)
    assert "is a mixture of experts" in refused(one_block(bp.BlockSpec(own, feed=experts)))
    stack = bp.StackSpec.from_blocks(
        "encoder", 12, [bp.BlockSpec(own)], embedding=bp.EmbeddingSpec(WORDS)
    )
    bare = with_uneven_attention(hw.build(bp.ModelSpec("bare", "encoder", (stack,)), seed=0))
    assert "bare has no output head" in refused(bare)
    assert "it needs a headwise model, not Linear" in why_no_relevance(torch.nn.Linear(2, 2))
