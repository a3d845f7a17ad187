"""What may be put in the place of what a head says: a share of it, a vector, another row's, noise."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .watching import AttentionCall

MAX_SEED = 2**31


class HeadCall(NamedTuple):
    """One head in one call: what it says itself, [B, T, width], which tokens [B, T] are asked for, if not all of them,
    and what the attention worked with, where a patch sees it."""

    site: str
    head: int
    output: Tensor
    token_mask: Tensor | None
    call: AttentionCall | None


PatchFunction = Callable[[HeadCall], Tensor]


class HeadPatch(ABC):
    """What a head says instead of its own."""

    needs_call: ClassVar[bool] = False  # whether it needs what the attention worked with

    @abstractmethod
    def make_function(self, site: str, head: int) -> PatchFunction:
        """What it says from now on, at one head."""


@dataclass(frozen=True)
class ScaledOutput(HeadPatch):
    """A share of its own."""

    scale: float

    def make_function(self, site: str, head: int) -> PatchFunction:
        return lambda moment: moment.output * self.scale


@dataclass(frozen=True, eq=False)
class ConstantOutput(HeadPatch):
    """A vector [width], or one for each token [B, T, width]."""

    value: Tensor

    def make_function(self, site: str, head: int) -> PatchFunction:
        return self._output

    def _output(self, moment: HeadCall) -> Tensor:
        value, own = self.value, moment.output
        if value.shape[-1] != own.shape[-1]:
            raise ValueError(f"heads of {moment.site} say {own.shape[-1]} numbers, not {value.shape[-1]}; give as many")
        if value.dim() == 3:
            check_shape(moment.site, value, own)
        return value.to(own).expand_as(own)


@dataclass(frozen=True)
class Resample(HeadPatch):
    """What the same head says for another row of the batch: row `rows[n]` for row n, or rows drawn from `seed`.

    Drawn rows are never a row's own. Heads that are given one seed read the same rows. Rows of one length are meant:
    where another row has padding, its padding is what is read. A model that cuts pictures into windows makes a row of
    each.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    >>> with hw.patch(net, {(0, "all"): Resample(rows=(1, 0))}):
    ...     swapped = net(ids)
    >>> torch.equal(swapped, net(ids))
    False
    """

    rows: tuple[int, ...] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.seed is None):
            raise ValueError("rows and seed are two ways to say the same; give rows=(1, 0), say, or seed=0")
        if self.rows is not None:
            object.__setattr__(self, "rows", tuple(self.rows))
            if not self.rows or any(type(row) is not int or row < 0 for row in self.rows):
                raise ValueError(f"rows={self.rows!r} names no rows; give the number of a row for each, as in (1, 0)")
        if self.seed is not None:
            check_seed(self.seed)

    def make_function(self, site: str, head: int) -> PatchFunction:
        draws = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        return partial(self._output, draws)

    def _output(self, draws: torch.Generator | None, moment: HeadCall) -> Tensor:
        rows = len(moment.output)
        order = self._sample_rows(draws, rows) if self.rows is None else self.rows
        if len(order) != rows or max(order) >= rows:
            raise ValueError(f"{moment.site} reads {rows} rows, and rows={order} are not that many of 0..{rows - 1}")
        return moment.output[torch.tensor(order, device=moment.output.device)]

    @staticmethod
    def _sample_rows(draws: torch.Generator | None, rows: int) -> tuple[int, ...]:
        """One cycle through all rows, so that none keeps its own."""
        if rows < 2:
            raise ValueError("a batch of one row has no other row to read; give several")
        cycle = torch.randperm(rows, generator=draws).tolist()
        after = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        return tuple(after[row] for row in range(rows))


@dataclass(frozen=True, eq=False)
class Noise(HeadPatch):
    """Gaussian noise, channel by channel, of this mean and standard deviation: a number, or a vector [width].

    What is left out is the head's own, over the tokens that are patched in a call. Each head draws from a stream of its
    own, and every call draws on; to enter the context again is to begin again.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> said = []
    >>> for _ in range(2):
    ...     with hw.patch(net, {(0, 1): Noise(seed=7)}):
    ...         said.append(net(torch.tensor([[3, 1, 4]])))
    >>> torch.equal(*said)
    True
    """

    seed: int = 0
    mean: Tensor | float | None = None
    std: Tensor | float | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("mean", "std"):
            told = getattr(self, name)
            if told is None:
                continue
            if type(told) not in (int, float) and not (isinstance(told, Tensor) and told.dim() == 1):
                raise ValueError(f"{name} is of type {type(told).__name__}; give a number, or a tensor [width]")
            if not torch.as_tensor(told).isfinite().all() or (name == "std" and (torch.as_tensor(told) < 0).any()):
                raise ValueError(f"{name} holds what no Gaussian has; give finite numbers, std not below 0")

    def make_function(self, site: str, head: int) -> PatchFunction:
        number = zlib.crc32(f"{self.seed} {site} {head}".encode())  # torch's generator takes 32 bits, and no more
        return partial(self._output, torch.Generator().manual_seed(number))

    def _output(self, draws: torch.Generator, moment: HeadCall) -> Tensor:
        own = moment.output
        mean, std = (self._statistic(moment, name) for name in ("mean", "std"))
        drawn = torch.randn(own.shape, generator=draws, dtype=torch.float64).to(own)
        return (mean + std * drawn).to(own)

    def _statistic(self, moment: HeadCall, name: str) -> Tensor:
        told, own = getattr(self, name), moment.output
        if told is not None:
            told = torch.as_tensor(told, device=own.device)
            if told.dim() and told.shape[0] != own.shape[-1]:
                raise ValueError(f"heads of {moment.site} say {own.shape[-1]} numbers, not {len(told)}; give as many")
            return told
        those = own.flatten(0, -2) if moment.token_mask is None else own[moment.token_mask.expand(own.shape[:-1])]
        if len(those) < 2:
            raise ValueError(f"{len(those)} token has no mean and deviation of its own; give mean= and std= to Noise")
        those = those.to(torch.promote_types(own.dtype, torch.float32))
        return those.mean(0) if name == "mean" else those.std(0)


def check_seed(seed: object) -> None:
    """Refuse what is no seed."""
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed={seed!r} is no seed; give a whole number in 0..{MAX_SEED - 1}")


def check_shape(site: str, value: Tensor, output: Tensor) -> None:
    """Refuse what is told of other rows and tokens than there are; one may stand for all."""
    said, seen = list(value.shape[:2]), list(output.shape[:2])
    if output.dim() != 3 or any(one not in (1, count) for one, count in zip(said, seen, strict=True)):
        raise ValueError(f"{site} reads {list(output.shape[:-1])} tokens, told were {said}; give as many")
