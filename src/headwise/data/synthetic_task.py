"""Tasks made in code: endless examples, each known by its number, in splits that share none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..interfaces.registry import CheckedDataclass, find_class
from ..masking.pattern_base import check_whole_number
from ..masking.patterns import Pattern
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from ..ops.counter_rng import Ints, RandomStreams, RandomWords
from ..presets import design
from .task import IGNORE_INDEX, SPLITS, Batch, MetricSums, Task, check_split

# One row for each example. "content" [B, n] is what an example is known by, -1 where there is nothing; "fits" [B], if
# there is one, says which of them may be used at all.
ExampleArrays = dict[str, np.ndarray]

MIN_DISTINCT_EXAMPLES = 500  # with fewer different examples than this a split could be all but empty
MAX_ATTEMPTS = 2**17
MAX_SIZE = 2**16  # examples in a batch, tokens in an example, kinds of tokens
MAX_DRAWN_CELLS = 2**20  # of content, the most that are drawn side by side
HOLDOUT_PARTS = 8  # an example whose content marks 0 or 1 out of so many is held out for validation or test
HASH_MULTIPLIER, HASH_MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, repr=False)
class SyntheticTask(CheckedDataclass, Task):
    """Examples drawn by their numbers: example `index * size + row` of a split is the same whatever the batch.

    A mark of its content puts every example into one split, whatever the seed; drawing goes on until it is the split
    that was asked for. So what was seen in training under one seed is held out under none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise SpecError(f"seed={self.seed} has more than 64 bits; use one below 2**64")

    @abstractmethod
    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        """One attempt at each example."""

    @abstractmethod
    def to_batch(self, examples: ExampleArrays) -> Batch:
        """What a model reads of them, and what is wanted."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        """Examples index * size .. (index + 1) * size - 1 of the split."""
        check_split(split)
        check_whole_number("index", index, 0)
        first = index * check_whole_number("size", size, 1)
        if size > MAX_SIZE:
            raise SpecError(f"size={size} examples are too many for one batch; use at most {MAX_SIZE}")
        if first + size > 2**63:
            raise SpecError(f"index={index} of {size} examples lies beyond example 2**63; use a smaller index")
        return self.to_batch(self._examples_of_split(np.arange(first, first + size), split))

    def _examples_of_split(self, numbers: Ints, split: str) -> ExampleArrays:
        """For each number the first attempt that belongs to the split."""
        kept: ExampleArrays = {}
        waiting, begun, ahead = np.arange(len(numbers)), 0, 1 if split == "train" else HOLDOUT_PARTS
        while len(waiting):
            if begun >= MAX_ATTEMPTS:
                raise SpecError(f"{self!r} makes hardly any example for {split!r}; make its examples more various")
            row, attempt = np.repeat(waiting, ahead), np.tile(np.arange(begun, begun + ahead), len(waiting))
            drawn = self.draw_examples(RandomStreams(self.seed, SPLITS.index(split), numbers[row], attempt))
            good = (assign_splits(drawn["content"]) == SPLITS.index(split)) & drawn.pop("fits", True)
            good = good.reshape(len(waiting), ahead)
            found = good.any(1)
            taken = np.flatnonzero(found) * ahead + good.argmax(1)[found]
            for name, values in drawn.items():
                kept.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))
                kept[name][waiting[found]] = values[taken]
            waiting, begun = waiting[~found], begun + ahead
            most = MAX_DRAWN_CELLS // max(1, len(waiting) * drawn["content"].shape[1])
            ahead = max(1, min(2 * ahead, most))
        return kept


def hash_rows(content: Ints) -> RandomWords:
    """A number of 64 bits for each row, of its entries and where they stand; entries -1 at its end change nothing.

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
    """Which split each row belongs to, by its number in SPLITS: one in eight to "valid", one in eight to "test"."""
    mark = (hash_rows(content) >> np.uint64(20)) % np.uint64(HOLDOUT_PARTS)
    return np.select([mark == 0, mark == 1], [1, 2], 0)


def check_num_examples(task: Task, count: float, remedy: str) -> None:
    """Refuse a task with too few different examples for three splits."""
    if count < MIN_DISTINCT_EXAMPLES:
        raise SpecError(f"{task!r} has {count:.0f} different examples, too few for three splits; {remedy}")


def check_sizes(task: Task, **sizes: int) -> None:
    """Refuse what would fill the memory: longer examples, or more kinds of tokens, than any model here reads."""
    for name, size in sizes.items():
        if size > MAX_SIZE:
            raise SpecError(f"{task!r} has {size} {name}, too many for any model here; use at most {MAX_SIZE}")


def parse_sizes(name: str, value: int | tuple[int, ...], minimum: int) -> tuple[int, ...]:
    """The sizes that a knob allows: one, or several of which each example takes one.

    >>> parse_sizes("pairs", 4, 1), parse_sizes("pairs", (4, 8), 1)
    ((4,), (4, 8))
    """
    several = value if isinstance(value, tuple) else (value,)
    if not several:
        raise SpecError(f"{name}=() leaves nothing to choose from; give at least one number")
    return tuple(check_whole_number(name if len(several) == 1 else f"each of {name}", one, minimum) for one in several)


