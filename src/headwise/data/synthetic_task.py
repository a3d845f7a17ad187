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
from .task import IGNORED, SPLITS, Batch, Tally, Task, check_split

# One row for each example. "content" [B, n] is what an example is known by, -1 where there is nothing; "fits" [B], if
# there is one, says which of them may be used at all.
Drawn = dict[str, np.ndarray]

SPACE = 500  # with fewer different examples than this a split could be all but empty
ATTEMPTS = 2**17
MOST = 2**16  # examples in a batch, tokens in an example, kinds of tokens
CELLS = 2**20  # of content, the most that are drawn side by side
PARTS = 8  # an example whose content marks 0 or 1 out of so many is held out for validation or test
ODD, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, repr=False)
class Generated(CheckedDataclass, Task):
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
    def draw(self, draws: RandomStreams) -> Drawn:
        """One attempt at each example."""

    @abstractmethod
    def show(self, drawn: Drawn) -> Batch:
        """What a model reads of them, and what is wanted."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        """Examples index * size .. (index + 1) * size - 1 of the split."""
        check_split(split)
        check_whole_number("index", index, 0)
        first = index * check_whole_number("size", size, 1)
        if size > MOST:
            raise SpecError(f"size={size} examples are too many for one batch; use at most {MOST}")
        if first + size > 2**63:
            raise SpecError(f"index={index} of {size} examples lies beyond example 2**63; use a smaller index")
        return self.show(self._drawn(np.arange(first, first + size), split))

    def _drawn(self, numbers: Ints, split: str) -> Drawn:
        """For each number the first attempt that belongs to the split."""
        kept: Drawn = {}
        waiting, begun, ahead = np.arange(len(numbers)), 0, 1 if split == "train" else PARTS
        while len(waiting):
            if begun >= ATTEMPTS:
                raise SpecError(f"{self!r} makes hardly any example for {split!r}; make its examples more various")
            row, attempt = np.repeat(waiting, ahead), np.tile(np.arange(begun, begun + ahead), len(waiting))
            drawn = self.draw(RandomStreams(self.seed, SPLITS.index(split), numbers[row], attempt))
            good = (splits(drawn["content"]) == SPLITS.index(split)) & drawn.pop("fits", True)
            good = good.reshape(len(waiting), ahead)
            found = good.any(1)
            taken = np.flatnonzero(found) * ahead + good.argmax(1)[found]
            for name, values in drawn.items():
                kept.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))
                kept[name][waiting[found]] = values[taken]
            waiting, begun = waiting[~found], begun + ahead
            most = CELLS // max(1, len(waiting) * drawn["content"].shape[1])
            ahead = max(1, min(2 * ahead, most))
        return kept


def marks(content: Ints) -> RandomWords:
    """A number of 64 bits for each row, of its entries and where they stand; entries -1 at its end change nothing.

    >>> a, b, c = marks(np.array([[3, 1, -1], [1, 3, -1], [3, 1, -1]]))
    >>> a == c, a == b, a == marks(np.array([[3, 1]]))[0]
    (np.True_, np.False_, np.True_)
    """
    place = np.arange(1, content.shape[1] + 1, dtype=np.uint64) * ODD
    mixed = _mixed(_mixed(content.astype(np.uint64) + place) + place)
    return _mixed(np.where(content < 0, np.uint64(0), mixed).sum(1, dtype=np.uint64))


def _mixed(x: RandomWords) -> RandomWords:
    x = (x ^ (x >> np.uint64(33))) * MIX
    return x ^ (x >> np.uint64(29))


def splits(content: Ints) -> Ints:
    """Which split each row belongs to, by its number in SPLITS: one in eight to "valid", one in eight to "test"."""
    mark = (marks(content) >> np.uint64(20)) % np.uint64(PARTS)
    return np.select([mark == 0, mark == 1], [1, 2], 0)


def check_space(task: Task, count: float, remedy: str) -> None:
    """Refuse a task with too few different examples for three splits."""
    if count < SPACE:
        raise SpecError(f"{task!r} has {count:.0f} different examples, too few for three splits; {remedy}")


def check_sizes(task: Task, **sizes: int) -> None:
    """Refuse what would fill the memory: longer examples, or more kinds of tokens, than any model here reads."""
    for name, size in sizes.items():
        if size > MOST:
            raise SpecError(f"{task!r} has {size} {name}, too many for any model here; use at most {MOST}")


def options(name: str, value: int | tuple[int, ...], low: int) -> tuple[int, ...]:
    """The sizes that a knob allows: one, or several of which each example takes one.

    >>> options("pairs", 4, 1), options("pairs", (4, 8), 1)
    ((4,), (4, 8))
    """
    several = value if isinstance(value, tuple) else (value,)
    if not several:
        raise SpecError(f"{name}=() leaves nothing to choose from; give at least one number")
    return tuple(check_whole_number(name if len(several) == 1 else f"each of {name}", one, low) for one in several)


def tallied(name: str, right: Tensor, asked: Tensor, slices: Mapping[str, Tensor]) -> Tally:
    """The sum of what is right where it is asked, and of every slice that is there: "accuracy", "accuracy@D=8".

    >>> right, asked = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, True, False])
    >>> tallied("accuracy", right, asked, {"D=4": torch.tensor([True, False, True])})
    {'accuracy': (1.0, 2), 'accuracy@D=4': (1.0, 1)}
    """
    wheres = {name: asked} | {f"{name}@{label}": asked & where for label, where in slices.items()}
    counts = {label: int(where.sum()) for label, where in wheres.items()}
    return {
        label: (float(right[where].double().sum()), counts[label])
        for label, where in wheres.items()
        if counts[label] or label == name
    }


def right_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where the likeliest id is the one wanted, and where one is wanted."""
    asked = labels != IGNORED
    return (logits.argmax(-1) == labels) & asked, asked


