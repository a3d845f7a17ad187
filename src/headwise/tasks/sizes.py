"""Models of a size that suits data: what a task over files proposes."""

from __future__ import annotations

from ..blueprint import EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PatchSpec, StackSpec
from .small import Shape

USUAL = Shape(width=128, heads=4, layers=4, feed=512)
PATCHES = 64  # about how many an image is divided into


def decoder(vocab: int) -> ModelSpec:
    """Four layers, 128 wide, with one table of tokens at both ends.

    >>> from headwise import counting
    >>> counting.params(decoder(65))  # 65 d + 4 (12 d^2 + 9 d) + 2 d, for d = 128
    799616
    """
    blocks, embedding = USUAL.blocks("causal()"), EmbeddingSpec(vocab)
    stack = StackSpec.from_blocks("decoder", USUAL.width, blocks, embedding=embedding, norm=NormSpec())
    return ModelSpec("text", "decoder", (stack,), (OutputHeadSpec("tokens", vocab, table="decoder"),))


def translator(vocabs: tuple[int, int], width: int, layers: int, table: str) -> ModelSpec:
    """An encoder and a decoder of so many layers, heads 32 wide; table="one" of tokens for all, or "two".

    >>> translator((11, 11), 64, 2, "one").ties()
    {'decoder.embedding.tokens': 'encoder.embedding.tokens', 'head.tokens.weight': 'encoder.embedding.tokens'}
    """
    shape, own = Shape(width, width // 32, layers, 4 * width), "encoder" if table == "one" else ""
    read, said = EmbeddingSpec(vocabs[0]), EmbeddingSpec(vocabs[1], table=own)
    stacks = (
        StackSpec.from_blocks("encoder", width, shape.blocks("full()"), embedding=read, norm=NormSpec()),
        StackSpec.from_blocks("decoder", width, shape.blocks("causal()", "full()"), embedding=said, norm=NormSpec()),
    )
    return ModelSpec("translator", "encoder-decoder", stacks, (OutputHeadSpec("tokens", vocabs[1], table=own or "decoder"),))


def classifier(name: str, embedding: EmbeddingSpec, classes: int, at: str, kind: str = "encoder") -> ModelSpec:
    """Four layers, 128 wide, that read all of an example and say its class, or that of each of its tokens."""
    stack = StackSpec.from_blocks("encoder", USUAL.width, USUAL.blocks("full()"), embedding=embedding, norm=NormSpec())
    return ModelSpec(name, kind, (stack,), (OutputHeadSpec("classes", classes, at, bias="learned"),))


def patched(high: int, wide: int, channels: int) -> PatchSpec:
    """An image in about 64 square patches, none cut off where a size divides it evenly.

    >>> patched(28, 28, 1)
    Patches(rows=7, columns=7, high=4, wide=4, channels=1)
    """
    least = max(1, round((high * wide / PATCHES) ** 0.5))
    even = [size for size in range(least, 2 * least + 1) if high % size == 0 and wide % size == 0]
    size = min([*even, least][0], high, wide)
    return PatchSpec(high // size, wide // size, size, size, channels)
