"""Base class of tasks that generate their examples in code, and the small models for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...attention.interfaces.part import CheckedDataclass, find_class
from ...attention.masking.patterns import Pattern
from ...attention.masking.sequence_info import SequenceInfo
from ...attention.presets import design
from ...kernels.counter_rng import Ints, RandomStreams, RandomWords
from ...kernels.devices import to_float64
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import (
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
from ...util.errors import SpecError
from ...util.size_limits import MAX_HEADS, MAX_WIDTH, check_whole_number
from .task import SPLITS, MetricSums, Task, check_split

# Arrays with one row per example. "content" [B, n] identifies an example, padded with -1; the
# optional "fits" [B] is False for attempts that must not be used, "length" [B] cuts rows.
ExampleArrays = dict[str, np.ndarray]
Ranges = Mapping[str, tuple[int, int]]
Choices = Mapping[str, Collection[str]]

MIN_DISTINCT_EXAMPLES = 500  # with fewer distinct examples than this a split could be nearly empty
MAX_ATTEMPTS = 2**17  # draws for one example before `batch` gives up
MAX_SIZE = 2**16  # upper limit for examples in a batch, tokens in an example, and vocabulary sizes
MAX_DRAWN_CELLS = 2**20  # upper limit for the entries of "content" that are drawn in one call
HOLDOUT_PARTS = 8  # hash of the content modulo this: 0 for validation, 1 for test, else training
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
HASH_MIXER = np.uint64(0xFF51AFD7ED558CCD)


# --- Specs of small models, which learn the synthetic tasks within minutes ------------------------


POSITIONS = ("rotary", "sinusoidal", "none")
NETWORKS = {  # and the kinds of models that can have them
    "transformer": ("decoder", "encoder", "encoder-decoder"),
    "gru": ("decoder",),
    "conv": ("decoder",),
    "conv-dilated": ("decoder",),
    "conv-first": ("decoder",),
    "gru-fixed": ("encoder-decoder",),
    "gru-additive": ("encoder-decoder",),
    "gru-dot": ("encoder-decoder",),
}
WITH_ATTENTION = ("transformer", "conv-first")  # networks whose self-attention is kept
MAX_LAYERS = 1 << 10  # of a small model
CONVOLUTION_KERNEL = 4  # as many parameters as self-attention


@dataclass(frozen=True, repr=False)
class ModelShape(CheckedDataclass):
    """Size of a small model: channels, attention heads, layers, and feed-forward width (0 for no
    feed-forward).

    positions="rotary" rotates queries and keys, so that the model also accepts longer sequences
    than in training; "sinusoidal" adds positions to the embedding; "none" uses no positions.

    network="transformer" has self-attention. The others replace it by what needs no positions.
    Decoders: "gru" is a gated recurrent unit, "conv" a causal convolution of 4 tokens,
    "conv-dilated" one with tokens 4 times further apart in every layer (1609.03499). "conv-first"
    replaces it in the first layer only, by "conv".
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
        """Return the pre-norm blocks of a stack; `cross` is the pattern of their cross-attention,
        if any.
        """
        if self.network not in WITH_ATTENTION:
            return [self._mixer_block(cross, depth) for depth in range(self.layers)]
        modifiers = (find_class("Rotary")(),) if self.positions == "rotary" else ()
        attention = design(model=self.width, heads=self.heads, pattern=pattern, modifiers=modifiers)
        cross_attention = None
        if cross:
            cross_attention = design(model=self.width, heads=self.heads, pattern=cross)
        blocks = [BlockSpec(attention, cross_attention, self._feed)] * self.layers
        return (
            [self._mixer_block(cross, 0), *blocks[1:]] if self.network == "conv-first" else blocks
        )

    @property
    def _feed(self) -> FeedForwardSpec | None:
        return FeedForwardSpec(self.feed, "gelu", bias="ud") if self.feed else None

    def _mixer_block(self, cross: str, depth: int) -> BlockSpec:
        attention = None
        if cross and self.network != "gru-fixed":
            similarity = find_class(
                "Additive" if self.network == "gru-additive" else "DotProduct"
            )()
            attention = design(
                model=self.width, heads=self.heads, pattern=cross, similarity=similarity
            )
        mixer = RecurrentSpec("source" if cross else "zeros")
        if self.network.startswith("conv"):
            dilation = CONVOLUTION_KERNEL**depth if self.network == "conv-dilated" else 1
            mixer = ConvolutionSpec(CONVOLUTION_KERNEL, dilation)
        return BlockSpec(cross=attention, feed=self._feed, mixer=mixer)

    def embedding(self, vocab_size: int, table: str = "") -> EmbeddingSpec:
        """Token embedding; `table` names the stack to share weights with."""
        has_positions = self.positions == "sinusoidal" and self.network in WITH_ATTENTION
        positions = PositionSpec("sinusoidal") if has_positions else None
        return EmbeddingSpec(vocab_size, positions=positions, table=table)

    def stack(
        self, name: str, embedding: EmbeddingSpec, pattern: str | Pattern, cross: str = ""
    ) -> StackSpec:
        """Return a stack of these blocks on an embedding, with a norm at its end."""
        blocks = self.blocks(pattern, cross)
        return StackSpec.from_blocks(name, self.width, blocks, embedding=embedding, norm=NormSpec())


