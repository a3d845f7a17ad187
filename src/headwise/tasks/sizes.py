"""Models of a size that suits data: what a task over files proposes."""

from __future__ import annotations

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Patches, Stack
from ..presets import design
from ..spec import AttentionSpec

WIDTH, HEADS, LAYERS = 128, 4, 4
PATCHES = 64  # about how many an image is divided into


def _attention(width: int, heads: int, pattern: str) -> AttentionSpec:
    return design(preset="gqa", model=width, heads=heads, kv=heads, pattern=pattern)


def _blocks(width: int, heads: int, layers: int, pattern: str, cross: AttentionSpec | None = None) -> list[Block]:
    return [Block(_attention(width, heads, pattern), cross=cross, feed=Dense(4 * width))] * layers


def decoder(vocab: int) -> Model:
    """Four layers, 128 wide, with one table of tokens at both ends.

    >>> from headwise import counting
    >>> counting.params(decoder(65))  # 65 d + 4 (12 d^2 + 4 d) + 2 d, for d = 128
    797056
    """
    stack = Stack.of(
        "decoder", WIDTH, _blocks(WIDTH, HEADS, LAYERS, "causal()"), embedding=Embedding(vocab), norm=Norm()
    )
    return Model("text", "decoder", (stack,), (Head("tokens", vocab, table="decoder"),))


def translator(vocabs: tuple[int, int], width: int, layers: int, table: str) -> Model:
    """An encoder and a decoder of so many layers, heads 32 wide; table="one" of tokens for all, or "two".

    >>> translator((11, 11), 64, 2, "one").ties()
    {'decoder.embedding.tokens': 'encoder.embedding.tokens', 'head.tokens.weight': 'encoder.embedding.tokens'}
    """
    heads, own = width // 32, "encoder" if table == "one" else ""
    cross = design(model=width, heads=heads, source=width)
    source, target = vocabs
    encoder = _blocks(width, heads, layers, "full()")
    decoding = _blocks(width, heads, layers, "causal()", cross)
    stacks = (
        Stack.of("encoder", width, encoder, embedding=Embedding(source), norm=Norm()),
        Stack.of("decoder", width, decoding, embedding=Embedding(target, table=own), norm=Norm()),
    )
    return Model("translator", "encoder-decoder", stacks, (Head("tokens", target, table=own or "decoder"),))


def classifier(name: str, embedding: Embedding, classes: int, at: str, kind: str = "encoder") -> Model:
    """Four layers, 128 wide, that read all of an example and say its class, or that of each of its tokens."""
    blocks = _blocks(WIDTH, HEADS, LAYERS, "full()")
    stack = Stack.of("encoder", WIDTH, blocks, embedding=embedding, norm=Norm())
    return Model(name, kind, (stack,), (Head("classes", classes, at, bias="learned"),))


def patched(high: int, wide: int, channels: int) -> Patches:
    """An image in about 64 square patches, none cut off where a size divides it evenly.

    >>> patched(28, 28, 1)
    Patches(rows=7, columns=7, high=4, wide=4, channels=1)
    """
    least = max(1, round((high * wide / PATCHES) ** 0.5))
    even = [size for size in range(least, 2 * least + 1) if high % size == 0 and wide % size == 0]
    size = min([*even, least][0], high, wide)
    return Patches(high // size, wide // size, size, size, channels)
