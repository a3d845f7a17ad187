"""The task "copy": repeat a block of symbols (induction), or symbols scattered among noise (selective copying)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.pattern_base import check_whole_number
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec
from ..ops.counter_rng import RandomStreams
from .synthetic_task import (
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    check_sizes,
    find_correct,
    find_correct_rows,
    make_small_decoder,
    parse_sizes,
    slice_by_power_of_two,
    slice_by_value,
    sum_by_slice,
)
from .task import IGNORE_INDEX, Batch, MetricSums

NOISE_ID, REPEAT_ID, START_ID = 0, 1, 2  # symbols have the ids after these
COPY_KINDS = ("induction", "selective")


class CopyAnnotation(NamedTuple):
    """Annotation of an example: lengths of block and gap, and links (index of a symbol, index of its label)."""

    block: int
    gap: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class CopyTask(SyntheticTask):
    """A random block of symbols, a gap of noise, a separator, and the block again, which must be predicted.

    kind="selective" scatters the noise among the symbols instead (MAD, 2403.17844). `block` and `gap` are the numbers
    of symbols and of noise tokens; from a tuple each example draws one. Ids: 0 is noise, 1 the separator, 2 begins
    every row, symbols follow.

    >>> task = CopyTask(symbols=9, block=4, gap=2)
    >>> print(task.text(task.batch(0, 1).x[0].tolist()))
    > 0 2 1 2 . . | 0 2 1
    """

    name: ClassVar[str] = "copy"
    kind: str = "induction"
    symbols: int = 32
    block: int | tuple[int, ...] = (8, 12, 16, 20, 24)
    gap: int | tuple[int, ...] = (0, 8, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in COPY_KINDS:
            raise SpecError(f"kind={self.kind!r} is unknown; {suggest(self.kind, COPY_KINDS)}")
        check_whole_number("symbols", self.symbols, 2)
        blocks, gaps = parse_sizes("block", self.block, 1), parse_sizes("gap", self.gap, 0)
        check_sizes(self, tokens=1 + 2 * max(blocks) + max(gaps), symbols=self.symbols)
        check_num_examples(self, float(self.symbols) ** min(*blocks, 64), "use a longer block or more symbols")

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of guessing any symbol."""
        blocks = parse_sizes("block", self.block, 1)
        accuracy = 1 / self.symbols
        return {"accuracy": accuracy, "exact_match": sum(accuracy**block for block in blocks) / len(blocks)}

    def model(self) -> ModelSpec:
        """A decoder of two layers, the least for induction heads: the first attends to the previous token."""
        return make_small_decoder(
            self.name, self.symbols + START_ID + 1, ModelShape(width=64, heads=4, layers=2, feed=128)
        )

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        blocks, gaps = parse_sizes("block", self.block, 1), parse_sizes("gap", self.gap, 0)
        block, gap = random.choice(blocks), random.choice(gaps)
        max_block, max_prefix = max(blocks), max(blocks) + max(gaps)
        symbols = random.integers(self.symbols, max_block) + START_ID + 1
        separator = 1 + (block + gap)[:, None]  # its index in each row
        sources = 1 + np.tile(np.arange(max_block), (len(random), 1))  # indices of the symbols
        if self.kind == "selective":
            sources = 1 + _scatter_positions(random.uniform(max_prefix), block, separator - 1)[:, :max_block]
        targets = separator + np.arange(max_block)  # indices of their labels
        x = np.full((len(random), 1 + max_prefix + max_block), NOISE_ID)
        x[:, 0] = START_ID
        labels = np.full_like(x, IGNORE_INDEX)
        row, n = np.nonzero(np.arange(max_block) < block[:, None])
        x[row, sources[row, n]] = labels[row, targets[row, n]] = symbols[row, n]
        x[np.arange(len(random)), separator[:, 0]] = REPEAT_ID
        row, n = np.nonzero(np.arange(max_block) < block[:, None] - 1)
        x[row, targets[row, n] + 1] = symbols[row, n]
        x[np.arange(x.shape[1]) >= separator + block[:, None]] = -1
        return {"content": x, "x": x, "labels": labels, "sources": sources, "block": block, "gap": gap}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        block, gap = examples["block"], examples["gap"]
        length = 1 + 2 * block + gap
        x, labels = (
            torch.from_numpy(examples["x"][:, : length.max()]),
            torch.from_numpy(examples["labels"][:, : length.max()]),
        )
        tokens = None if (length == length[0]).all() else SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        gold = [
            CopyAnnotation(size, noise, tuple((at, 1 + size + noise + n) for n, at in enumerate(sources[:size])))
            for size, noise, sources in zip(block.tolist(), gap.tolist(), examples["sources"].tolist(), strict=True)
        ]
        return Batch(x.clamp(min=0), labels, tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy per symbol, by distance to its source; exact match of whole blocks, by block length."""
        correct, has_label = find_correct(logits, batch.labels)
        distance = torch.zeros(has_label.shape, dtype=torch.long)
        for row, example in enumerate(batch.gold):
            sources, targets = torch.tensor(example.links).T
            distance[row, targets] = targets - sources
        by_distance = slice_by_power_of_two("distance", distance.to(has_label.device))
        correct_rows = find_correct_rows(correct, has_label)
        by_block = slice_by_value("block", [example.block for example in batch.gold], correct_rows)
        accuracy = dict(sum_by_slice("accuracy", correct, has_label, by_distance))
        return accuracy | dict(sum_by_slice("exact_match", correct_rows, torch.ones_like(correct_rows), by_block))

    def text(self, ids: list[int]) -> str:
        """Symbols as numbers, noise as ".", the separator as "|", the start of a row as ">"."""
        names = {NOISE_ID: ".", REPEAT_ID: "|", START_ID: ">"}
        return " ".join(names.get(token_id, str(token_id - START_ID - 1)) for token_id in ids)


def _scatter_positions(random: np.ndarray, block: np.ndarray, end: np.ndarray) -> np.ndarray:
    """In each row `block` distinct indices below `end`, sorted, followed by the remaining indices.

    `random` are uniform numbers [rows, n]; the indices of the smallest ones are chosen.
    """
    random = np.where(np.arange(random.shape[1]) < end, random, 2.0)
    rank = random.argsort(1, kind="stable").argsort(1, kind="stable")
    return (rank >= block[:, None]).argsort(1, kind="stable")
