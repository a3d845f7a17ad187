"""Bytes kept for the way back by what stands around attention: norms, feed-forwards, experts, embeddings, heads.

Each formula says what torch keeps of the plain operations that a blueprint stands for; biases and sums keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..blueprint import FeedForwardSpec, EmbeddingSpec, ExpertsSpec, OutputHeadSpec, NormSpec
from ..errors import SpecError, suggest
from .devices import dtype_bytes
from .symbols import SymbolicInt

if TYPE_CHECKING:
    from .pricing import Workload

NamedBytes = Iterator[tuple[str, int]]
INT64_BYTES = 8  # bytes of an index


class SavedByActivation(NamedTuple):
    """What an activation keeps: so many tensors beside its output, and perhaps its output."""

    num_tensors: int
    saves_output: bool = False


SAVED_BY_ACTIVATION = {
    **dict.fromkeys(("gelu", "gelu_tanh", "silu", "mish", "relu6"), SavedByActivation(1)),
    **dict.fromkeys(("relu", "tanh", "sigmoid"), SavedByActivation(0, saves_output=True)),
    "relu2": SavedByActivation(1),  # relu keeps what it gives, and so does the square of it
    "quick_gelu": SavedByActivation(2),  # x sigmoid(1.7 x): both factors
    "linear": SavedByActivation(0),
}
NUM_BOUNDED_ACTIVATION_TENSORS = 7  # gate and up before and after their bounds, the sigmoid, and the two products


@dataclass(frozen=True)
class ActivationContext:
    """Where a piece runs: rows and tokens, bytes of a number, of a statistic and of a mask, with dropout or without."""

    rows: int
    tokens: int
    element_bytes: int
    statistic_bytes: int
    mask_bytes: int
    is_fused: bool
    has_dropout: bool

    @staticmethod
    def from_workload(load: Workload, tokens: int, profile: str, dropout: float) -> ActivationContext:
        """On CUDA statistics have 4 bytes and masks one; on the CPU both are what the numbers are."""
        each, fused = dtype_bytes(load.dtype), profile == "flash-cuda"
        rows = SymbolicInt.of(load.batch, "b")
        stat, mask = (4, 1) if fused else (each, each)
        return ActivationContext(rows, SymbolicInt.of(tokens, "s"), each, stat, mask, fused, dropout > 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.tokens

    def dropout_mask_bytes(self, count: int, width: int) -> int:
        """The mask of what is dropped, if anything is."""
        return self.mask_bytes * count * width if self.has_dropout else 0


def norm_bytes(described: NormSpec, width: int, count: int, context: ActivationContext) -> NamedBytes:
    """A norm of so many tokens: what it reads, and what it found of each.

    >>> import headwise as hw
    >>> at = ActivationContext.of(hw.Workload(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> [int(size) for _, size in norm_bytes(NormSpec(), 8, at.count, at)]  # 4 b s d, and two numbers of each token
    [640, 160]
    """
    if described.kind in ("layer", "unbiased", "bare"):
        yield "input", context.element_bytes * count * width
        yield "statistics", 2 * context.statistic_bytes * count
        return
    # Composed of plain operations, it keeps x in single precision, and x over its rms too.
    yield "input", (context.element_bytes if context.is_fused else 8) * count * width
    yield "statistics", 4 * count
    if described.kind == "offset":
        yield "weight and one", context.element_bytes * width


def feed_forward_bytes(described: FeedForwardSpec, count: int, context: ActivationContext) -> NamedBytes:
    """A feed-forward on so many tokens, without what it reads.

    >>> import headwise as hw
    >>> at = ActivationContext.of(hw.Workload(2, 10, "fp32"), 10, "sdpa", 0.0)
    >>> [int(size) for _, size in feed_forward_bytes(FeedForwardSpec(32), at.count, at)]  # before and behind the lookup_activation
    [5120]
    """
    wide = context.element_bytes * count * SymbolicInt.of(described.hidden, "hidden")
    yield "inside", _num_hidden_tensors(described, context) * wide
    if context.has_dropout:
        yield "mask", context.dropout_mask_bytes(count, SymbolicInt.of(described.hidden, "hidden"))


def _num_hidden_tensors(described: FeedForwardSpec, at: ActivationContext) -> int:
    """How many tensors as wide as its hidden layer are kept."""
    if described.activation.startswith("bounded_silu("):
        return NUM_BOUNDED_ACTIVATION_TENSORS
    act = lookup_activation(described.activation)
    if described.form == "gated":
        return act.num_tensors + 3  # both factors, and their product, which the last map reads
    return act.num_tensors + 1 + (act.saves_output and at.has_dropout)  # dropped, the output is another than the last map reads


def lookup_activation(name: str) -> SavedByActivation:
    """What the activation of this name keeps."""
    if name not in SAVED_BY_ACTIVATION:
        raise SpecError(f"what activation {name!r} keeps is not known; {suggest(name, SAVED_BY_ACTIVATION)}")
    return SAVED_BY_ACTIVATION[name]


def experts_bytes(described: ExpertsSpec, width: int, context: ActivationContext) -> NamedBytes:
    """A mixture whose tokens are sorted by expert, with what it reads; however they are spread, the sum is the same."""
    count, active = context.num_tokens, SymbolicInt.of(described.active, "active")
    each = SymbolicInt.of(described.count, "expert")
    exact = context.element_bytes == 4
    if exact or described.shared:
        yield "input", context.element_bytes * count * width
    if not exact:
        yield "router", 4 * count * width
        yield "router", 4 * each * width
    yield "scores", 4 * count * each
    yield "chosen", INT64_BYTES * count * active
    if described.scores == "chosen":
        yield "shares", 4 * count * active
    if described.scores == "sigmoid":
        yield "shares", 4 * count * active
        yield "shares", 4 * count
    yield "order", 2 * INT64_BYTES * count * active
    yield "tokens of experts", context.element_bytes * count * active * width
    yield from feed_forward_bytes(described.each, count * active, context)
    yield "outputs", context.element_bytes * count * active * width
    yield "shares", context.element_bytes * count * active
    if described.shared:
        yield from ((f"shared, {name}", size) for name, size in feed_forward_bytes(described.shared, count, context))


def embedding_bytes(described: EmbeddingSpec, width: int, context: ActivationContext) -> NamedBytes:
    """What enters a stack; ids and pixels are given, and nobody keeps them for it."""
    if described.positions and described.positions.kind == "learned":
        yield "positions", INT64_BYTES * context.tokens
    if described.types:
        yield "types", INT64_BYTES
    if described.norm:
        yield from norm_bytes(described.norm, width, context.num_tokens, context)
    if context.has_dropout:
        yield "mask", context.dropout_mask_bytes(context.num_tokens, width)


def head_bytes(described: OutputHeadSpec, width: int, context: ActivationContext) -> NamedBytes:
    """A head and the cross-entropy of what it says, a label for each of its rows."""
    whole = described.at == "each"
    count = context.num_tokens if whole else context.rows
    # A first or last token is kept as what it is a part of; a mean is a tensor of its own, and so is a multiple.
    scaled = described.scale != 1 and not described.transform
    read = context.rows * width if described.at == "mean" or (scaled and not whole) else context.num_tokens * width
    yield "input", context.element_bytes * read
    told = described.transform
    if told:
        hidden = SymbolicInt.of(told.hidden, "transform")
        act = lookup_activation(told.activation)
        # What an activation gives is most often what is read next, and then kept once.
        apart = act.saves_output and not told.norm and (described.scale != 1 or not described.outputs)
        yield "transform", context.element_bytes * (act.num_tensors + apart) * count * hidden
        if told.norm:
            yield from ((f"transform, {name}", size) for name, size in norm_bytes(told.norm, hidden, count, context))
        if described.outputs:
            yield "transform", context.element_bytes * count * hidden
    if not described.outputs:
        return
    outputs = SymbolicInt.of(described.outputs, "output")
    yield "capped", context.element_bytes * count * outputs if described.cap else 0
    yield "log-softmax", context.element_bytes * count * outputs
    yield "its weight", context.element_bytes
