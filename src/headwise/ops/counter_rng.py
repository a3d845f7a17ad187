"""Random numbers by address, the same on every machine and in any order; and dropout that costs little on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SpecError

# --- Dropout -------------------------------------------------------------------------------------------


PROBABILITY_STEPS = 1 << 16  # resolution of a rate on a CPU


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """x with a share `rate` of its numbers zero, each alone by chance, and the others larger so that means stay.

    On a CPU torch draws 32 random bits or more for each number, one by one, which takes as long as a product of
    matrices. 16 bits are drawn here, four numbers at a time: rates are multiples of 1/65,536.

    >>> torch.equal(dropout(torch.ones(3), 0.5, training=False), torch.ones(3))
    True
    """
    if not training or not rate:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate, training)
    cut = round(rate * PROBABILITY_STEPS)
    if cut == PROBABILITY_STEPS:
        return x * 0
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    stay = bits.view(torch.int16)[: x.numel()].view(x.shape) >= cut - PROBABILITY_STEPS // 2
    return x * stay.to(x.dtype).mul_(PROBABILITY_STEPS / (PROBABILITY_STEPS - cut))


# --- Random numbers by address -------------------------------------------------------------------------

RandomWords = NDArray[np.uint64]  # each below 2**32
Ints = NDArray[np.int64]

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
STRIDES = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
PREFETCHED_NUMBERS = 64  # numbers of a stream that are drawn together
MAX_SEED = 0xFFFFFFFF  # where a task counts attempts and splits: no example reads what a stream does


def philox(counter: Sequence[RandomWords], key: tuple[int, int]) -> list[RandomWords]:
    """Four random words for each counter of four words: Philox4x32-10 (Salmon et al., SC 2011).

    The first answer among those its authors publish:

    >>> [hex(int(word)) for word in philox([np.uint64(0)] * 4, (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    a, b, c, d = counter
    for turn in range(ROUNDS):
        first, second = (np.uint64((key[n] + turn * STRIDES[n]) & int(LOW)) for n in (0, 1))
        low, high = FACTORS[0] * a, FACTORS[1] * c
        a, b, c, d = (high >> HALF) ^ b ^ first, high & LOW, (low >> HALF) ^ d ^ second, low & LOW
    return [a, b, c, d]


@dataclass
class RandomStreams:
    """The streams of some examples, side by side: what is drawn for one does not depend on its neighbours.

    `example` and `attempt` [B] say which streams; whoever refuses an example reads its next attempt. Every method
    gives [B, count] and moves all streams on by as much.

    >>> both = RandomStreams(0, 0, np.array([4, 7]), np.array([0, 0])).integers(100, 5)
    >>> alone = RandomStreams(0, 0, np.array([7]), np.array([0])).integers(100, 5)
    >>> (both[1] == alone[0]).all()
    np.True_
    """

    seed: int
    split: int
    example: NDArray[np.integer]
    attempt: NDArray[np.integer]
    used: int = 0  # blocks of four words

    def __len__(self) -> int:
        return len(self.example)

    def blocks(self, row: NDArray[np.integer], number: NDArray[np.integer]) -> list[RandomWords]:
        """Four words each: block `number` of the stream of `row`, wherever the streams stand."""
        example = self.example[row].astype(np.uint64)
        tries = self.attempt[row].astype(np.uint64) * np.uint64(4) + np.uint64(self.split)
        counter = (number.astype(np.uint64), tries, example & LOW, example >> HALF)
        return philox(counter, (self.seed & int(LOW), self.seed >> 32))

    def words(self, count: int) -> RandomWords:
        """Words as they come."""
        blocks = -(-count // 4)
        row, number = np.indices((len(self), blocks))
        self.used += blocks
        drawn = self.blocks(row.ravel(), number.ravel() + (self.used - blocks))
        return np.stack(drawn, 1).reshape(len(self), 4 * blocks)[:, :count]

    def integers(self, limit: int | Ints, count: int) -> Ints:
        """Whole numbers 0 .. limit - 1, alike likely but for one part in 2**32 / limit; a limit may be [B, count]."""
        return ((self.words(count) * np.asarray(limit, np.uint64)) >> HALF).astype(np.int64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Numbers between 0 and 1, never either."""
        return (self.words(count).astype(np.float64) + 0.5) / 2.0**32

    def distinct(self, limit: int, count: int) -> Ints:
        """Different whole numbers 0 .. limit - 1 in random order.

        Which ones by Floyd's rule (CACM 30:9, 1987): one more is allowed at every step, and taken when the number
        drawn was there before. Then they are shuffled.
        """
        rows, places = np.arange(len(self)), np.arange(count)
        drawn, swaps = self.integers(limit - count + 1 + places, count), places + self.integers(count - places, count)
        for place in range(1, count):
            again = (drawn[:, :place] == drawn[:, place, None]).any(1)
            drawn[again, place] = limit - count + place
        for place in range(count):
            drawn[rows, place], drawn[rows, swaps[:, place]] = drawn[rows, swaps[:, place]], drawn[rows, place]
        return drawn

    def choice(self, options: Sequence[int]) -> Ints:
        """One of these for each example, [B]."""
        return np.asarray(options, np.int64)[self.integers(len(options), 1)[:, 0]]


@dataclass
class RandomStream:
    """Numbers between 0 and 1, one after the other; the n-th of them follows from seed, number and n alone.

    `used` says how many were drawn: a stream that is made with it goes on where another was left.

    >>> first, again = RandomStream(7, number=3), RandomStream(7, number=3, used=1)
    >>> _, second = first.uniform(), first.uniform()
    >>> second == again.uniform()
    True
    """

    seed: int
    number: int = 0
    used: int = 0
    _ahead: list[float] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64 or not 0 <= self.number < 2**64:
            raise SpecError(f"seed={self.seed}, number={self.number} name no stream; give numbers in 0..2**64 - 1")

    def uniform(self) -> float:
        """The next number, of 52 bits; never 0 or 1."""
        at = self.used % PREFETCHED_NUMBERS
        if not self._ahead or not at:
            self._ahead = self._units(self.used - at)
        self.used += 1
        return self._ahead[at]

    def _units(self, first: int) -> list[float]:
        """As many from an even place on, for they are cheap together: two of each block of four words."""
        block = np.arange(first // 2, (first + PREFETCHED_NUMBERS) // 2, dtype=np.uint64)
        row = [np.full_like(block, part) for part in (MAX_SEED, self.number & int(LOW), self.number >> 32)]
        words = philox([block, *row], (self.seed & int(LOW), self.seed >> 32))
        high, low = np.stack([words[0], words[2]], 1).ravel(), np.stack([words[1], words[3]], 1).ravel()
        whole = (high >> np.uint64(6) << np.uint64(26)) | (low >> np.uint64(6))
        return ((whole.astype(np.float64) + 0.5) / 2.0**52).tolist()
