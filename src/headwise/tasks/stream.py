"""Text without end: tokens in a row, of which the next one is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..blueprint import ModelSpec, ProcessorSpec
from ..errors import SpecError
from .base import IGNORED, Batch, Tally
from .brought import Data
from .order import drawn, swept
from .sizes import decoder
from .vocabulary import Vocabulary

ROUNDING = 1e-6  # 1 - 0.9 is a little less than 0.1
SCANNED = 1 << 22  # tokens that are looked at together


@dataclass(frozen=True, eq=False)
class Span:
    """The tokens `start` to `stop` of an array that may lie on disk: anything that slices will do."""

    ids: Any
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def counts(self, size: int) -> NDArray[np.int64]:
        """How often each id stands there, a piece at a time."""
        found = np.zeros(size, np.int64)
        for at in range(self.start, self.stop, SCANNED):
            piece = np.asarray(self.ids[at : min(at + SCANNED, self.stop)])
            found += np.bincount(piece.astype(np.int64), minlength=size)
        return found


class Stream(Data):
    """Training takes crops of `length` tokens from anywhere; held-out splits are cut into rows that ask each token
    once, and a batch has rows from all over.

    The first token of a split is asked with the one before it in view, where there is one in the same array. `widths`
    are the bytes of text that each id stands for, without which bits per byte are not measured. `end` stands behind
    every text, and so before the next.
    """

    def __init__(
        self,
        spans: Mapping[str, Span],
        length: int,
        size: int,
        *,
        vocabulary: Vocabulary | None = None,
        widths: NDArray[np.int64] | None = None,
        end: int | None = None,
    ) -> None:
        self.spans, self.length, self.size, self.vocabulary, self.end = spans, length, size, vocabulary, end
        if len(spans["train"]) <= length:
            have = len(spans["train"])
            raise SpecError(f"the train split has {have} tokens, too few for length={length}; bring more text")
        self.sizes = {split: self._rows_of(split) for split in spans}
        self.sizes["train"] = len(spans["train"]) // length
        if not self.sizes["valid"]:
            raise SpecError(f"of {len(spans['train'])} tokens none are left for validation; give a larger valid=")
        self._widths = None if widths is None else torch.from_numpy(widths)

    def _first(self, split: str) -> int:
        """The first token that is asked: the first of all has none before it."""
        return max(1, self.spans[split].start)

    def _rows_of(self, split: str) -> int:
        return -(-max(0, self.spans[split].stop - self._first(split)) // self.length)

    def batches(self, size: int, split: str) -> int:
        return -(-self.sizes[split] // size)

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        if split == "train":
            return self._crops(index, size, seed)
        first, stop = self._first(split), self.spans[split].stop
        asked = [first + n * self.length for n in swept(self.sizes[split], index, size)]
        return self._rows(split, [(at - 1, min(at + self.length, stop)) for at in asked])

    def _crops(self, index: int, size: int, seed: int) -> Batch:
        span = self.spans["train"]
        starts = drawn(seed, index).integers(span.start, span.stop - self.length, size)
        return self._rows("train", [(int(at), int(at) + self.length + 1) for at in starts])

    def _rows(self, split: str, cuts: list[tuple[int, int]]) -> Batch:
        """Each token of these cuts but the last, and the one after it; nothing is asked behind the end of a split."""
        ids = np.zeros((len(cuts), self.length), np.int64)
        labels = np.is_full((len(cuts), self.length), IGNORED, np.int64)
        for row, (start, stop) in enumerate(cuts):
            cut = self.spans[split].ids[start:stop]
            ids[row, : len(cut) - 1], labels[row, : len(cut) - 1] = cut[:-1], cut[1:]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> Tally:
        """Nats for each token, and bits for each byte of text that the tokens stand for."""
        asked = batch.labels != IGNORED
        labels = batch.labels[asked]
        chosen = logits[asked].float().log_softmax(-1).gather(-1, labels[:, None])
        nats = -float(chosen.double().sum())
        tally: dict[str, tuple[float, int]] = {"nats": (nats, len(labels))}
        if self._widths is not None:
            count = int(self._widths[labels.cpu()].sum())
            tally["bits_per_byte"] = nats / math.log(2), count
        return tally

    @property
    def chance(self) -> Mapping[str, float]:
        told = {"nats": math.log(self.size)}
        if self._widths is None:
            return told
        train = self.spans["train"]
        width = float(train.counts(self.size) @ self._widths.numpy()) / len(train)  # of a token, on average
        return told | {"bits_per_byte": told["nats"] / math.log(2) / width}

    @property
    def usage(self) -> ProcessorSpec:
        around = () if self.end is None else (self.end,)
        return replace(super().usage, before=around, end=around)

    def model(self) -> ModelSpec:
        return decoder(self.size)


def ranges(counts: Mapping[str, int], shares: tuple[float, float]) -> dict[str, tuple[str, int, int]]:
    """Whose file each split is in, and from where to where: its own, or the end of the one to train on.

    >>> ranges({"train": 10}, (0.2, 0.1))
    {'train': ('train', 0, 7), 'valid': ('train', 7, 9), 'test': ('train', 9, 10)}
    """
    own = {split: (split, 0, count) for split, count in counts.items()}
    if "valid" in counts:
        return own
    valid, test = shares
    count = counts["train"]
    first, second = cuts(count, (valid, 0.0 if "test" in counts else test))
    divided = {"train": ("train", 0, first), "valid": ("train", first, second), "test": ("train", second, count)}
    return divided | {split: own[split] for split in own if split != "train"}


def cuts(count: int, shares: tuple[float, float]) -> tuple[int, int]:
    """Where the splits for validation and test begin; as in nanoGPT, a train split has its whole share."""
    valid, test = shares
    return int(count * (1 - valid - test) + ROUNDING), int(count * (1 - test) + ROUNDING)
