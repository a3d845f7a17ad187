"""Every preset in every kind of model: it runs, it learns, and decoding from caches is one pass.

Sizes: model 32, 4 heads; vocabularies of 13 and 17; 2 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.models import model_spec as bp

MODEL, ROWS, WORDS, SOURCES = 32, 3, 13, 17
NEW = 6  # tokens generated
SMALL = {"mla": {"project": hw.parts.MLAProjection(rank=8, rope=4), "dim": 6}}


def preset(name: str) -> hw.AttentionSpec:
    return hw.design(preset=name, **({"model": MODEL, "heads": 4} | SMALL.get(name, {})))


def decodable(spec: hw.AttentionSpec) -> hw.AttentionSpec:
    if spec.pattern.tokens_before_decode == 0:
        return spec
    return replace(spec, pattern=hw.patterns.Causal())


def crossed(spec: hw.AttentionSpec) -> hw.AttentionSpec:
    """The same reading of another sequence, where it can be and asks who reads."""
    try:
        if not spec.core.dim:
            return hw.design(model=MODEL, heads=4)
        return replace(spec, pattern=hw.patterns.Full(), source=MODEL)
    except hw.SpecError:
        return hw.design(model=MODEL, heads=4)


def block(spec: hw.AttentionSpec, cross: hw.AttentionSpec | None = None) -> bp.BlockSpec:
    return bp.BlockSpec(spec, cross, bp.FeedForwardSpec(19, "silu", "gated"), bp.NormSpec("rms"))


def stack(name: str, tokens: int, layer: bp.BlockSpec, **options: object) -> bp.StackSpec:
    embedding = bp.EmbeddingSpec(tokens, positions=bp.PositionSpec("sinusoidal"))
    return bp.StackSpec.from_blocks(
        name, MODEL, [layer] * 2, embedding=embedding, norm=bp.NormSpec(), **options
    )


def decoder(spec: hw.AttentionSpec) -> bp.ModelSpec:
    heads = (bp.OutputHeadSpec("tokens", WORDS, table="decoder"),)
    return bp.ModelSpec(
        "small", "decoder", (stack("decoder", WORDS, block(decodable(spec))),), heads
    )


def pair(spec: hw.AttentionSpec) -> bp.ModelSpec:
    encoder = stack("encoder", SOURCES, block(spec))
    return bp.ModelSpec(
        "small",
        "encoder-decoder",
        (encoder, stack("decoder", WORDS, block(decodable(spec), crossed(spec)))),
        (bp.OutputHeadSpec("tokens", WORDS),),
    )


def merged(spec: hw.AttentionSpec) -> bp.ModelSpec:
    """The average of the past in the place of self-attention, where the spec
    can be its other half.
    """
    one = replace(
        block(spec, replace(spec, pattern=hw.patterns.Full())), attention=None, form="merged"
    )
    stacks = (stack("encoder", SOURCES, block(spec)), stack("decoder", WORDS, one))
    return bp.ModelSpec("small", "encoder-decoder", stacks, (bp.OutputHeadSpec("tokens", WORDS),))


def encoder(spec: hw.AttentionSpec) -> bp.ModelSpec:
    heads = (bp.OutputHeadSpec("classes", 5, "mean"), bp.OutputHeadSpec("tokens", WORDS))
    return bp.ModelSpec("small", "encoder", (stack("encoder", WORDS, block(spec)),), heads)


KINDS: dict[str, Callable[[hw.AttentionSpec], bp.ModelSpec]] = {
    "decoder": decoder,
    "encoder-decoder": pair,
    "encoder": encoder,
}
MERGING = ("mha", "entmax")  # specs that a mean can be merged into


def inputs(described: bp.ModelSpec) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randint(0, WORDS, (ROWS, 5))
    return x, {
        "source": torch.randint(0, SOURCES, (ROWS, 6))
    } if described.kind == "encoder-decoder" else {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", hw.PRESETS)
def test_every_preset_learns(name: str, kind: str):
    check_learns(KINDS[kind](preset(name)))


@pytest.mark.parametrize("name", MERGING)
def test_merged_attention_learns(name: str):
    check_learns(merged(preset(name)))


def check_learns(described: bp.ModelSpec) -> None:
    """One step in the direction of the gradient lowers the loss, and the gradient reaches every
    parameter.
    """
    net = hw.build(described, seed=0).double()
    assert {name: tuple(t.shape) for name, t in net.state_dict().items()} == described.shapes()
    x, read = inputs(described)
    head = "tokens"
    expected = torch.randint(0, WORDS, x.shape)

    def loss() -> Tensor:
        return F.cross_entropy(net(x, head=head, **read).flatten(0, 1), expected.flatten())

    before = loss()
    before.backward()
    without = [
        name for name, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ]
    assert [name for name in without if not name.startswith("head.classes")] == []
    with torch.no_grad():
        for p in net.parameters():
            p -= 1e-3 * (0 if p.grad is None else p.grad)
    assert loss() < before


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("name", hw.PRESETS)
def test_every_preset_decodes(name: str, kind: str):
    check_decodes(KINDS[kind](preset(name)))


@pytest.mark.parametrize("name", MERGING)
def test_merged_attention_decodes(name: str):
    check_decodes(merged(preset(name)))


def check_decodes(described: bp.ModelSpec) -> None:
    """From caches, rows of several lengths at once, the same ids as row by row, the whole sequence
    anew each time.
    """
    net = randomised(described)
    x, read = inputs(described)
    lengths = [5, 2, 4]
    memory = net.encode(read["source"]) if read else None
    at = hw.SequenceInfo.from_batch(x, lengths=lengths, pad="left")
    generated = hw.generation.greedy_decode(
        net, x, max_new_tokens=NEW, sequence=at, encoder_output=memory
    )
    alone = []
    for row, length in enumerate(lengths):
        ids, own = (
            x[row : row + 1, 5 - length :],
            {key: value[row : row + 1] for key, value in read.items()},
        )
        with torch.no_grad():
            for _ in range(NEW):
                ids = torch.cat([ids, net(ids, **own)[:, -1:].argmax(-1)], 1)
        alone.append(ids[0, length:].tolist())
    assert generated == alone


def randomised(described: bp.ModelSpec) -> hw.Transformer:
    """A model in float64 whose every number matters, so that its likeliest tokens differ."""
    net = hw.build(described, seed=0).double().eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if not name.endswith("norm.weight"):
                p.copy_(torch.randn(p.shape, dtype=p.dtype) * 0.4)
    return net


@pytest.mark.parametrize("name", ["longformer", "bigbird"])
def test_what_reads_ahead_cannot_decode(name: str):
    spec = preset(name)
    one = stack("decoder", WORDS, block(spec))
    net = hw.build(bp.ModelSpec("small", "decoder", (one,), (bp.OutputHeadSpec("tokens", WORDS),)))
    with pytest.raises(hw.SpecError, match=r"attends to future tokens.*use a causal pattern"):
        hw.generation.greedy_decode(net, torch.tensor([[1, 2]]), max_new_tokens=3)
