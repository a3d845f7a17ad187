"""Heads that look by distance alone: their weights, replaced by the mean over all pairs equally far from each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .editing import HeadRef
from .feeding import OutputObserver, observe_dataset
from .patches import HeadCall, HeadPatch, PatchFunction
from .watching import AttentionCall, HeadValues

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}  # relative; of what is narrower, less can be asked
LOW_PRECISION_TOLERANCE = 0.05


@dataclass(frozen=True, eq=False)
class OffsetWeights(HeadPatch):
    """A head whose weight of a key follows from its offset, query minus key, alone.

    `weights[n]` belongs to offset n - longest + 1, where `longest` is how many tokens the longest text had; it is the
    mean over `pairs[n]` pairs. The weights of a query are brought to the sum `mass` over the keys that it may read:
    one, or less where a head has a sink.
    """

    needs_call: ClassVar[bool] = True
    weights: Tensor
    pair_counts: Tensor
    row_sum: float

    @property
    def max_length(self) -> int:
        """How many tokens the longest text had."""
        return (len(self.weights) + 1) // 2

    def make_function(self, site: str, head: int) -> PatchFunction:
        return self._output

    def _output(self, moment: HeadCall) -> Tensor:
        assert moment.call is not None
        own_BTV, reading = moment.output, moment.call.head_values(moment.head)
        a_BTS = self.weights_at(moment.site, _allowed_pairs(moment.site, moment.call, reading, own_BTV), moment.token_mask)
        return (a_BTS.to(reading.v_BSV) @ reading.v_BSV).to(own_BTV)

    def weights_at(self, site: str, readable_BTS: Tensor, token_mask: Tensor | None) -> Tensor:
        """The weights over the keys that each query may read, in float64; only the tokens asked for need be known."""
        count, device = readable_BTS.shape[1], readable_BTS.device
        offset = _make_offsets(count, device) - count + 1
        beyond = offset.abs() >= self.max_length
        place = (offset + self.max_length - 1).clamp(0, len(self.weights) - 1)
        unknown = readable_BTS & (beyond | (self.pair_counts.to(device)[place] == 0))
        if token_mask is not None:
            unknown = unknown & token_mask[..., None]
        if unknown.any():
            far = int(offset[unknown.any(0)][0])
            raise ValueError(
                f"{site} reads at offset {far}, of which the data say nothing; give offset_means longer texts"
            )
        a_BTS = torch.where(readable_BTS, self.weights.to(device)[place], 0.0)
        total_BT = a_BTS.sum(-1)
        return a_BTS * torch.where(total_BT > 0, self.row_sum / total_BT, 0.0)[..., None]


def offset_means(model: nn.Module, batches: Iterable[Any], heads: Iterable[HeadRef] | None = None) -> dict[HeadRef, OffsetWeights]:
    """For each head, the mean weight of all keys at one offset from their query, over a data set; for `hw.patch`.

    Batches are those of `hw.head_means`; queries that do not count are left out. What a head loses when it is patched
    so is what it knew of content.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> means = offset_means(net, [ids], [(0, 1)])
    >>> means["decoder.0.attention", 1].pairs.tolist()  # at offsets -2 .. 2
    [0.0, 0.0, 3.0, 2.0, 1.0]
    >>> with hw.patch(net, means):
    ...     _ = net(ids)
    """
    return {
        (one.site, head): OffsetWeights(*one.mean_weights(head)) for one in observe_dataset(model, batches, heads, OffsetObserver)
        for head in one.head_indices
    }  # fmt: skip


@dataclass(eq=False)
class OffsetTotals:
    """Of one head: the sum of its weights at each offset, of how many pairs, and the sum of all rows, of how many."""

    weights: Tensor
    pair_counts: Tensor
    row_sum: float = 0.0
    num_rows: int = 0


@dataclass(eq=False)
class OffsetObserver(OutputObserver):
    """It sums weights by offset."""

    needs_call = True
    totals: dict[int, OffsetTotals] = field(default_factory=dict)

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        seen, self.call = self.call, None
        assert seen is not None
        for n, head in enumerate(self.head_indices):
            reading = seen.head_values(head)
            readable_BTS = _allowed_pairs(self.site, seen, reading, outputs[..., n, :])
            a_BTS = seen.head_weights(reading.score_head)
            self._check_output(head, a_BTS, reading, torch.where(token_mask[..., None], outputs[..., n, :], 0.0))
            self._add(head, a_BTS.double(), readable_BTS & token_mask[..., None])

    def _check_output(self, head: int, a_BTS: Tensor, reading: HeadValues, said_BTV: Tensor) -> None:
        """Only what is weights times values can be had by other weights."""
        exact = torch.promote_types(said_BTV.dtype, torch.float32)
        read_BTV = a_BTS.to(exact) @ reading.v_BSV.to(exact)
        far = torch.where((said_BTV != 0).any(-1, keepdim=True), read_BTV - said_BTV.to(exact), 0.0).abs().max()
        if not far <= TOLERANCE.get(said_BTV.dtype, LOW_PRECISION_TOLERANCE) * said_BTV.abs().max() or (a_BTS < 0).any():
            raise ValueError(
                f"head {head} of {self.site} says more than the mean of what it reads; other weights do not"
            )

    def _add(self, head: int, a_BTS: Tensor, counted_BTS: Tensor) -> None:
        count = a_BTS.shape[1]
        place = _make_offsets(count, a_BTS.device).expand_as(counted_BTS)[counted_BTS]
        weights = torch.bincount(place, a_BTS[counted_BTS], minlength=2 * count - 1).cpu()
        pairs = torch.bincount(place, minlength=2 * count - 1).double().cpu()
        had = self.totals.get(head, OffsetTotals(torch.zeros(1).double(), torch.zeros(1).double()))
        self.totals[head] = OffsetTotals(
            _add_centred(had.weights, weights), _add_centred(had.pair_counts, pairs), had.row_sum + float(weights.sum()),
            had.num_rows + int(counted_BTS.any(-1).sum()),
        )  # fmt: skip

    def mean_weights(self, head: int) -> tuple[Tensor, Tensor, float]:
        """Means by offset, of how many pairs, and the mean sum of a row."""
        total = self.totals[head]
        if not total.num_rows:
            raise ValueError(f"no token of {self.site} counts; give batches with some that do")
        return total.weights / total.pair_counts.clamp(min=1), total.pair_counts, total.row_sum / total.num_rows


def _make_offsets(count: int, device: torch.device) -> Tensor:
    """Query minus key for all pairs of so many tokens, counted from the least."""
    place = torch.arange(count, device=device)
    return place[:, None] - place + count - 1


def _add_centred(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two that are centred alike."""
    short, long = sorted((one, other), key=len)
    around = (len(long) - len(short)) // 2
    return long + torch.nn.functional.pad(short, (around, around))


def _allowed_pairs(site: str, core: AttentionCall, reading: HeadValues, own_BTV: Tensor) -> Tensor:
    """Which keys each query of a head may read, [B or 1, T, S], if its weights by offset can be meant."""
    queries, keys = own_BTV.shape[1], reading.v_BSV.shape[1]
    if own_BTV.dim() != 3 or queries != keys:
        raise ValueError(
            f"{site} reads {keys} keys with {queries} queries; offsets are known where a text reads itself"
        )
    if reading.v_BSV.shape[-1] != own_BTV.shape[-1]:
        wide = own_BTV.shape[-1], reading.v_BSV.shape[-1]
        raise ValueError(f"heads of {site} say {wide[0]} numbers and read {wide[1]}; these are not the same")
    allowed = core.allowed_pairs()
    return allowed[:, reading.score_head if allowed.shape[1] > 1 else 0].expand(-1, queries, keys)
