"""What heads say over data: their means and their spread; and what they say of one input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .editing import Head
from .feeding import Looker, over
from .patches import Noise

KINDS = ("overall", "position")


def head_means(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[Head] | None = None, *, kind: str = "overall"
) -> dict[Head, Tensor]:
    """The mean of what each head says over the tokens of a data set, in float64: [width], or by position [1, T, width].

    A batch is what the model reads: a tensor, or a mapping of what it is called with; or a pair of this and of the
    tokens that count: a mask [B, T], or one for each stack by its name. Without, what an `attention_mask` hides does
    not count, nor does padding among `tokens` of ours. With kind="position" rows begin at their first column.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> means = head_means(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])], [(0, 1)])
    >>> [(head, mean.shape) for head, mean in means.items()]
    [(('decoder.0.attention', 1), torch.Size([4]))]
    >>> with hw.patch(net, means):
    ...     _ = net(torch.tensor([[3, 1, 4]]))
    """
    if kind not in KINDS:
        raise ValueError(f'kind={kind!r} is no kind of mean; use "overall" or "position"')
    sums = over(model, batches, heads, partial(Sums, kind=kind))
    return {(one.site, head): one.mean[..., n, :] for one in sums for n, head in enumerate(one.those)}


def head_noise(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[Head] | None = None, *, seed: int = 0
) -> dict[Head, Noise]:
    """Noise with the mean and the standard deviation of what each head says over a data set; batches as `head_means`.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> with hw.patch(net, head_noise(net, [torch.tensor([[3, 1, 4]])], [(0, 1)], seed=3)):
    ...     _ = net(torch.tensor([[3]]))
    """
    Noise(seed)  # which refuses what is no seed
    sums = over(model, batches, heads, Sums)
    return {(one.site, head): Noise(seed, one.mean[n], one.std[n]) for one in sums for n, head in enumerate(one.those)}


def head_outputs(model: nn.Module, inputs: Any, heads: Iterable[Head] | None = None) -> dict[Head, Tensor]:
    """What each head says of one input, [B, T, width], before it is merged.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> other = head_outputs(net, torch.tensor([[3, 1, 4]]), [(0, 1)])
    >>> with hw.patch(net, other):
    ...     _ = net(torch.tensor([[1, 5, 9]]))
    """
    kept = over(model, [(inputs, {})], heads, Kept)
    return {(one.site, head): said for one in kept for head, said in one.said.items()}


@dataclass(eq=False)
class Kept(Looker):
    """It keeps them."""

    said: dict[int, Tensor] = field(default_factory=dict)

    def look(self, said: Tensor, counts: Tensor) -> None:
        if self.said:
            raise ValueError(f"{self.site} ran twice; give an input that the model reads in one call")
        self.said = {head: said[..., n, :].clone() for n, head in enumerate(self.those)}


@dataclass(eq=False)
class Sums(Looker):
    """It keeps count, mean and squared distances from the mean, brought up to date batch by batch.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """

    kind: str = "overall"
    count: Tensor = field(default_factory=lambda: torch.zeros(()))
    means: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))

    def look(self, said: Tensor, counts: Tensor) -> None:
        if self.kind == "position":
            self._check_columns(said, counts)
        else:
            said, counts = said.flatten(0, -3)[:, None], counts.flatten()[:, None]
        kept = counts[..., None, None]
        own = torch.where(kept, said.double(), 0.0)
        count = kept.sum(0).double()
        mean = own.sum(0) / count.clamp(min=1)
        squares = torch.where(kept, (own - mean).square(), 0.0).sum(0)
        if not mean.isfinite().all():
            raise ValueError(
                f"heads of {self.site} say numbers that are not finite; say which tokens count, or mend it"
            )
        self._add(count.cpu(), mean.cpu(), squares.cpu())

    def _check_columns(self, said: Tensor, counts: Tensor) -> None:
        if said.dim() != 4 or (counts[:, 1:] & ~counts[:, :-1]).any():
            raise ValueError(f"positions of {self.site} are its columns; give rows that are padded on the right")

    def _add(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        if not self.means.dim():
            self.count, self.means, self.squares = count, mean, squares
            return
        long = max(len(count), len(self.count))
        count, mean, squares = (_longer(new, long) for new in (count, mean, squares))
        own, means, seen = (_longer(old, long) for old in (self.count, self.means, self.squares))
        self.count, far = own + count, mean - means
        share = count / self.count.clamp(min=1)
        self.means = means + far * share
        self.squares = seen + squares + far.square() * own * share

    @property
    def mean(self) -> Tensor:
        """Their mean, [heads, width] or [1, T, heads, width]."""
        there = self.count.flatten() > 0
        if not there.any():
            raise ValueError(f"no token of {self.site} counts; give batches with some that do")
        return self.means[0] if self.kind == "overall" else self.means[there][None]

    @property
    def std(self) -> Tensor:
        """Their standard deviation, [heads, width]."""
        if self.count.min() < 2:
            raise ValueError(f"one token of {self.site} has no standard deviation; give more")
        return (self.squares / (self.count - 1)).sqrt()[0]


def _longer(one: Tensor, length: int) -> Tensor:
    return torch.cat([one, one.new_zeros(length - len(one), *one.shape[1:])])
