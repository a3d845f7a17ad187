"""copy: say again what stood further up. Induction, and copying what is scattered among noise."""

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

NOISE_ID, REPEAT_ID, START_ID = 0, 1, 2  # the ids before those of the symbols
COPY_KINDS = ("induction", "selective")


class CopyAnnotation(NamedTuple):
    """What is known of an example: its block and gap, and links (where a symbol stands, where it is wanted)."""

    block: int
    gap: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class CopyTask(SyntheticTask):
    """A random block, a gap of noise, a mark, and the block again: from the mark on, the next symbol is wanted.

    kind="selective" scatters the noise among the symbols instead (MAD, 2403.17844). `block` and `gap` are how many
    symbols and how much noise, or tuples of which an example takes one each. Ids: 0 is noise, 1 the mark, 2 what
    begins every row, symbols follow.

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
        """Any symbol."""
        blocks = parse_sizes("block", self.block, 1)
        one = 1 / self.symbols
        return {"accuracy": one, "exact_match": sum(one**block for block in blocks) / len(blocks)}

    def model(self) -> ModelSpec:
        """Two layers, of which the first tells every token what stood before it."""
        return make_small_decoder(
            self.name, self.symbols + START_ID + 1, ModelShape(width=64, heads=4, layers=2, feed=128)
        )

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        blocks, gaps = parse_sizes("block", self.block, 1), parse_sizes("gap", self.gap, 0)
        block, gap = random.choice(blocks), random.choice(gaps)
        most, end = max(blocks), max(blocks) + max(gaps)
        symbols = random.integers(self.symbols, most) + START_ID + 1
        first = 1 + (block + gap)[:, None]  # where the mark stands
        stands = 1 + np.tile(np.arange(most), (len(random), 1))
        if self.kind == "selective":
            stands = 1 + _scatter_positions(random.uniform(end), block, first - 1)[:, :most]
        asked = first + np.arange(most)
        x = np.full((len(random), 1 + end + most), NOISE_ID)
        x[:, 0] = START_ID
        labels = np.full_like(x, IGNORE_INDEX)
        row, place = np.nonzero(np.arange(most) < block[:, None])
        x[row, stands[row, place]] = labels[row, asked[row, place]] = symbols[row, place]
        x[np.arange(len(random)), first[:, 0]] = REPEAT_ID
        row, place = np.nonzero(np.arange(most) < block[:, None] - 1)
        x[row, asked[row, place] + 1] = symbols[row, place]
        x[np.arange(x.shape[1]) >= first + block[:, None]] = -1
        return {"content": x, "x": x, "labels": labels, "stands": stands, "block": block, "gap": gap}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        block, gap = examples["block"], examples["gap"]
        length = 1 + 2 * block + gap
        x, labels = (
            torch.from_numpy(examples["x"][:, : length.max()]),
            torch.from_numpy(examples["labels"][:, : length.max()]),
        )
        tokens = None if (length == length[0]).all() else SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        gold = [
            CopyAnnotation(count, free, tuple((at, 1 + count + free + n) for n, at in enumerate(stands[:count])))
            for count, free, stands in zip(block.tolist(), gap.tolist(), examples["stands"].tolist(), strict=True)
        ]
        return Batch(x.clamp(min=0), labels, tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy by how far back a symbol stands, and how often all of a block is right, by its length."""
        right, asked = find_correct(logits, batch.labels)
        back = torch.zeros(asked.shape, dtype=torch.long)
        for row, one in enumerate(batch.gold):
            stands, wanted = torch.tensor(one.links).T
            back[row, wanted] = wanted - stands
        rows = find_correct_rows(right, asked)
        by_block = slice_by_value("block", [one.block for one in batch.gold], rows)
        every = torch.ones_like(rows)
        told = dict(sum_by_slice("accuracy", right, asked, slice_by_power_of_two("distance", back.to(asked.device))))
        return told | dict(sum_by_slice("exact_match", rows, every, by_block))

    def text(self, ids: list[int]) -> str:
        """Symbols by number, noise as a dot, the mark as |, what begins a row as >."""
        return " ".join({NOISE_ID: ".", REPEAT_ID: "|", START_ID: ">"}.get(one, str(one - START_ID - 1)) for one in ids)


def _scatter_positions(unit: np.ndarray, block: np.ndarray, end: np.ndarray) -> np.ndarray:
    """`block` different places before `end`, in order, then places that nobody uses."""
    unit = np.where(np.arange(unit.shape[1]) < end, unit, 2.0)
    rank = unit.argsort(1, kind="stable").argsort(1, kind="stable")
    return (rank >= block[:, None]).argsort(1, kind="stable")
