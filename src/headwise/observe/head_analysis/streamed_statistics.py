"""Head metrics from the statistics of a GPU kernel, which never stores the weights of a text.

`CallStatistics` holds the statistics of one attention call on the device. `read_statistics` copies
those of all calls of a text to the host at once and returns the sums that head metrics compute from
bands of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.head_statistics import (
    FIRST_BY_OFFSET,
    INPUT_DTYPES,
    NUM_LANES,
    NUM_OFFSETS,
    NUM_SLOTS,
    PLACES,
    HeadStatistics,
    ScoreInputs,
    TokenInputs,
    head_statistics,
    uniform_statistics,
)
from ..inspect.site import AttentionInputs
from .annotated_examples import TokenAnnotations
from .head_metrics import (
    HEAD_METRICS,
    MAX_DISTANCE,
    MAX_OFFSET,
    SUPPORT_FRACTIONS,
    find_rarest_tokens,
    mean_random_breadth,
    sample_rows,
    sum_support,
)
from .resampling import Array

TextSums = tuple[Array, Array]
STREAMED_METRICS = frozenset(HEAD_METRICS)


class CallStatistics(NamedTuple):
    """Statistics of one attention call on the device, [H, slots]; of its heads, and of one head
    that reads every allowed key equally (the chance level).
    """

    site: str
    is_self_attention: bool
    own: Tensor
    uniform: Tensor


class StatisticsStream:
    """Runs the kernel on the calls of one text; layers with one mask share the chance level."""

    def __init__(self) -> None:
        self.calls: list[CallStatistics] = []
        self._uniform: list[tuple[tuple[object, ...], Tensor]] = []

    def add_call(
        self, site: str, inputs: AttentionInputs, query: TokenAnnotations, key: TokenAnnotations
    ) -> bool:
        """Compute the statistics of the first text of a call; return False for dtypes that the
        kernel does not read.
        """
        if inputs.q_BTHK.dtype not in INPUT_DTYPES:
            return False
        device = inputs.q_BTHK.device
        key_ids = key.ids.to(device)
        tokens = TokenInputs(
            key_ids if query is key else query.ids.to(device),
            key_ids,
            key.is_sink.to(device),
            key.is_separator.to(device),
            key.is_punctuation.to(device),
            find_rarest_tokens(key).to(device),
            sample_rows(query.count, device),
        )
        biases = [one[0] for one in inputs.additive_masks()]
        masks = [one[0] for one in inputs.boolean_masks()]
        scores = ScoreInputs(
            inputs.q_BTHK[0],
            inputs.k_BSGK[0],
            [inputs.kv_head_of(head) for head in range(inputs.q_BTHK.shape[2])],
            inputs.scale,
            inputs.softcap,
            inputs.causal,
            sum(biases[1:], biases[0]) if biases else None,
            masks[0] if masks else None,
            None if inputs.sinks is None else inputs.sinks.flatten(),
        )
        source = (inputs.mask, inputs.bias, inputs.causal, query, key, device)
        uniform = next((one for other, one in self._uniform if _is_same(source, other)), None)
        if uniform is None:
            uniform = _flatten(uniform_statistics(scores, tokens), tokens)
            self._uniform = [*self._uniform[-2:], (source, uniform)]
        own = _flatten(head_statistics(scores, tokens), tokens)
        self.calls.append(CallStatistics(site, query is key, own, uniform))
        return True


def _is_same(source: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """True if both calls have the same masks; tensors are compared by identity, not by value."""
    same = [a is b for a, b in zip(source[:5], other[:5], strict=True)]
    return all(same) and source[5] == other[5]


def _flatten(statistics: HeadStatistics, tokens: TokenInputs) -> Tensor:
    """Join all statistics of each head, in float64."""
    num_keys = statistics.num_keys
    support = sum_support(statistics.sampled, num_keys[:, tokens.sampled_queries])
    random = torch.where(num_keys > 1, mean_random_breadth(num_keys), 0).sum(-1, keepdim=True)
    return torch.cat([statistics.sums, *support, random], -1)


def read_statistics(
    calls: Sequence[CallStatistics],
) -> Iterator[tuple[CallStatistics, Array, Array]]:
    """Copy the statistics of all calls of a text to the host at once; yield each with those of its
    heads and of its chance level.
    """
    if not calls:
        return
    device = calls[0].own.device
    tensors = [one for call in calls for one in (call.own, call.uniform)]
    values = torch.cat([one.to(device) for one in tensors]).cpu().numpy()
    parts = np.split(values, np.cumsum([len(one) for one in tensors])[:-1])
    yield from zip(calls, parts[::2], parts[1::2], strict=True)


def read_arrays(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """Copy tensors of float64 to the host, those of a device at once."""
    flat: dict[torch.device, list[Array]] = {}
    for device in {tensor.device for tensor in tensors}:
        parts = [tensor.flatten() for tensor in tensors if tensor.device == device]
        ends = np.cumsum([len(part) for part in parts])[:-1]
        flat[device] = np.split(torch.cat(parts).cpu().numpy(), ends)[::-1]
    return [flat[tensor.device].pop().reshape(tensor.shape) for tensor in tensors]


def sum_metrics(values: Array) -> Mapping[str, TextSums]:
    """Sums and counts of every metric, from the statistics of the heads, [H, slots].

    They equal the sums of `HEAD_METRICS` over bands of weights.
    """
    pairs = values[:, :FIRST_BY_OFFSET].reshape(len(values), -1, 2)
    means = {name: (pairs[:, n, 0], pairs[:, n, 1]) for n, name in enumerate(PLACES)}
    by_offset = values[:, FIRST_BY_OFFSET:NUM_SLOTS].reshape(len(values), -1, NUM_LANES)
    weights, num_pairs, hits = by_offset[..., :NUM_OFFSETS].swapaxes(0, 1)
    squares, rows = means["squares"]
    all_pairs, _ = means["pairs"]
    for name, offset in (("previous", -1), ("self", 0), ("next", 1)):
        place = MAX_DISTANCE + offset
        means[name] = (weights[:, place], num_pairs[:, place])
    nearest = slice(MAX_DISTANCE - MAX_OFFSET, MAX_DISTANCE + MAX_OFFSET + 1)
    hits = hits[:, nearest]
    means["offset"] = means["peak"] = (hits, np.broadcast_to(rows[:, None], hits.shape))
    # Rows that count sum to 1, so that their number is their total weight.
    weights = np.concatenate([weights, (rows - weights.sum(-1))[:, None]], -1)
    counts = np.concatenate([num_pairs, (all_pairs - num_pairs.sum(-1))[:, None]], -1)
    sums = np.concatenate([weights, counts, squares[:, None]], -1)
    each_pair = np.broadcast_to(all_pairs[:, None], (len(values), counts.shape[1] + 1))
    means["positional_share"] = (sums, np.concatenate([counts, each_pair], -1))
    rest = values[:, NUM_SLOTS:]
    num = len(SUPPORT_FRACTIONS)
    for fraction in SUPPORT_FRACTIONS:
        means[f"support{round(100 * fraction)}"] = (rest[:, :num], rest[:, num : 2 * num])
    return means