def make_small_decoder(name: str, vocab_size: int, shape: ModelShape, table: str = "") -> ModelSpec:
    """Make a causal decoder with outputs per position; table="decoder" ties embedding and
    output.
    """
    stack = shape.stack("decoder", shape.embedding(vocab_size), "causal()")
    head = OutputHeadSpec("tokens", vocab_size, table=table)
    return ModelSpec(name, "decoder", (stack,), (head,))


def make_small_encoder(
    name: str,
    vocab_size: int,
    shape: ModelShape,
    head: OutputHeadSpec,
    pattern: str | Pattern = "full()",
) -> ModelSpec:
    """Make an encoder with `head` on top; `pattern` is the attention pattern of every layer."""
    stack = shape.stack("encoder", shape.embedding(vocab_size), pattern)
    return ModelSpec(name, "encoder", (stack,), (head,))


def make_small_translator(
    name: str, vocab_size: int, shape: ModelShape, source_vocab: int = 0
) -> ModelSpec:
    """Encoder and decoder of the same depth; both embeddings and the output share one table.

    With `source_vocab` the source has a separate vocabulary and table (1706.03762).

    >>> make_small_translator("t", 11, ModelShape(64, 2, 2)).tied_weights()
    {'decoder.embedding.tokens': 'encoder.embedding.tokens', 'head.tokens.weight':
    'encoder.embedding.tokens'}
    """
    table = "" if source_vocab else "encoder"
    source = shape.stack("encoder", shape.embedding(source_vocab or vocab_size), "full()")
    embedding = shape.embedding(vocab_size, table=table)
    target = shape.stack("decoder", embedding, "causal()", "full()")
    head = OutputHeadSpec("tokens", vocab_size, table=table or "decoder")
    return ModelSpec(name, "encoder-decoder", (source, target), (head,))


