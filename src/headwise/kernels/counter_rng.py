"""Counter-based random numbers (Philox), equal on every machine and in any order; and a fast
dropout for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..util.errors import SpecError

# --- Dropout --------------------------------------------------------------------------------------


PROBABILITY_STEPS = 1 << 16  # resolution of dropout rates on a CPU


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout: zeroes each element with probability `rate` and divides the others by 1 - `rate`.

    On a CPU, torch draws at least 32 random bits per element, one element at a time, which takes as
    long as a matrix product. This function draws 16 bits per element, four elements at a time, and
    rounds `rate` to a multiple of 1/65,536.

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


# --- Counter-based random numbers -----------------------------------------------------------------

RandomWords = NDArray[np.uint64]  # each below 2**32
Ints = NDArray[np.int64]

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
STRIDES = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
PREFETCHED_NUMBERS = 64  # numbers of a stream that are computed together
# Counter word of `RandomStream`. `RandomStreams` puts attempt and split there, which are smaller:
# the two kinds of streams never use the same counter.
STREAM_MARK = 0xFFFFFFFF


def philox(counter: Sequence[RandomWords], key: tuple[int, int]) -> list[RandomWords]:
    """Four random words for each counter of four words: Philox4x32-10 (Salmon et al., SC 2011).

    The first test vector that its authors publish:

    >>> [hex(int(word)) for word in philox([np.uint64(0)] * 4, (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    a, b, c, d = counter
    for step in range(ROUNDS):
        first, second = (np.uint64((key[n] + step * STRIDES[n]) & int(LOW)) for n in (0, 1))
        low = FACTORS[0] * a
        high = FACTORS[1] * c
        a = (high >> HALF) ^ b ^ first
        b = high & LOW
        c = (low >> HALF) ^ d ^ second
        d = low & LOW
    return [a, b, c, d]


@dataclass
class RandomStreams:
    """One random stream per example of a batch; the numbers of an example do not depend on the rest
    of the batch.

    `example` and `attempt` [B] select the streams; a task that rejects an example uses its next
    attempt. Every method returns [B, count] numbers and advances all streams equally.

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
        """Four random words for each row: block `number` of its stream. Does not advance the
        streams.
        """
        example = self.example[row].astype(np.uint64)
        attempt_and_split = self.attempt[row].astype(np.uint64) * np.uint64(4) + np.uint64(
            self.split
        )
        counter = (number.astype(np.uint64), attempt_and_split, example & LOW, example >> HALF)
        return philox(counter, (self.seed & int(LOW), self.seed >> 32))

    def words(self, count: int) -> RandomWords:
        """The next random words of 32 bits; starts a new block of four words at every call."""
        blocks = -(-count // 4)
        row, number = np.indices((len(self), blocks))
        self.used += blocks
        words = self.blocks(row.ravel(), number.ravel() + (self.used - blocks))
        return np.stack(words, 1).reshape(len(self), 4 * blocks)[:, :count]

    def integers(self, limit: int | Ints, count: int) -> Ints:
        """Integers 0 .. limit - 1, uniform up to a relative error of limit / 2**32; `limit` may be
        [B, count].
        """
        return ((self.words(count) * np.asarray(limit, np.uint64)) >> HALF).astype(np.int64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Uniform numbers strictly between 0 and 1."""
        return (self.words(count).astype(np.float64) + 0.5) / 2.0**32

    def distinct(self, limit: int, count: int) -> Ints:
        """`count` different integers 0 .. limit - 1 in random order.

        Floyd's algorithm (CACM 30:9, 1987) samples the set: step n samples from 0 .. limit - count
        + n, and takes the largest of these if the sample occurred before. A Fisher-Yates shuffle
        orders it.
        """
        rows = np.arange(len(self))
        places = np.arange(count)
        sample = self.integers(limit - count + 1 + places, count)
        swaps = places + self.integers(count - places, count)
        for place in range(1, count):
            is_repeated = (sample[:, :place] == sample[:, place, None]).any(1)
            sample[is_repeated, place] = limit - count + place
        for place in range(count):
            sample[rows, place], sample[rows, swaps[:, place]] = (
                sample[rows, swaps[:, place]],
                sample[rows, place],
            )
        return sample

    def choice(self, options: Sequence[int]) -> Ints:
        """One of the options for each example, [B]."""
        return np.asarray(options, np.int64)[self.integers(len(options), 1)[:, 0]]


@dataclass
class RandomStream:
    """Random stream of uniform numbers; the n-th one depends on `seed`, `number` and n alone.

    `used` counts the numbers returned so far; a new stream with the same `used` continues where
    another one stopped.

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
            raise SpecError(
                f"no stream has seed={self.seed}, number={self.number}; give integers in 0..2**64 "
                "- 1"
            )

    def uniform(self) -> float:
        """The next number, with 52 random bits, strictly between 0 and 1."""
        at = self.used % PREFETCHED_NUMBERS
        if not self._ahead or not at:
            self._ahead = self._units(self.used - at)
        self.used += 1
        return self._ahead[at]

    def _units(self, first: int) -> list[float]:
        """`PREFETCHED_NUMBERS` numbers from an even index on; each block of
        four words gives two.
        """
        block = np.arange(first // 2, (first + PREFETCHED_NUMBERS) // 2, dtype=np.uint64)
        row = [
            np.full_like(block, part)
            for part in (STREAM_MARK, self.number & int(LOW), self.number >> 32)
        ]
        words = philox([block, *row], (self.seed & int(LOW), self.seed >> 32))
        high = np.stack([words[0], words[2]], 1).ravel()
        low = np.stack([words[1], words[3]], 1).ravel()
        whole = (high >> np.uint64(6) << np.uint64(26)) | (low >> np.uint64(6))
        return ((whole.astype(np.float64) + 0.5) / 2.0**52).tolist()
