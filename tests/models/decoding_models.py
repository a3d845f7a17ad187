"""Small random models in float64 that generate text."""

from __future__ import annotations

from typing import Any

import torch

import headwise as hw
from headwise.models import model_spec as bp

MODEL, WORDS, SOURCES = 32, 11, 13


CAUSAL = hw.design(model=MODEL, heads=4, kv=1, pattern="causal()")


FULL = hw.design(model=MODEL, heads=4)


def make_stack(name: str, tokens: int, *blocks: bp.BlockSpec, positions: int = 0) -> bp.StackSpec:
    """A stack of these blocks with token embedding and positions."""
    places = bp.PositionSpec("learned", positions) if positions else bp.PositionSpec("sinusoidal")
    return bp.StackSpec.from_blocks(
        name,
        MODEL,
        blocks,
        embedding=bp.EmbeddingSpec(tokens, positions=places),
        norm=bp.NormSpec(),
    )


def decoder_spec(
    spec: hw.AttentionSpec = CAUSAL, words: int = WORDS, positions: int = 0
) -> bp.ModelSpec:
    """A decoder of two blocks."""
    block = bp.BlockSpec(spec, feed=bp.FeedForwardSpec(17))
    return bp.ModelSpec(
        "small",
        "decoder",
        (make_stack("decoder", words, block, block, positions=positions),),
        (bp.OutputHeadSpec("tokens", words),),
    )


def encoder_decoder_spec(words: int = WORDS) -> bp.ModelSpec:
    """An encoder-decoder of one block each."""
    first = make_stack("encoder", SOURCES, bp.BlockSpec(FULL, feed=bp.FeedForwardSpec(17)))
    second = make_stack("decoder", words, bp.BlockSpec(CAUSAL, FULL, bp.FeedForwardSpec(17)))
    return bp.ModelSpec(
        "pair", "encoder-decoder", (first, second), (bp.OutputHeadSpec("tokens", words),)
    )


def build_random(described: bp.ModelSpec, **usage: Any) -> hw.Transformer:
    """The model in float64 with all parameters random, so that no two tokens are equally likely."""
    net = hw.build(described, seed=0).double().eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm." not in name:
                p.copy_(torch.randn(p.shape, dtype=p.dtype) * 0.5)
    net.usage = hw.ProcessorSpec(**usage)
    return net