# --- Tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SyntheticTask(CheckedDataclass, Task):
    """Base class of generated tasks: example number n of a split is the same for every batch size.

    A hash of its content assigns each example to one split, independently of the seed. Examples are
    drawn until one belongs to the requested split, so an example that was trained on under one seed
    is never held out under another.

    A task declares the `ranges` and `choices` of its fields, and the `shape` of its model.
    """

    ranges: ClassVar[Ranges] = {}
    choices: ClassVar[Choices] = {}
    shape: ClassVar[ModelShape] = ModelShape(width=64, heads=4, layers=2, feed=128)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields({"seed": (0, 2**64 - 1), **self.ranges}, self.choices)

    def check_extent(self, tokens: int, num_examples: float, remedy: str) -> None:
        """Raise SpecError for sizes that exhaust the memory, and for too few different examples."""
        for name, size in {"tokens": tokens, "symbols": self.num_ids}.items():
            if size > MAX_SIZE:
                raise SpecError(f"{self!r} has {size} {name}, too many; use at most {MAX_SIZE}")
        if num_examples < MIN_DISTINCT_EXAMPLES:
            raise SpecError(
                f"{self!r} has {num_examples:.0f} different examples, too few for three splits; "
                f"{remedy}"
            )

    # --- Examples ---

    @abstractmethod
    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        """Draw one candidate for each example; `random` holds one stream per example."""

    def to_batch(self, examples: ExampleArrays) -> Batch:
        """Batch of the arrays "x" and "labels", cut after the longest row, with annotations."""
        x = torch.from_numpy(examples["x"])
        labels = torch.from_numpy(examples["labels"])
        tokens = None
        if "length" in examples:
            length = examples["length"]
            x = x[:, : length.max()].clamp(min=0)
            labels = labels[:, : length.max()]
            if (length != length[0]).any():
                tokens = SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        rows = zip(*examples.values(), strict=True)
        gold = [self.annotate(dict(zip(examples, row, strict=True))) for row in rows]
        return Batch(x, labels, tokens, gold=gold if gold[0] is not None else ())

    def annotate(self, example: Mapping[str, np.ndarray]) -> Any:
        """Return what is known about the structure of one example, or None."""
        return None

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        """Examples index * size to (index + 1) * size - 1 of the split."""
        check_split(split)
        check_whole_number("index", index, 0)
        first = index * check_whole_number("size", size, 1)
        if size > MAX_SIZE:
            raise SpecError(f"size={size} is too large for one batch; use at most {MAX_SIZE}")
        if first + size > 2**63:
            raise SpecError(f"index={index} is beyond example 2**63; use a smaller index")
        return self.to_batch(self._examples_of_split(np.arange(first, first + size), split))

    def _examples_of_split(self, numbers: Ints, split: str) -> ExampleArrays:
        """For each example number the first attempt that belongs to the split."""
        examples: ExampleArrays = {}
        part = SPLITS.index(split)
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
            candidates = self.draw_examples(RandomStreams(self.seed, part, numbers[row], attempt))
            usable = (assign_splits(candidates["content"]) == part) & candidates.pop("fits", True)
            usable = usable.reshape(len(pending), attempts)
            has_usable = usable.any(1)
            first_usable = np.flatnonzero(has_usable) * attempts + usable.argmax(1)[has_usable]
            for name, values in candidates.items():
                examples.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))
                examples[name][pending[has_usable]] = values[first_usable]
            pending = pending[~has_usable]
            first_attempt += attempts
            max_attempts = MAX_DRAWN_CELLS // max(1, len(pending) * candidates["content"].shape[1])
            attempts = max(1, min(2 * attempts, max_attempts))
        return examples

    # --- Metrics and model ---

    @property
    @abstractmethod
    def num_ids(self) -> int:
        """Size of the vocabulary."""

    @property
    def num_answers(self) -> int:
        """Number of answers that a guesser chooses from."""
        return self.num_ids

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Labels of each kind of row; empty if rows are not scored as a whole."""
        return ()

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of guessing any answer."""
        accuracy = 1 / self.num_answers
        if not self.row_lengths:
            return {"accuracy": accuracy}
        exact_match = sum(accuracy**length for length in self.row_lengths) / len(self.row_lengths)
        return {"accuracy": accuracy, "exact_match": exact_match}

    def slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return masks of labels [B, T] or of rows [B], for which accuracy is also given."""
        return {}

    def row_slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return masks of rows [B], for which the exact match is also given."""
        return {}

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy per label, and exact match of whole rows as greedy generation would solve them,
        both also by slice.
        """
        has_label = batch.labels != IGNORE_INDEX
        correct = (logits.argmax(-1) == batch.labels) & has_label
        sums = sum_by_slice("accuracy", correct, has_label, self.slices(batch))
        if self.row_lengths:
            rows = (correct | ~has_label).all(1)
            sums |= sum_by_slice("exact_match", rows, torch.ones_like(rows), self.row_slices(batch))
        return sums

    def model(self) -> ModelSpec:
        """Return a small model that can learn the task: a decoder, unless the task needs another
        kind.
        """
        return make_small_decoder(self.name, self.num_ids, self.shape)

    @property
    def words(self) -> Sequence[str]:
        """Text of every id."""
        return list(map(str, range(self.num_ids)))

    def text(self, ids: Sequence[int]) -> str:
        words = self.words
        return " ".join(words[token_id] for token_id in ids)


def hash_rows(content: Ints) -> RandomWords:
    """64-bit hash of each row: of its entries and their order; trailing -1 (padding) has no effect.

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
    """Split of each row as its index in SPLITS: one row in eight is "valid", one in eight
    "test".
    """
    remainder = (hash_rows(content) >> np.uint64(20)) % np.uint64(HOLDOUT_PARTS)
    return np.select([remainder == 0, remainder == 1], [1, 2], 0)


