"""Bytes kept for the way back by what stands around attention: norms, feed-forwards, experts, embeddings, heads.

Each formula says what torch keeps of the plain operations that a blueprint stands for; biases and sums keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..blueprint import Dense, Embedding, Experts, Head, Norm
from ..errors import SpecError, nearest
from .devices import bytes_of
from .symbols import Symbol

if TYPE_CHECKING:
    from .pricing import Load

Items = Iterator[tuple[str, int]]
LONG = 8  # bytes of an index


class Act(NamedTuple):
    """What an activation keeps: so many tensors beside its output, and perhaps its output."""

    own: int
    output: bool = False


ACTS = {
    **dict.fromkeys(("gelu", "gelu_tanh", "silu", "mish", "relu6"), Act(1)),
    **dict.fromkeys(("relu", "tanh", "sigmoid"), Act(0, output=True)),
    "relu2": Act(1),  # relu keeps what it gives, and so does the square of it
    "quick_gelu": Act(2),  # x sigmoid(1.7 x): both factors
    "linear": Act(0),
}
BOUNDED = 7  # gate and up before and after their bounds, the sigmoid, and the two products


@dataclass(frozen=True)
class Place:
    """Where a piece runs: rows and tokens, bytes of a number, of a statistic and of a mask, with dropout or without."""

    rows: int
    tokens: int
    each: int
    stat: int
    mask: int
    fused: bool
    dropped: bool

    @staticmethod
    def of(load: Load, tokens: int, profile: str, dropout: float) -> Place:
        """On CUDA statistics have 4 bytes and masks one; on the CPU both are what the numbers are."""
        each, fused = bytes_of(load.dtype), profile == "flash-cuda"
        rows = Symbol.of(load.batch, "b")
        stat, mask = (4, 1) if fused else (each, each)
        return Place(rows, Symbol.of(tokens, "s"), each, stat, mask, fused, dropout > 0)

    @property
    def count(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.tokens

    def drop(self, count: int, width: int) -> int:
        """The mask of what is dropped, if anything is."""
        return self.mask * count * width if self.dropped else 0


def norm(described: Norm, width: int, count: int, at: Place) -> Items:
    """A norm of so many tokens: what it reads, and what it found of each.

    >>> import headwise as hw
    >>> at = Place.of(hw.Load(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> [int(size) for _, size in norm(Norm(), 8, at.count, at)]  # 4 b s d, and two numbers of each token
    [640, 160]
    """
    if described.kind in ("layer", "unbiased", "bare"):
        yield "input", at.each * count * width
        yield "statistics", 2 * at.stat * count
        return
    # Composed of plain operations, it keeps x in single precision, and x over its rms too.
    yield "input", (at.each if at.fused else 8) * count * width
    yield "statistics", 4 * count
    if described.kind == "offset":
        yield "weight and one", at.each * width


def feed(described: Dense, count: int, at: Place) -> Items:
    """A feed-forward on so many tokens, without what it reads.

    >>> import headwise as hw
    >>> at = Place.of(hw.Load(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> [int(size) for _, size in feed(Dense(32), at.count, at)]  # before and behind the activation
    [5120]
    """
    wide = at.each * count * Symbol.of(described.hidden, "hidden")
    yield "inside", _inside(described, at) * wide
    if at.dropped:
        yield "mask", at.drop(count, Symbol.of(described.hidden, "hidden"))


def _inside(described: Dense, at: Place) -> int:
    """How many tensors as wide as its hidden layer are kept."""
    if described.activation.startswith("bounded_silu("):
        return BOUNDED
    act = activation(described.activation)
    if described.form == "gated":
        return act.own + 3  # both factors, and their product, which the last map reads
    return act.own + 1 + (act.output and at.dropped)  # dropped, the output is another than the last map reads


def activation(name: str) -> Act:
    """What the activation of this name keeps."""
    if name not in ACTS:
        raise SpecError(f"what activation {name!r} keeps is not known; {nearest(name, ACTS)}")
    return ACTS[name]


def experts(described: Experts, width: int, at: Place) -> Items:
    """A mixture whose tokens are sorted by expert, with what it reads; however they are spread, the sum is the same."""
    count, active = at.count, Symbol.of(described.active, "active")
    each = Symbol.of(described.count, "expert")
    exact = at.each == 4
    if exact or described.shared:
        yield "input", at.each * count * width
    if not exact:
        yield "router", 4 * count * width
        yield "router", 4 * each * width
    yield "scores", 4 * count * each
    yield "chosen", LONG * count * active
    if described.scores == "chosen":
        yield "shares", 4 * count * active
    if described.scores == "sigmoid":
        yield "shares", 4 * count * active
        yield "shares", 4 * count
    yield "order", 2 * LONG * count * active
    yield "tokens of experts", at.each * count * active * width
    yield from feed(described.each, count * active, at)
    yield "outputs", at.each * count * active * width
    yield "shares", at.each * count * active
    if described.shared:
        yield from ((f"shared, {name}", size) for name, size in feed(described.shared, count, at))


def embedding(described: Embedding, width: int, at: Place) -> Items:
    """What enters a stack; ids and pixels are given, and nobody keeps them for it."""
    if described.positions and described.positions.kind == "learned":
        yield "positions", LONG * at.tokens
    if described.types:
        yield "types", LONG
    if described.norm:
        yield from norm(described.norm, width, at.count, at)
    if at.dropped:
        yield "mask", at.drop(at.count, width)


def head(described: Head, width: int, at: Place) -> Items:
    """A head and the cross-entropy of what it says, a label for each of its rows."""
    whole = described.at == "each"
    count = at.count if whole else at.rows
    # A first or last token is kept as what it is a part of; a mean is a tensor of its own, and so is a multiple.
    scaled = described.scale != 1 and not described.transform
    read = at.rows * width if described.at == "mean" or (scaled and not whole) else at.count * width
    yield "input", at.each * read
    told = described.transform
    if told:
        hidden = Symbol.of(told.hidden, "transform")
        act = activation(told.activation)
        # What an activation gives is most often what is read next, and then kept once.
        apart = act.output and not told.norm and (described.scale != 1 or not described.outputs)
        yield "transform", at.each * (act.own + apart) * count * hidden
        if told.norm:
            yield from ((f"transform, {name}", size) for name, size in norm(told.norm, hidden, count, at))
        if described.outputs:
            yield "transform", at.each * count * hidden
    if not described.outputs:
        return
    outputs = Symbol.of(described.outputs, "output")
    yield "capped", at.each * count * outputs if described.cap else 0
    yield "log-softmax", at.each * count * outputs
    yield "its weight", at.each
