"""How many directions the scores and the weights of a head use over a text: before softmax, mixed, and behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import backends
from ..hub.finding import find_attention
from ..hub.readable import prepare_inputs
from ..hub.routes.ours import HeadwiseCall
from ..hub.running import ModelRun
from ..hub.watching import AttentionCall
from ..probe import Probe
from .folds import FoldedSums
from .scene import Example
from .table import Measure

MAX_QUERIES = 256  # queries of a text
SCORE_STAGES = ("scores", "mixed", "weights")


def stable_rank(matrices: Tensor) -> Tensor:
    """The sum of squared singular values over the largest squared one, of matrices [..., T, S].

    >>> stable_rank(torch.eye(3)).item()
    3.0
    """
    power = torch.linalg.svdvals(matrices.double()).square()
    return torch.where(power[..., 0] > 0, power.sum(-1) / power[..., 0].clamp(min=1e-300), 0.0)


def effective_rank(matrices: Tensor) -> Tensor:
    """exp of the entropy of singular values as shares of their sum (Roy and Vetterli 2007), of matrices [..., T, S].

    >>> round(effective_rank(torch.eye(3)).item(), 6)
    3.0
    """
    values = torch.linalg.svdvals(matrices.double())
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp(min=1e-300)
    return torch.where(total[..., 0] > 0, (-torch.special.xlogy(share, share).sum(-1)).exp(), 0.0)


class HeadRank(NamedTuple):
    """One head at one stage: "scores" as queries and keys give them, "mixed" behind what changes scores, "weights".

    Both ranks are means over texts; `bound` is the most that scores of this width can have, 0 where nothing bounds it.
    """

    site: str
    head: int
    stage: str
    stable: Measure
    effective: Measure
    bound: int


class _RankHook:
    """A watcher that turns what an attention works with into ranks."""

    needs_call = True

    def __init__(self) -> None:
        self.found: dict[str, np.ndarray] = {}
        self.width = 0

    def on_call(self, call: AttentionCall) -> None:
        """Rank the scores and weights of the first queries."""
        stages = _score_stages(call)
        self.found = {
            name: np.stack([kind(grids[0].float()).cpu().numpy() for kind in (stable_rank, effective_rank)])
            for name, grids in stages.items()
        }
        self.width = call.attention_inputs.q_BTHK.shape[-1] if call.attention_inputs is not None else 0
        if isinstance(call, HeadwiseCall):
            self.width = call.inputs.q.shape[-1]

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Leave it."""


def _score_stages(call: AttentionCall) -> Mapping[str, Tensor]:
    """Scores and weights [B, heads, T, S] of the first queries, as far as they can be told."""
    some = slice(0, MAX_QUERIES)
    if isinstance(call, HeadwiseCall):
        return _native_score_stages(call)
    weights, told = call.all_weights(some), call.attention_inputs
    if told is None:
        return {"weights": weights}
    q = told.q_BTHK[:, some].transpose(1, 2).float()
    k = told.k_BSGK[:, :, [told.kv_head_of(head) for head in range(q.shape[1])]].transpose(1, 2).float()
    return {"scores": q @ k.transpose(2, 3) * told.scale, "weights": weights}


def _native_score_stages(call: HeadwiseCall) -> Mapping[str, Tensor]:
    """The same of an attention of ours, which also says what its steps make of scores."""
    given, bound = call.inputs, call.bound
    q = given.q[:, :MAX_QUERIES].transpose(1, 2).float()
    k = given.k[:, :, list(call.job.core.keys)].transpose(1, 2).float()
    found = {"scores": bound.similarity.scores(q, k, given.query_context.scale, bound.similarity_p)}
    if bound.scores:
        job, probe = replace(call.job, probed_tensors=frozenset({"scores"}), training=False), Probe("scores")
        backends.choose_backend(job).attend(job, call.sight, given, bound, probe)
        found["mixed"] = probe.tensors["scores"][:, :, :MAX_QUERIES]
    return found | {"weights": call.all_weights(slice(0, MAX_QUERIES))}


def measure_score_ranks(
    model: nn.Module, examples: Iterable[Example], *, num_resamples: int = 1000, seed: int = 0
) -> tuple[HeadRank, ...]:
    """The ranks of scores and weights of every head over texts, of at most the first 256 queries of each.

    Scores of a head are a product over its width, which bounds their rank; what changes or mixes scores, and softmax,
    may lift that. What a mask forbids counts in scores, whose rank it would else decide. No chance is told: measure
    `twin(model)` on the same texts for what it is without training.
    """
    those = [one for one in find_attention(model) if one.site.see.can]
    if not those:
        raise ValueError(f"{type(model).__name__} has no attention that can be seen; hw.sites(model) says why")
    kept: dict[tuple[str, str], FoldedSums] = {}
    widths: dict[str, int] = {}
    for number, scene in enumerate(examples):
        watches = {one.site.name: _RankHook() for one in those}
        ModelRun(model, prepare_inputs(model, scene.model_inputs, 0)).run_with_hooks(those, watches)
        for name, watch in watches.items():
            widths[name] = watch.width
            for stage, ranks in watch.found.items():
                kept.setdefault((name, stage), FoldedSums()).add(number, ranks, 1.0)
    if not kept:
        raise ValueError("no text was read; give at least two")
    how = num_resamples, seed
    return tuple(row for (name, stage), own in kept.items() for row in _head_ranks(name, stage, own, widths[name], how))


def _head_ranks(site: str, stage: str, folds: FoldedSums, width: int, how: tuple[int, int]) -> Iterable[HeadRank]:
    told, bound = folds.mean_intervals(*how), width if stage == "scores" else 0
    for head in range(told.mean.shape[1]):
        yield HeadRank(site, head, stage, told.measure_at((0, head)), told.measure_at((1, head)), bound)
