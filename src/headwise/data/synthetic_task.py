"""Base class of tasks that generate their examples in code, and the small models for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..interfaces.part import CheckedDataclass, find_class
from ..masking.pattern_base import check_whole_number
from ..masking.patterns import Pattern
from ..model_spec import (
    BlockSpec,
    ConvolutionSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    RecurrentSpec,
    StackSpec,
)
from ..ops.counter_rng import Ints, RandomStreams, RandomWords
from ..presets import design
from ..size_limits import MAX_HEADS, MAX_WIDTH
from .task import IGNORE_INDEX, SPLITS, Batch, MetricSums, Task, check_split

# Arrays with one row per example. "content" [B, n] identifies an example, padded with -1; the
# optional "fits" [B] is False for attempts that must not be used.
ExampleArrays = dict[str, np.ndarray]

MIN_DISTINCT_EXAMPLES = 500  # with fewer distinct examples than this a split could be nearly empty
MAX_ATTEMPTS = 2**17  # draws for one example before `batch` gives up
MAX_SIZE = 2**16  # upper limit for examples in a batch, tokens in an example, and vocabulary sizes
MAX_DRAWN_CELLS = 2**20  # upper limit for the entries of "content" that are drawn in one call
HOLDOUT_PARTS = (
    8  # the hash of the content modulo this is 0 for validation, 1 for test, else training
)
HASH_MULTIPLIER, HASH_MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, repr=False)
class SyntheticTask(CheckedDataclass, Task):
    """Base class of generated tasks: example number n of a split is the same for every batch size.

    A hash of its content assigns each example to one split, independently of the seed. Examples are
    drawn until one belongs to the requested split. An example that was trained on under one seed is
    therefore never a held-out example under another.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise SpecError(f"seed={self.seed} has more than 64 bits; use one below 2**64")

    @abstractmethod
    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        """Draw one candidate for each example; `random` holds one stream per example."""

    @abstractmethod
    def to_batch(self, examples: ExampleArrays) -> Batch:
        """Model inputs and labels of drawn examples."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        """Examples index * size to (index + 1) * size - 1 of the split."""
        check_split(split)
        check_whole_number("index", index, 0)
        first = index * check_whole_number("size", size, 1)
        if size > MAX_SIZE:
            raise SpecError(
                f"size={size} examples are too many for one batch; use at most {MAX_SIZE}"
            )
        if first + size > 2**63:
            raise SpecError(
                f"index={index} with {size} examples is beyond example 2**63; use a smaller index"
            )
        return self.to_batch(self._examples_of_split(np.arange(first, first + size), split))

    def _examples_of_split(self, numbers: Ints, split: str) -> ExampleArrays:
        """For each example number the first attempt that belongs to the split."""
        examples: ExampleArrays = {}
        pending = np.arange(len(numbers))  # rows that have no example yet
        first_attempt = 0
        attempts = 1 if split == "train" else HOLDOUT_PARTS  # drawn per pending row in one call
        while len(pending):
            if first_attempt >= MAX_ATTEMPTS:
                raise SpecError(
                    f"{self!r} generates almost no examples for the split {split!r}; allow more "
                    "different examples"
                )
            row = np.repeat(pending, attempts)
            attempt = np.tile(np.arange(first_attempt, first_attempt + attempts), len(pending))
            candidates = self.draw_examples(
                RandomStreams(self.seed, SPLITS.index(split), numbers[row], attempt)
            )
            usable = (assign_splits(candidates["content"]) == SPLITS.index(split)) & candidates.pop(
                "fits", True
            )
            usable = usable.reshape(len(pending), attempts)
            has_usable = usable.any(1)
            first_usable = np.flatnonzero(has_usable) * attempts + usable.argmax(1)[has_usable]
            for name, values in candidates.items():
                examples.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))
                examples[name][pending[has_usable]] = values[first_usable]
            pending, first_attempt = pending[~has_usable], first_attempt + attempts
            max_attempts = MAX_DRAWN_CELLS // max(1, len(pending) * candidates["content"].shape[1])
            attempts = max(1, min(2 * attempts, max_attempts))
        return examples


def hash_rows(content: Ints) -> RandomWords:
    """64-bit hash of each row, which depends on its entries and their order; trailing -1 (padding)
    has no effect.

    >>> a, b, c = hash_rows(np.array([[3, 1, -1], [1, 3, -1], [3, 1, -1]]))
    >>> a == c, a == b, a == hash_rows(np.array([[3, 1]]))[0]
    (np.True_, np.False_, np.True_)
    """
    place = np.arange(1, content.shape[1] + 1, dtype=np.uint64) * HASH_MULTIPLIER
    mixed = _mix_bits(_mix_bits(content.astype(np.uint64) + place) + place)
    return _mix_bits(np.where(content < 0, np.uint64(0), mixed).sum(1, dtype=np.uint64))


def _mix_bits(x: RandomWords) -> RandomWords:
    x = (x ^ (x >> np.uint64(33))) * HASH_MIXER
    return x ^ (x >> np.uint64(29))


def assign_splits(content: Ints) -> Ints:
    """Split of each row as its index in SPLITS: one row in eight is in "valid", one in eight in
    "test".
    """
    remainder = (hash_rows(content) >> np.uint64(20)) % np.uint64(HOLDOUT_PARTS)
    return np.select([remainder == 0, remainder == 1], [1, 2], 0)


def check_num_examples(task: Task, count: float, remedy: str) -> None:
    """Raise SpecError if a task has too few different examples for three splits."""
    if count < MIN_DISTINCT_EXAMPLES:
        raise SpecError(
            f"{task!r} has {count:.0f} different examples, too few for three splits; {remedy}"
        )


def check_sizes(task: Task, **sizes: int) -> None:
    """Raise SpecError if examples or vocabularies exceed MAX_SIZE, which would
    exhaust the memory.
    """
    for name, size in sizes.items():
        if size > MAX_SIZE:
            raise SpecError(
                f"{task!r} has {size} {name}, which is too many; use at most {MAX_SIZE}"
            )


def parse_sizes(name: str, value: int | tuple[int, ...], minimum: int) -> tuple[int, ...]:
    """The sizes that an option allows: a single one, or a tuple from which each example draws one.

    >>> parse_sizes("pairs", 4, 1), parse_sizes("pairs", (4, 8), 1)
    ((4,), (4, 8))
    """
    sizes = value if isinstance(value, tuple) else (value,)
    if not sizes:
        raise SpecError(f"{name}=() is empty; give at least one number")
    return tuple(
        check_whole_number(name if len(sizes) == 1 else f"each of {name}", size, minimum)
        for size in sizes
    )


def sum_by_slice(
    name: str, correct: Tensor, has_label: Tensor, slices: Mapping[str, Tensor]
) -> MetricSums:
    """Sum and count of `correct` where there is a label, overall and per slice: "accuracy",
    "accuracy@D=8".

    Empty slices are left out.

    >>> correct, has_label = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, True, False])
    >>> sum_by_slice("accuracy", correct, has_label, {"D=4": torch.tensor([True, False, True])})
    {'accuracy': (1.0, 2), 'accuracy@D=4': (1.0, 1)}
    """
    masks = {name: has_label} | {
        f"{name}@{label}": has_label & mask for label, mask in slices.items()
    }
    counts = {label: int(mask.sum()) for label, mask in masks.items()}
    return {
        label: (float(correct[mask].double().sum()), counts[label])
        for label, mask in masks.items()
        if counts[label] or label == name
    }


def find_correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Two masks: where the argmax is the label, and where there is a label."""
    has_label = labels != IGNORE_INDEX
    return (logits.argmax(-1) == labels) & has_label, has_label


