"""Small models in which some heads have one function, with weights set by hand, and texts for them.

Tokens and positions are unit vectors in slices of their own, and a third slice is for what heads
copy. Norms are RMS norms and all vectors have equal length, so that norms only scale.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import headwise as hw
from headwise.models import model_spec as bp
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations

WORDS, PLACES, HEADS, DIM = 11, 23, 3, 23
MODEL = WORDS + PLACES + WORDS
TOKEN, PLACE, COPY = slice(0, WORDS), slice(WORDS, WORDS + PLACES), slice(WORDS + PLACES, MODEL)
SHARP = 30.0  # the score of what is looked for, all else being at 0
INDUCED = 6.0  # the size of what the induction head writes
COMMON = torch.tensor(
    [500 - 40 * one for one in range(WORDS)]
)  # how often each id was met: the last is the rarest


def _stack(name: str, pattern: str, layers: int, **options: hw.AttentionSpec) -> bp.StackSpec:
    own = hw.design(model=MODEL, heads=HEADS, dim=DIM, pattern=pattern)
    blocks = [bp.BlockSpec(own, norm=bp.NormSpec("rms"), **options)] * layers
    embedding = bp.EmbeddingSpec(WORDS, positions=bp.PositionSpec("learned", PLACES))
    return bp.StackSpec.from_blocks(name, MODEL, blocks, embedding=embedding)


def _small_random_model(described: bp.ModelSpec) -> hw.Transformer:
    """Unit vectors for tokens and positions; all other parameters small and random."""
    net = hw.build(described, seed=0).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("embedding.tokens"):
                parameter.zero_()[:, TOKEN] = torch.eye(WORDS)
            elif name.endswith("embedding.positions"):
                parameter.zero_()[:, PLACE] = torch.eye(PLACES)
            elif not name.endswith("norm.weight"):
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw))
    return net


def _set_score(net: hw.Transformer, site: str, head: int, q: Tensor, k: Tensor, units: int) -> None:
    """Set the score of a head to SHARP q x . k z, [dim, model] each, where x and z are sums of
    `units` unit vectors.
    """
    named = dict(net.named_parameters())
    rows = slice(head * DIM, (head + 1) * DIM)
    sharp = SHARP * math.sqrt(DIM) * units / MODEL  # undoes the norm of both sides and the scale
    with torch.no_grad():
        named[f"{site}.project.q"][rows] = sharp * q
        named[f"{site}.project.k"][rows] = k


def _map(source: slice, image: Tensor) -> Tensor:
    """[dim, model]: an image [any, slice] of one slice."""
    matrix = torch.zeros(DIM, MODEL)
    matrix[: len(image), source] = image
    return matrix


ANY = torch.ones(1, PLACES)  # of any place 1


def decoder() -> hw.Transformer:
    """Head (0, 0) attends to the previous token and copies it, (0, 1) to the first token, (1, 2) to
    the rarest one.

    (1, 0) attends behind earlier equal tokens and forms an induction pair with (0, 0); (0, 2) and
    (1, 1) are small and random.
    """
    net = _small_random_model(
        bp.ModelSpec(
            "handmade",
            "decoder",
            (_stack("decoder", "causal()", 2),),
            (bp.OutputHeadSpec("tokens", WORDS),),
        )
    )
    behind = torch.eye(PLACES).roll(1, 0)
    behind[0] = 0  # nobody stands behind the last
    _set_score(
        net, "decoder.0.attention", 0, _map(PLACE, torch.eye(PLACES)), _map(PLACE, behind), 2
    )
    _set_score(
        net, "decoder.0.attention", 1, _map(PLACE, ANY), _map(PLACE, torch.eye(PLACES)[:1]), 2
    )
    _set_score(
        net,
        "decoder.1.attention",
        0,
        _map(TOKEN, torch.eye(WORDS)),
        _map(COPY, torch.eye(WORDS)),
        3,
    )
    rarity = torch.arange(WORDS)[None].float()
    _set_score(net, "decoder.1.attention", 2, _map(PLACE, ANY), _map(TOKEN, rarity), 3)
    named = dict(net.named_parameters())
    with torch.no_grad():  # (0, 0) copies the token as a unit vector of the third slice
        value, output = (
            named["decoder.0.attention.project.v"],
            named["decoder.0.attention.output.o"],
        )
        value[:DIM] = _map(TOKEN, torch.eye(WORDS)) * math.sqrt(2 / MODEL)
        output[:, :DIM] = 0
        output[COPY, :WORDS] = torch.eye(WORDS)
    return net


def induction_model() -> hw.Transformer:
    """The hand-set decoder, whose head (1, 0) also copies the token that it attends to.

    (0, 0) writes the previous token into a slice that the keys of (1, 0) read; the queries of
    (1, 0) read the current token. The logits read only what (1, 0) writes.
    """
    net = decoder()
    named = dict(net.named_parameters())
    (head,) = [one for name, one in named.items() if name.startswith("head.") and one.dim() == 2]
    with torch.no_grad():
        value = named["decoder.1.attention.project.v"]
        output = named["decoder.1.attention.output.o"]
        value[:DIM] = 0
        value[:WORDS, TOKEN] = torch.eye(WORDS)
        # the copied token replaces what (0, 0) has written at the last token
        output[:, :DIM] = 0
        output[TOKEN, :WORDS] = INDUCED * torch.eye(WORDS)
        head.zero_()
        head[:, TOKEN] = torch.eye(WORDS)
    return net.double()


def translator() -> hw.Transformer:
    """An encoder and a decoder of one layer; cross head 1 reads the source word of the same id."""
    cross = hw.design(model=MODEL, heads=HEADS, dim=DIM)
    stacks = _stack("encoder", "full()", 1), _stack("decoder", "causal()", 1, cross=cross)
    net = _small_random_model(
        bp.ModelSpec("handmade", "encoder-decoder", stacks, (bp.OutputHeadSpec("tokens", WORDS),))
    )
    _set_score(
        net, "decoder.0.cross", 1, _map(TOKEN, torch.eye(WORDS)), _map(TOKEN, torch.eye(WORDS)), 2
    )
    return net


def _tokens(ids: Tensor) -> TokenAnnotations:
    flags = [torch.zeros(len(ids), dtype=torch.bool) for _ in range(3)]
    return TokenAnnotations(
        ids, tuple(f"w{one}" for one in ids.tolist()), *flags, torch.arange(len(ids)), COMMON[ids]
    )


def texts(count: int, seed: int = 0) -> list[Example]:
    """Texts of random tokens that all begin with the commonest."""
    draw = np.random.default_rng(seed)
    rows = [
        torch.from_numpy(draw.integers(0, WORDS, draw.integers(13, PLACES + 1)))
        for _ in range(count)
    ]
    for ids in rows:
        ids[0] = 0
    return [Example(ids[None], {"text": _tokens(ids)}) for ids in rows]


def translation_pairs(count: int, seed: int = 0) -> list[Example]:
    """Words in one order and in another, with alignment links between equal words."""
    draw, examples = np.random.default_rng(seed), list[Example]()
    for _ in range(count):
        words = int(draw.integers(5, WORDS + 1))
        source = torch.from_numpy(draw.permutation(WORDS)[:words])
        order = torch.from_numpy(draw.permutation(words))
        links = [(int(order[t]), t, bool(draw.random() < 0.8)) for t in range(words)]
        text = source[order]
        streams = {"source": _tokens(source), "text": _tokens(text)}
        examples.append(
            Example({"x": text[None], "source": source[None]}, streams, alignment_links=links)
        )
    return examples