def whole_rows(right: Tensor, asked: Tensor) -> Tensor:
    """Of each row, whether all that was asked is right: what greedy generation would get right, too."""
    return (right | ~asked).all(1)


def each_of(name: str, values: Sequence[int], like: Tensor) -> dict[str, Tensor]:
    """A slice for every value that occurs, "name=value", as [B] or [B, 1] to go with `like`."""
    told = torch.tensor(values, device=like.device)
    told = told[:, None] if like.dim() == 2 else told
    return {f"{name}={value}": told == value for value in sorted(set(values))}


def up_to(name: str, values: Tensor) -> dict[str, Tensor]:
    """Slices by powers of two: "name<=8" are the values 5 to 8.

    >>> up_to("t", torch.tensor([1, 2, 3, 4]))
    {'t<=1': tensor([ True, False, False, False]), 't<=2': ... 't<=4': tensor([False, False,  True,  True])}
    """
    most, bound, told = int(values.max()), 1, {}
    while bound // 2 < most:
        told[f"{name}<={bound}"] = (values <= bound) & (values > bound // 2)
        bound *= 2
    return told


# SECTION: Blueprints of the small models that learn generated tasks within minutes.


@dataclass(frozen=True)
class Shape:
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

    def embedding(self, tokens: int, table: str = "") -> EmbeddingSpec:
        """A table of so many tokens."""
        places = PositionSpec("sinusoidal") if self.positions == "sinusoidal" else None
        return EmbeddingSpec(tokens, positions=places, table=table)


def decoder(name: str, tokens: int, shape: Shape) -> ModelSpec:
    """A causal model that says a token at each place; what it says and what it reads have a table each."""
    stack = _stack("decoder", tokens, shape, "causal()")
    return ModelSpec(name, "decoder", (stack,), (OutputHeadSpec("tokens", tokens),))


def encoder(name: str, tokens: int, shape: Shape, head: OutputHeadSpec, pattern: str | Pattern = "full()") -> ModelSpec:
    """A model that reads all at once."""
    return ModelSpec(name, "encoder", (_stack("encoder", tokens, shape, pattern),), (head,))


def translator(name: str, tokens: int, shape: Shape) -> ModelSpec:
    """An encoder and a decoder as deep, with one table for all that is read and said (1706.03762)."""
    source = _stack("encoder", tokens, shape, "full()")
    embedding = shape.embedding(tokens, table="encoder")
    target = StackSpec.from_blocks(
        "decoder", shape.width, shape.blocks("causal()", "full()"), embedding=embedding, norm=NormSpec()
    )
    return ModelSpec(name, "encoder-decoder", (source, target), (OutputHeadSpec("tokens", tokens, table="encoder"),))


def _stack(name: str, tokens: int, shape: Shape, pattern: str | Pattern) -> StackSpec:
    return StackSpec.from_blocks(
        name, shape.width, shape.blocks(pattern), embedding=shape.embedding(tokens), norm=NormSpec()
    )