def sum_by_slice(name: str, right: Tensor, is_asked: Tensor, slices: Mapping[str, Tensor]) -> MetricSums:
    """The sum of what is right where it is asked, and of every slice that is there: "accuracy", "accuracy@D=8".

    >>> right, asked = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, True, False])
    >>> sum_by_slice("accuracy", right, asked, {"D=4": torch.tensor([True, False, True])})
    {'accuracy': (1.0, 2), 'accuracy@D=4': (1.0, 1)}
    """
    wheres = {name: is_asked} | {f"{name}@{label}": is_asked & where for label, where in slices.items()}
    counts = {label: int(where.sum()) for label, where in wheres.items()}
    return {
        label: (float(right[where].double().sum()), counts[label])
        for label, where in wheres.items()
        if counts[label] or label == name
    }


def find_correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where the likeliest id is the one wanted, and where one is wanted."""
    asked = labels != IGNORE_INDEX
    return (logits.argmax(-1) == labels) & asked, asked


def find_correct_rows(right: Tensor, is_asked: Tensor) -> Tensor:
    """Of each row, whether all that was asked is right: what greedy generation would get right, too."""
    return (right | ~is_asked).all(1)


def slice_by_value(name: str, values: Sequence[int], like: Tensor) -> dict[str, Tensor]:
    """A slice for every value that occurs, "name=value", as [B] or [B, 1] to go with `like`."""
    told = torch.tensor(values, device=like.device)
    told = told[:, None] if like.dim() == 2 else told
    return {f"{name}={value}": told == value for value in sorted(set(values))}


def slice_by_power_of_two(name: str, values: Tensor) -> dict[str, Tensor]:
    """Slices by powers of two: "name<=8" are the values 5 to 8.

    >>> slice_by_power_of_two("t", torch.tensor([1, 2, 3, 4]))
    {'t<=1': tensor([ True, False, False, False]), 't<=2': ... 't<=4': tensor([False, False,  True,  True])}
    """
    most, bound, told = int(values.max()), 1, {}
    while bound // 2 < most:
        told[f"{name}<={bound}"] = (values <= bound) & (values > bound // 2)
        bound *= 2
    return told


# --- Blueprints of the small models that learn generated tasks within minutes --------------------------


@dataclass(frozen=True)
class ModelShape:
    """How large a model is: `layers` of `width` channels and so many heads; feed-forwards `feed` wide, 0 for none.

    positions="rotary" turns queries and keys, so that longer texts than those of training can be read at all;
    "sinusoidal" is added to the embedding; "none" leaves tokens without an order.
    """

    width: int
    heads: int
    layers: int
    feed: int = 0
    positions: str = "rotary"

    def blocks(self, pattern: str | Pattern, cross: str = "") -> list[BlockSpec]:
        """Its layers, norms first; `cross` is the pattern of a cross-attention, if there is one."""
        turns = (find_class("Rotary")(),) if self.positions == "rotary" else ()
        own = design(model=self.width, heads=self.heads, pattern=pattern, modifiers=turns)
        other = design(model=self.width, heads=self.heads, pattern=cross) if cross else None
        feed = FeedForwardSpec(self.feed, "gelu", bias="ud") if self.feed else None
        return [BlockSpec(own, other, feed)] * self.layers

    def embedding(self, vocab_size: int, table: str = "") -> EmbeddingSpec:
        """A table of so many tokens."""
        places = PositionSpec("sinusoidal") if self.positions == "sinusoidal" else None
        return EmbeddingSpec(vocab_size, positions=places, table=table)


def make_small_decoder(name: str, vocab_size: int, shape: ModelShape) -> ModelSpec:
    """A causal model that says a token at each place; what it says and what it reads have a table each."""
    stack = _make_stack("decoder", vocab_size, shape, "causal()")
    return ModelSpec(name, "decoder", (stack,), (OutputHeadSpec("tokens", vocab_size),))


def make_small_encoder(
    name: str, vocab_size: int, shape: ModelShape, head: OutputHeadSpec, pattern: str | Pattern = "full()"
) -> ModelSpec:
    """A model that reads all at once."""
    return ModelSpec(name, "encoder", (_make_stack("encoder", vocab_size, shape, pattern),), (head,))


def make_small_translator(name: str, vocab_size: int, shape: ModelShape) -> ModelSpec:
    """An encoder and a decoder as deep, with one table for all that is read and said (1706.03762)."""
    source = _make_stack("encoder", vocab_size, shape, "full()")
    embedding = shape.embedding(vocab_size, table="encoder")
    target = StackSpec.from_blocks(
        "decoder", shape.width, shape.blocks("causal()", "full()"), embedding=embedding, norm=NormSpec()
    )
    return ModelSpec(
        name, "encoder-decoder", (source, target), (OutputHeadSpec("tokens", vocab_size, table="encoder"),)
    )


def _make_stack(name: str, tokens: int, shape: ModelShape, pattern: str | Pattern) -> StackSpec:
    return StackSpec.from_blocks(
        name, shape.width, shape.blocks(pattern), embedding=shape.embedding(tokens), norm=NormSpec()
    )
