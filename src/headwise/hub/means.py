"""What heads say over data: their means and their spread; and what they say of one input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .editing import HeadRef
from .feeding import OutputObserver, observe_dataset
from .patches import Noise

MEAN_KINDS = ("overall", "position")


def head_means(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[HeadRef] | None = None, *, kind: str = "overall"
) -> dict[HeadRef, Tensor]:
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
    if kind not in MEAN_KINDS:
        raise ValueError(f'kind={kind!r} is no kind of mean; use "overall" or "position"')
    sums = observe_dataset(model, batches, heads, partial(OutputMoments, kind=kind))
    return {(one.site, head): one.mean[..., n, :] for one in sums for n, head in enumerate(one.head_indices)}


def head_noise(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[HeadRef] | None = None, *, seed: int = 0
) -> dict[HeadRef, Noise]:
    """Noise with the mean and the standard deviation of what each head says over a data set; batches as `head_means`.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> with hw.patch(net, head_noise(net, [torch.tensor([[3, 1, 4]])], [(0, 1)], seed=3)):
    ...     _ = net(torch.tensor([[3]]))
    """
    Noise(seed)  # which refuses what is no seed
    sums = observe_dataset(model, batches, heads, OutputMoments)
    return {(one.site, head): Noise(seed, one.mean[n], one.std[n]) for one in sums for n, head in enumerate(one.head_indices)}


def head_outputs(model: nn.Module, inputs: Any, heads: Iterable[HeadRef] | None = None) -> dict[HeadRef, Tensor]:
    """What each head says of one input, [B, T, width], before it is merged.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> other = head_outputs(net, torch.tensor([[3, 1, 4]]), [(0, 1)])
    >>> with hw.patch(net, other):
    ...     _ = net(torch.tensor([[1, 5, 9]]))
    """
    kept = observe_dataset(model, [(inputs, {})], heads, OutputRecorder)
    return {(one.site, head): said for one in kept for head, said in one.outputs.items()}


@dataclass(eq=False)
class OutputRecorder(OutputObserver):
    """It keeps them."""

    outputs: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        if self.outputs:
            raise ValueError(f"{self.site} ran twice; give an input that the model reads in one call")
        self.outputs = {head: outputs[..., n, :].clone() for n, head in enumerate(self.head_indices)}


@dataclass(eq=False)
class OutputMoments(OutputObserver):
    """It keeps count, mean and squared distances from the mean, brought up to date batch by batch.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """

    kind: str = "overall"
    count: Tensor = field(default_factory=lambda: torch.zeros(()))
    means: Tensor = field(default_factory=lambda: torch.zeros(()))
    squared_deviations: Tensor = field(default_factory=lambda: torch.zeros(()))

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        if self.kind == "position":
            self._check_columns(outputs, token_mask)
        else:
            outputs, token_mask = outputs.flatten(0, -3)[:, None], token_mask.flatten()[:, None]
        kept = token_mask[..., None, None]
        own = torch.where(kept, outputs.double(), 0.0)
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
            self.count, self.means, self.squared_deviations = count, mean, squares
            return
        long = max(len(count), len(self.count))
        count, mean, squares = (_pad_positions(new, long) for new in (count, mean, squares))
        own, means, seen = (_pad_positions(old, long) for old in (self.count, self.means, self.squared_deviations))
        self.count, far = own + count, mean - means
        share = count / self.count.clamp(min=1)
        self.means = means + far * share
        self.squared_deviations = seen + squares + far.square() * own * share

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
        return (self.squared_deviations / (self.count - 1)).sqrt()[0]


def _pad_positions(one: Tensor, length: int) -> Tensor:
    return torch.cat([one, one.new_zeros(length - len(one), *one.shape[1:])])