def parse_sizes(name: str, value: int | tuple[int, ...], minimum: int) -> tuple[int, ...]:
    """Return the sizes that an option allows: a single one, or a tuple from which each example
    draws one.

    >>> parse_sizes("pairs", 4, 1), parse_sizes("pairs", (4, 8), 1)
    ((4,), (4, 8))
    """
    sizes = value if isinstance(value, tuple) else (value,)
    if not sizes:
        raise SpecError(f"{name}=() is empty; give at least one number")
    where = name if len(sizes) == 1 else f"each of {name}"
    return tuple(check_whole_number(where, size, minimum) for size in sizes)


# --- Metrics by slice -----------------------------------------------------------------------------


def sum_by_slice(
    name: str, correct: Tensor, has_label: Tensor, slices: Mapping[str, Tensor] | None = None
) -> dict[str, tuple[float, int]]:
    """Sum and count `correct` where there is a label, overall and per slice: "accuracy@D=8".

    Empty slices are left out; a mask of rows [B] selects all labels of these rows.

    >>> correct, has_label = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, True, False])
    >>> sum_by_slice("accuracy", correct, has_label, {"D=4": torch.tensor([True, False, True])})
    {'accuracy': (1.0, 2), 'accuracy@D=4': (1.0, 1)}
    """
    masks = {name: has_label}
    for label, mask in (slices or {}).items():
        mask = mask.to(has_label.device)
        masks[f"{name}@{label}"] = has_label & (
            mask[:, None] if mask.dim() < has_label.dim() else mask
        )
    sums: dict[str, tuple[float, int]] = {}
    for label, mask in masks.items():
        count = int(mask.sum())
        if count or label == name:
            sums[label] = (float(to_float64(correct[mask]).sum()), count)
    return sums


def slice_by_value(name: str, values: Sequence[int]) -> dict[str, Tensor]:
    """Return a mask "name=value" of rows [B] for every value that occurs."""
    value_of_row = torch.tensor(values)
    return {f"{name}={value}": value_of_row == value for value in sorted(set(values))}


def slice_by_power_of_two(name: str, values: Tensor) -> dict[str, Tensor]:
    """Masks by powers of two: "name<=8" selects the values 5 to 8.

    >>> slice_by_power_of_two("t", torch.tensor([1, 2, 3, 4]))
    {'t<=1': tensor([ True, False, False, False]), 't<=2': ... 't<=4': tensor([False, False,  True,
    True])}
    """
    largest = int(values.max())
    bound = 1
    masks: dict[str, Tensor] = {}
    while bound // 2 < largest:
        masks[f"{name}<={bound}"] = (values <= bound) & (values > bound // 2)
        bound *= 2
    return masks


def slice_by_position(length: int) -> dict[str, Tensor]:
    """Masks [1, T] of positions by powers of two."""
    return slice_by_power_of_two("t", torch.arange(length)[None])
