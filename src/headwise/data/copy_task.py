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
    Drawn,
    Generated,
    Shape,
    check_sizes,
    check_space,
    decoder,
    each_of,
    options,
    right_of,
    tallied,
    up_to,
    whole_rows,
)
from .task import IGNORED, Batch, Tally

NOISE, AGAIN, START = 0, 1, 2  # the ids before those of the symbols
KINDS = ("induction", "selective")


class Copied(NamedTuple):
    """What is known of an example: its block and gap, and links (where a symbol stands, where it is wanted)."""

    block: int
    gap: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class Copy(Generated):
    """A random block, a gap of noise, a mark, and the block again: from the mark on, the next symbol is wanted.

    kind="selective" scatters the noise among the symbols instead (MAD, 2403.17844). `block` and `gap` are how many
    symbols and how much noise, or tuples of which an example takes one each. Ids: 0 is noise, 1 the mark, 2 what
    begins every row, symbols follow.

    >>> task = Copy(symbols=9, block=4, gap=2)
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
        if self.kind not in KINDS:
            raise SpecError(f"kind={self.kind!r} is unknown; {suggest(self.kind, KINDS)}")
        check_whole_number("symbols", self.symbols, 2)
        blocks, gaps = options("block", self.block, 1), options("gap", self.gap, 0)
        check_sizes(self, tokens=1 + 2 * max(blocks) + max(gaps), symbols=self.symbols)
        check_space(self, float(self.symbols) ** min(*blocks, 64), "use a longer block or more symbols")

    @property
    def chance(self) -> Mapping[str, float]:
        """Any symbol."""
        blocks = options("block", self.block, 1)
        one = 1 / self.symbols
        return {"accuracy": one, "exact_match": sum(one**block for block in blocks) / len(blocks)}

    def model(self) -> ModelSpec:
        """Two layers, of which the first tells every token what stood before it."""
        return decoder(self.name, self.symbols + START + 1, Shape(width=64, heads=4, layers=2, feed=128))

    def draw(self, draws: RandomStreams) -> Drawn:
        blocks, gaps = options("block", self.block, 1), options("gap", self.gap, 0)
        block, gap = draws.choice(blocks), draws.choice(gaps)
        most, end = max(blocks), max(blocks) + max(gaps)
        symbols = draws.integers(self.symbols, most) + START + 1
        first = 1 + (block + gap)[:, None]  # where the mark stands
        stands = 1 + np.tile(np.arange(most), (len(draws), 1))
        if self.kind == "selective":
            stands = 1 + _scattered(draws.uniform(end), block, first - 1)[:, :most]
        asked = first + np.arange(most)
        x = np.full((len(draws), 1 + end + most), NOISE)
        x[:, 0] = START
        labels = np.full_like(x, IGNORED)
        row, place = np.nonzero(np.arange(most) < block[:, None])
        x[row, stands[row, place]] = labels[row, asked[row, place]] = symbols[row, place]
        x[np.arange(len(draws)), first[:, 0]] = AGAIN
        row, place = np.nonzero(np.arange(most) < block[:, None] - 1)
        x[row, asked[row, place] + 1] = symbols[row, place]
        x[np.arange(x.shape[1]) >= first + block[:, None]] = -1
        return {"content": x, "x": x, "labels": labels, "stands": stands, "block": block, "gap": gap}

    def show(self, drawn: Drawn) -> Batch:
        block, gap = drawn["block"], drawn["gap"]
        length = 1 + 2 * block + gap
        x, labels = (
            torch.from_numpy(drawn["x"][:, : length.max()]),
            torch.from_numpy(drawn["labels"][:, : length.max()]),
        )
        tokens = None if (length == length[0]).all() else SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        gold = [
            Copied(count, free, tuple((at, 1 + count + free + n) for n, at in enumerate(stands[:count])))
            for count, free, stands in zip(block.tolist(), gap.tolist(), drawn["stands"].tolist(), strict=True)
        ]
        return Batch(x.clamp(min=0), labels, tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> Tally:
        """Accuracy by how far back a symbol stands, and how often all of a block is right, by its length."""
        right, asked = right_of(logits, batch.labels)
        back = torch.zeros(asked.shape, dtype=torch.long)
        for row, one in enumerate(batch.gold):
            stands, wanted = torch.tensor(one.links).T
            back[row, wanted] = wanted - stands
        rows = whole_rows(right, asked)
        by_block = each_of("block", [one.block for one in batch.gold], rows)
        every = torch.ones_like(rows)
        told = dict(tallied("accuracy", right, asked, up_to("distance", back.to(asked.device))))
        return told | dict(tallied("exact_match", rows, every, by_block))

    def text(self, ids: list[int]) -> str:
        """Symbols by number, noise as a dot, the mark as |, what begins a row as >."""
        return " ".join({NOISE: ".", AGAIN: "|", START: ">"}.get(one, str(one - START - 1)) for one in ids)


def _scattered(unit: np.ndarray, block: np.ndarray, end: np.ndarray) -> np.ndarray:
    """`block` different places before `end`, in order, then places that nobody uses."""
    unit = np.where(np.arange(unit.shape[1]) < end, unit, 2.0)
    rank = unit.argsort(1, kind="stable").argsort(1, kind="stable")
    return (rank >= block[:, None]).argsort(1, kind="stable")
