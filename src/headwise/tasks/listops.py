"""listops: the value of nested lists of digits, as one of ten classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..blueprint import OutputHeadSpec, ModelSpec
from ..draws import RandomStreams, Ints
from ..errors import SpecError
from ..pattern_base import check_whole_number
from ..tokens import SequenceInfo
from .base import Batch, Tally
from .generated import Drawn, Generated, check_space, each_of, right_of, tallied
from .small import Shape, encoder
from .trees import Level, chosen, grow, lengths, values, written

SYMBOLS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]", "=")  # padding is 0, the first token of all 16
CLASSES, OPEN, CLOSE, READ = 10, 11, 15, 16
SIZES = {"depth": (2, 32), "arguments": (2, 32), "shortest": (4, 4096), "longest": (4, 4096)}
RARE = 1 / 500  # of all trees that are drawn, the fewest that may be kept


class Nested(NamedTuple):
    """What is known of an example: how deep its lists nest, and where the list of each token opens.

    An operator's own list is the one that it is an argument of, and the outermost one's is the first token.
    """

    depth: int
    parents: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class ListOps(Generated):
    """`= [MAX 2 9 [MIN 4 7 ] 0 ]` has the class 9 (1804.06028, as Long Range Arena generates it, 2011.04006).

    MIN, MAX, MED (of an even number, the mean of the two middle ones, cut down) and SM, the sum modulo 10. A node
    above `depth` is an operator one time in four and has 2 .. `arguments` arguments; else it is a digit. Kept are
    texts of `shortest` .. `longest` tokens, "=" not counted. `ListOps.published()` has the sizes of the Arena.

    >>> task = ListOps(arguments=4, shortest=9, longest=12)
    >>> batch = task.batch(0, 1)
    >>> print(task.text(batch.x[0].tolist()), batch.labels.tolist())
    = [MAX [MIN 8 2 5 ] 8 3 ] [8]
    """

    name: ClassVar[str] = "listops"
    depth: int = 4
    arguments: int = 10
    shortest: int = 8
    longest: int = 96

    @classmethod
    def published(cls, seed: int = 0) -> Self:
        """The Arena's sizes: ten levels, up to ten arguments, more than 500 and fewer than 2,000 tokens."""
        return cls(seed=seed, depth=10, arguments=10, shortest=501, longest=1999)

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob, (least, most) in SIZES.items():
            if check_whole_number(knob, getattr(self, knob), least) > most:
                raise SpecError(f"{knob}={getattr(self, knob)} is more than any model here learns; use at most {most}")
        if self.shortest > self.longest:
            fact = f"shortest={self.shortest} is more than longest={self.longest}"
            raise SpecError(f"{fact}; use shortest={self.longest} or less")
        share = lengths(self.depth, self.arguments, self.longest)[self.shortest :].sum()
        if share < RARE:
            fact = f"{max(share, 0):.2%} of the trees of {self!r} have {self.shortest} to {self.longest} tokens"
            raise SpecError(f"{fact}, too few to be drawn; use a wider range, or other depth and arguments")
        check_space(
            self, 4 * 10.0 ** min(self.longest - 2, self.arguments, 9), "use more arguments or a larger longest"
        )

    @property
    def chance(self) -> Mapping[str, float]:
        """Any digit. The classes are not alike frequent, so that always saying the commonest gives more."""
        return {"accuracy": 1 / CLASSES}

    def model(self) -> ModelSpec:
        """Four layers, and what the first token has gathered."""
        shape = Shape(width=64, heads=4, layers=4, feed=128)
        return encoder(self.name, len(SYMBOLS), shape, OutputHeadSpec("classes", CLASSES, at="first", bias="learned"))

    def draw(self, draws: RandomStreams) -> Drawn:
        levels, length = grow(draws, self.depth, self.arguments, self.longest)
        fits = (length >= self.shortest) & (length <= self.longest)
        levels = chosen(levels, fits)
        starts, sizes = written(levels)
        x = np.is_full((len(draws), self.longest + 1), -1)
        parents = np.zeros_like(x)
        x[:, 0] = READ
        for n, (level, start, size) in enumerate(zip(levels, starts, sizes, strict=True)):
            x[level.row, start] = np.where(level.operator, OPEN + level.kind, 1 + level.digit)
            parents[level.row, start] = starts[n - 1][level.parent] if n else 0
            row, end = level.row[level.operator], (start + size - 1)[level.operator]
            x[row, end], parents[row, end] = CLOSE, start[level.operator]
        labels = np.zeros(len(draws), np.int64)
        labels[levels[0].row] = values(levels)
        told = {"x": x, "labels": labels, "length": length + 1, "depth": _depth(levels, len(draws)), "parents": parents}
        return {"content": x, "fits": fits, **told}

    def show(self, drawn: Drawn) -> Batch:
        length = drawn["length"]
        x = torch.from_numpy(drawn["x"][:, : length.max()]).clamp(min=0)
        tokens = SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        rows = zip(drawn["depth"].tolist(), drawn["parents"].tolist(), length.tolist(), strict=True)
        gold = [Nested(depth, tuple(parents[:end])) for depth, parents, end in rows]
        return Batch(x, torch.from_numpy(drawn["labels"]), tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> Tally:
        """Accuracy, and that of each depth."""
        right, asked = right_of(logits, batch.labels)
        return tallied("accuracy", right, asked, each_of("depth", [one.depth for one in batch.gold], asked))

    def text(self, ids: list[int]) -> str:
        """As it is written."""
        return " ".join(SYMBOLS[one] for one in ids if one)


def _depth(levels: list[Level], rows: int) -> Ints:
    """How many levels each tree has."""
    deepest = np.zeros(rows, np.int64)
    for depth, level in enumerate(levels, 1):
        deepest[level.row] = depth
    return deepest
