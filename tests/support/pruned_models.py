"""Small models of every kind, texts for them, and heads to keep, for tests of
compression verification reports.
"""

from __future__ import annotations

from typing import Any

import torch

import headwise as hw
from headwise.models import Transformer, model_spec as bp
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations

WORDS = 23


def make_attention(pattern: str = "causal", heads: int = 4, kv: int = 2, **changes: Any) -> Any:
    """An attention over 24 channels."""
    return hw.design(model=24, heads=heads, kv=kv, pattern=pattern, **changes)


def make_model_spec(
    kind: str,
    blocks: int = 2,
    words: int = WORDS,
    modifiers: tuple[Any, ...] = (hw.parts.Rotary(),),
) -> bp.ModelSpec:
    """A model of one kind."""
    feed = bp.FeedForwardSpec(31)
    own = bp.BlockSpec(
        make_attention("causal" if kind == "decoder" else "full", modifiers=modifiers), feed=feed
    )
    patches = bp.PatchSpec(3, 5, 2, 2, channels=1)
    embedding = (
        bp.EmbeddingSpec(patches=patches, first=1) if kind == "vision" else bp.EmbeddingSpec(words)
    )
    heads = (
        (bp.OutputHeadSpec("classes", 7, at="first"),)
        if kind == "vision"
        else (bp.OutputHeadSpec("tokens", words),)
    )
    stacks = (
        bp.StackSpec.from_blocks(
            "encoder" if kind != "decoder" else kind,
            24,
            [own] * blocks,
            embedding=embedding,
            norm=bp.NormSpec(),
        ),
    )
    if kind == "encoder-decoder":
        both = bp.BlockSpec(make_attention(), cross=make_attention("full"), feed=feed)
        stacks += (
            bp.StackSpec.from_blocks(
                "decoder",
                24,
                [both] * blocks,
                embedding=bp.EmbeddingSpec(words),
                norm=bp.NormSpec(),
            ),
        )
    return bp.ModelSpec(f"small {kind}", kind, stacks, heads)


def build_model(described: bp.ModelSpec, seed: int = 0) -> Transformer:
    """The model in single precision, with weights large enough for heads to differ."""
    net = hw.build(described, seed=seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim > 1 and "project" in name:
                parameter.mul_(2.0)
    return net.eval()


def make_examples(kind: str, count: int = 6, words: int = WORDS) -> list[Example]:
    """Texts of several lengths, or labelled images."""
    draw = torch.Generator().manual_seed(5)
    if kind == "vision":
        shape = (1, 1, 6, 10)
        return [
            Example({"x": torch.randn(shape, generator=draw), "labels": torch.tensor([n % 7])}, {})
            for n in range(count)
        ]
    examples = list[Example]()
    for n in range(count):
        text = torch.randint(3, words, (1, 6 + n % 4), generator=draw)
        streams = {"text": _tokens(text[0])}
        inputs = {"x": text}
        if kind == "encoder-decoder":
            inputs["source"] = torch.randint(3, words, (1, 7), generator=draw)
            streams["source"] = _tokens(inputs["source"][0])
        examples.append(Example(inputs, streams))
    return examples


def _tokens(ids: torch.Tensor) -> TokenAnnotations:
    none = torch.zeros(len(ids), dtype=torch.bool)
    return TokenAnnotations(
        ids,
        tuple(map(str, ids.tolist())),
        none,
        none,
        none,
        torch.arange(len(ids)),
        torch.ones(len(ids)),
    )


KEEP = {
    "decoder": {"decoder.0.attention": [1, 2], "decoder.1.attention": [3]},
    "encoder": {"encoder.0.attention": [0, 1, 2], "encoder.1.attention": [2]},
    "encoder-decoder": {
        "encoder.1.attention": [2, 3],
        "decoder.0.cross": [0],
        "decoder.1.attention": [1, 3],
    },
    "vision": {"encoder.0.attention": [0, 3], "encoder.1.attention": [1]},
}
KINDS = tuple(KEEP)