def find_correct_rows(correct: Tensor, has_label: Tensor) -> Tensor:
    """Mask of rows whose labelled positions are all correct, which greedy generation would
    therefore solve as well.
    """
    return (correct | ~has_label).all(1)


def slice_by_value(name: str, values: Sequence[int], like: Tensor) -> dict[str, Tensor]:
    """A mask "name=value" for every value that occurs, of shape [B], or [B, 1] if `like` has two
    axes.
    """
    value_of_row = torch.tensor(values, device=like.device)
    value_of_row = value_of_row[:, None] if like.dim() == 2 else value_of_row
    return {f"{name}={value}": value_of_row == value for value in sorted(set(values))}


def slice_by_power_of_two(name: str, values: Tensor) -> dict[str, Tensor]:
    """Masks by powers of two: "name<=8" selects the values 5 to 8.

    >>> slice_by_power_of_two("t", torch.tensor([1, 2, 3, 4]))
    {'t<=1': tensor([ True, False, False, False]), 't<=2': ... 't<=4': tensor([False, False,  True,  True])}
    """
    largest = int(values.max())
    bound, masks = 1, {}
    while bound // 2 < largest:
        masks[f"{name}<={bound}"] = (values <= bound) & (values > bound // 2)
        bound *= 2
    return masks


# --- Specs of small models, which learn the synthetic tasks within minutes ------------------------


POSITIONS = ("rotary", "sinusoidal", "none")
NETWORKS = {  # and the kinds of models that can have them
    "transformer": ("decoder", "encoder", "encoder-decoder"),
    "gru": ("decoder",),
    "conv": ("decoder",),
    "conv-dilated": ("decoder",),
    "gru-fixed": ("encoder-decoder",),
    "gru-additive": ("encoder-decoder",),
    "gru-dot": ("encoder-decoder",),
}
MAX_LAYERS = 1 << 10  # of a small model
CONVOLUTION_KERNEL = 4  # as many parameters as self-attention


@dataclass(frozen=True, repr=False)
class ModelShape(CheckedDataclass):
    """Size of a small model: channels, attention heads, layers, and feed-forward width (0 for no
    feed-forward).

    positions="rotary" rotates queries and keys, so that the model also accepts longer sequences
    than those of training; "sinusoidal" adds positions to the embedding; "none" uses no positions.

    network="transformer" has self-attention. The others replace it by what needs no positions.
    Decoders: "gru" is a gated recurrent unit, "conv" a causal convolution of 4 tokens,
    "conv-dilated" one whose tokens are 4 times further apart in every layer (1609.03499).
    Encoder-decoders have a gated recurrent unit: in "gru-fixed" the decoder starts from the
    encoder's last state and reads nothing else of the source (1406.1078), in "gru-additive" it also
    has additive cross-attention (1409.0473), in "gru-dot" scaled dot-product cross-attention.
    Attention comes after the recurrence, as in 1508.04025, so all positions are trained at once.
    """

    width: int
    heads: int
    layers: int
    feed: int = 0
    positions: str = "rotary"
    network: str = "transformer"

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges = {
            "width": (1, MAX_WIDTH),
            "heads": (1, MAX_HEADS),
            "layers": (1, MAX_LAYERS),
            "feed": (0, MAX_WIDTH),
        }
        self.check_fields(ranges, {"positions": POSITIONS, "network": NETWORKS})

    def blocks(self, pattern: str | Pattern, cross: str = "") -> list[BlockSpec]:
        """The pre-norm blocks of a stack; `cross` is the pattern of their cross-attention, if they
        have one.
        """
        if self.network != "transformer":
            return [self._mixer_block(cross, depth) for depth in range(self.layers)]
        modifiers = (find_class("Rotary")(),) if self.positions == "rotary" else ()
        self_attention = design(
            model=self.width, heads=self.heads, pattern=pattern, modifiers=modifiers
        )
        cross_attention = (
            design(model=self.width, heads=self.heads, pattern=cross) if cross else None
        )
        feed = FeedForwardSpec(self.feed, "gelu", bias="ud") if self.feed else None
        return [BlockSpec(self_attention, cross_attention, feed)] * self.layers

    def _mixer_block(self, cross: str, depth: int) -> BlockSpec:
        attention = None
        if cross and self.network != "gru-fixed":
            similarity = find_class("Additive" if self.network == "gru-additive" else "Dot")()
            attention = design(
                model=self.width, heads=self.heads, pattern=cross, similarity=similarity
            )
        feed = FeedForwardSpec(self.feed, "gelu", bias="ud") if self.feed else None
        mixer = RecurrentSpec("source" if cross else "zeros")
        if self.network.startswith("conv"):
            dilation = CONVOLUTION_KERNEL**depth if self.network == "conv-dilated" else 1
            mixer = ConvolutionSpec(CONVOLUTION_KERNEL, dilation)
        return BlockSpec(cross=attention, feed=feed, mixer=mixer)

    def embedding(self, vocab_size: int, table: str = "") -> EmbeddingSpec:
        """Token embedding; `table` names the stack to share weights with."""
        has_positions = self.positions == "sinusoidal" and self.network == "transformer"
        positions = PositionSpec("sinusoidal") if has_positions else None
        return EmbeddingSpec(vocab_size, positions=positions, table=table)


def make_small_decoder(name: str, vocab_size: int, shape: ModelShape) -> ModelSpec:
    """A causal decoder with an output per position; embedding and output weights are not tied."""
    stack = _make_stack("decoder", vocab_size, shape, "causal()")
    return ModelSpec(name, "decoder", (stack,), (OutputHeadSpec("tokens", vocab_size),))


def make_small_encoder(
    name: str,
    vocab_size: int,
    shape: ModelShape,
    head: OutputHeadSpec,
    pattern: str | Pattern = "full()",
) -> ModelSpec:
    """An encoder with `head` on top; `pattern` is the attention pattern of every layer."""
    return ModelSpec(
        name, "encoder", (_make_stack("encoder", vocab_size, shape, pattern),), (head,)
    )


def make_small_translator(name: str, vocab_size: int, shape: ModelShape) -> ModelSpec:
    """Encoder and decoder of the same depth; both embeddings and the output share one table
    (1706.03762).
    """
    source = _make_stack("encoder", vocab_size, shape, "full()")
    embedding = shape.embedding(vocab_size, table="encoder")
    target = StackSpec.from_blocks(
        "decoder",
        shape.width,
        shape.blocks("causal()", "full()"),
        embedding=embedding,
        norm=NormSpec(),
    )
    return ModelSpec(
        name,
        "encoder-decoder",
        (source, target),
        (OutputHeadSpec("tokens", vocab_size, table="encoder"),),
    )


def _make_stack(name: str, tokens: int, shape: ModelShape, pattern: str | Pattern) -> StackSpec:
    return StackSpec.from_blocks(
        name, shape.width, shape.blocks(pattern), embedding=shape.embedding(tokens), norm=NormSpec()
    )
