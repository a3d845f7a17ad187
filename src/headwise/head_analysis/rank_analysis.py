"""How many dimensions the query-key products of heads use, held to Gaussian weights of the same shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import backends
from ..errors import SpecError, suggest
from ..inspect.adapters.headwise_attention import HeadwiseCall
from ..inspect.attention_sites import find_attention
from ..inspect.hooks import AttentionCall
from ..inspect.model_inputs import prepare_inputs
from ..inspect.site_hooks import ModelRun
from ..interfaces.probe import Probe
from ..masking.patterns import Pattern
from ..models import Transformer
from ..models.block import LayerInputs, TransformerLayer
from ..nn.attention import Attention
from .annotated_examples import Example
from .head_circuits import AttentionCircuits, LowRankMap, get_circuits
from .head_table import Measure
from .resampling import FoldedSums

ENERGY_FRACTION = 0.9
NUM_GAUSSIAN_DRAWS = 8


def count_dims(singular: Tensor, energy: float = ENERGY_FRACTION) -> int:
    """The fewest of the largest singular values that hold this share of the sum of squares.

    >>> count_dims(torch.tensor([3.0, 1.0])), count_dims(torch.ones(10))
    (1, 9)
    """
    power = singular.double().square()
    total = power.sum()
    return 1 + int((power.cumsum(0) < energy * total * (1 - 1e-12)).sum()) if total > 0 else 0


class DimensionCount(NamedTuple):
    """Dimensions for 90 % of the squared singular values, the most there could be, and what Gaussian weights use."""

    dims: int
    most: int
    chance: float


class LayerSpectrum(NamedTuple):
    """One layer: of each head's W_Q W_K^T; of their sum over heads; and of all W_Q, and all W_K, side by side.

    Where heads compare by the same few channels, those of the sum are far fewer than of Gaussian weights (2006.16362).
    """

    site: str
    heads: tuple[DimensionCount, ...]
    summed: DimensionCount
    queries: DimensionCount
    keys: DimensionCount
    caveats: tuple[str, ...]

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        one = {name: getattr(self, name)._asdict() for name in ("summed", "queries", "keys")}
        heads = [head._asdict() for head in self.heads]
        return {"site": self.site, "heads": heads, **one, "caveats": list(self.caveats)}


def measure_qk_spectra(
    model: nn.Module, *, num_draws: int = NUM_GAUSSIAN_DRAWS, seed: int = 0
) -> tuple[LayerSpectrum, ...]:
    """How many dimensions every layer compares by; a layer whose scores are no product of two maps has none.

    The weights alone are asked: what turns queries and keys token by token is named beside each layer.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0
    ... )
    >>> found = measure_qk_spectra(net)[0]
    >>> [head.most for head in found.heads], found.summed.most
    ([4, 4], 8)
    """
    found, why = list[LayerSpectrum](), ""
    for own in get_circuits(model).values():
        try:
            heads = [own.qk_circuit(head) for head in range(own.spec.heads.q)]
        except SpecError as error:
            why = str(error)
            continue
        found.append(_layer_spectrum(own, heads, num_draws, torch.Generator().manual_seed(seed)))
    if not found:
        raise SpecError(why or "the model has no attention; hw.sites(model) says what it saw")
    return tuple(found)


def _layer_spectrum(
    own: AttentionCircuits, heads: list[LowRankMap], draws: int, draw: torch.Generator
) -> LayerSpectrum:
    """Of one layer, and of Gaussian weights where these keep who reads which keys."""
    reads = own.spec.heads.reads
    drawn = [_sample_gaussian_maps(heads, reads, draw) for _ in range(draws)]
    each = tuple(
        DimensionCount(
            count_dims(head.singular_values),
            min(*head.left.shape, *head.right.shape),
            _mean_dims([one[n].singular_values for one in drawn]),
        )
        for n, head in enumerate(heads)
    )
    summed = [_sum_maps(one).singular_values for one in (heads, *drawn)]
    most = min(_stack_query_weights(heads).shape + _stack_key_weights(heads, reads).shape)
    queries = _count_joint_dims([_stack_query_weights(one) for one in (heads, *drawn)])
    keys = _count_joint_dims([_stack_key_weights(one, reads) for one in (heads, *drawn)])
    return LayerSpectrum(
        own.site, each, DimensionCount(count_dims(summed[0]), most, _mean_dims(summed[1:])), queries, keys, own.caveats
    )


def _count_joint_dims(matrices: list[Tensor]) -> DimensionCount:
    values = [torch.linalg.svdvals(matrix.double()) for matrix in matrices]
    return DimensionCount(count_dims(values[0]), len(values[0]), _mean_dims(values[1:]))


def _mean_dims(values: list[Tensor]) -> float:
    return sum(count_dims(one) for one in values) / max(1, len(values))


def _sum_maps(heads: list[LowRankMap]) -> LowRankMap:
    """The sum over heads, as two matrices."""
    return LowRankMap(_stack_query_weights(heads), torch.cat([head.right for head in heads]))


def _stack_query_weights(heads: list[LowRankMap]) -> Tensor:
    return torch.cat([head.left for head in heads], 1)


def _stack_key_weights(heads: list[LowRankMap], kv_head_of_query: tuple[int, ...]) -> Tensor:
    """The matrices of all key heads, each once."""
    return torch.cat([heads[kv_head_of_query.index(key)].right for key in dict.fromkeys(kv_head_of_query)])


def _sample_gaussian_maps(
    heads: list[LowRankMap], kv_head_of_query: tuple[int, ...], draw: torch.Generator
) -> list[LowRankMap]:
    """Heads of the same shapes drawn anew; those that read the same keys still do."""
    keys = {
        key: torch.randn(heads[kv_head_of_query.index(key)].right.shape, generator=draw)
        for key in dict.fromkeys(kv_head_of_query)
    }
    return [
        LowRankMap(torch.randn(head.left.shape, generator=draw), keys[key])
        for head, key in zip(heads, kv_head_of_query, strict=True)
    ]


# --- How many directions the scores and the weights of a head use over a text --------------------------

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
    k = given.k[:, :, list(call.job.core.key_head_of_query)].transpose(1, 2).float()
    found = {"scores": bound.similarity.scores(q, k, given.query_context.scale, bound.similarity_p)}
    if bound.scores:
        job, probe = replace(call.job, probed_tensors=frozenset({"scores"}), training=False), Probe("scores")
        backends.make_dispatch(job).attend(call.sight, given, bound, probe)
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


# --- Whether the states of a text's tokens become one over depth ---------------------------------------

HIDDEN_STATE_FIELDS = {
    "encoder_hidden_states": "encoder",
    "decoder_hidden_states": "decoder",
    "hidden_states": "states",
}
PATH_CHOICES = ("with", "without")


def rank_one_residual(states: Tensor) -> float:
    """||X - 1 x^T|| / ||X|| of states [tokens, model], x their mean: 0 where all tokens are one, at most 1.

    >>> rank_one_residual(torch.ones(3, 2)), rank_one_residual(torch.tensor([[1.0], [-1.0]]))
    (0.0, 1.0)
    """
    x = states.double()
    return float((x - x.mean(0)).norm() / x.norm().clamp(min=1e-300))


def singular_value_ratio(states: Tensor) -> float:
    """The second singular value of states [tokens, model] over the first: 0 where all are one up to scale.

    >>> singular_value_ratio(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) < 1e-9
    True
    """
    values = torch.linalg.svdvals(states.double())
    return float(values[1] / values[0].clamp(min=1e-300)) if len(values) > 1 else 0.0


class DepthSimilarity(NamedTuple):
    """The states of one stack behind so many layers: how far tokens are from their mean, and from one direction."""

    stack: str
    layers: int
    residual: Measure
    second: Measure


@dataclass(frozen=True)
class ForwardVariant:
    """A way through the layers of a model: what of them is there, and who reads whom instead of what the model says.

    `skip` is what each sublayer adds to, `feed` the feed-forward, `norm` all norms; each "with" or "without".
    """

    skip: str = "with"
    feed: str = "with"
    norm: str = "with"
    pattern: Pattern | None = None

    def __post_init__(self) -> None:
        for name in ("skip", "feed", "norm"):
            if (said := getattr(self, name)) not in PATH_CHOICES:
                raise ValueError(f"{name}={said!r} is unknown; {suggest(str(said), PATH_CHOICES)}")


def measure_rank_collapse(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    variant: ForwardVariant | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[DepthSimilarity, ...]:
    """How alike the states of a text's tokens are before any layer and behind each, as means over texts.

    Of models of ours and of transformers, which count a norm behind the last layer as part of it; a `path` other than
    the model's own is of ours alone, from its embeddings on. The chance of each is what the embeddings have.
    """
    if variant is not None and not isinstance(model, Transformer):
        raise ValueError(f"{type(model).__name__} runs on its own path alone; give a model of ours, as hw.load makes")
    kept: dict[tuple[str, int], FoldedSums] = {}
    for number, scene in enumerate(examples):
        for stack, states in _layer_states(model, scene, variant).items():
            for layers, each in enumerate(states):
                found = np.array([rank_one_residual(each), singular_value_ratio(each)])
                kept.setdefault((stack, layers), FoldedSums()).add(number, found, 1.0)
    rows: list[DepthSimilarity] = []
    for (stack, layers), folds in kept.items():
        told, first = folds.mean_intervals(num_resamples, seed), kept[stack, 0].mean
        rows.append(
            DepthSimilarity(stack, layers, told.measure_at(0, float(first[0])), told.measure_at(1, float(first[1])))
        )
    return tuple(rows)


def _layer_states(model: nn.Module, scene: Example, path: ForwardVariant | None) -> Mapping[str, list[Tensor]]:
    """The states [tokens, model] of each stack before any layer and behind each."""
    given = prepare_inputs(model, scene.model_inputs, 0)
    if isinstance(model, Transformer):
        with torch.inference_mode(), _record_layer_calls(model) as heard:
            model(*given.args, **given.kwargs)
            return {stack: _run_variant(calls, path) for stack, calls in heard.items() if calls}
    with torch.inference_mode():
        said: Any = model(*given.args, **given.kwargs, output_hidden_states=True)
    return {stack: [one[0] for one in said[key]] for key, stack in HIDDEN_STATE_FIELDS.items() if key in said}


class RecordedLayerCall(NamedTuple):
    """One layer, what it was called with, and what it said."""

    layer: TransformerLayer
    x: Tensor
    call: LayerInputs
    output: Tensor


@contextmanager
def _record_layer_calls(net: Transformer) -> Iterator[dict[str, list[RecordedLayerCall]]]:
    """What every layer of a model is called with while this lasts."""
    heard: dict[str, list[RecordedLayerCall]] = {stack: [] for stack in net.stacks}
    hooks: list[Any] = []
    for stack, layers in net.stacks.items():

        def hear(layer: Any, given: Any, said: Tensor, stack: str = stack) -> None:
            x, call = given
            heard[stack].append(RecordedLayerCall(layer, x, call, said))

        hooks += [layer.register_forward_hook(hear) for layer in layers.blocks]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _run_variant(calls: list[RecordedLayerCall], variant: ForwardVariant | None) -> list[Tensor]:
    """The states on the model's own path, or on another."""
    if variant is None:
        return [calls[0].x[0], *(one.output[0] for one in calls)]
    states = [calls[0].x]
    for one in calls:
        states.append(_run_layer_variant(one, states[-1], variant))
    return [x[0] for x in states]


def _run_layer_variant(one: RecordedLayerCall, x: Tensor, path: ForwardVariant) -> Tensor:
    """What one layer makes of states on a path."""
    layer, norms = one.layer, path.norm == "with"
    if layer.placement not in ("pre", "post"):
        raise ValueError(f"norms of {layer.name} stand {layer.placement!r}; paths are of layers with 'pre' or 'post'")
    for name in layer.sublayers:
        if name == "feed" and path.feed == "without":
            continue
        if name in layer.still:
            raise ValueError(f"{layer.name}.{name} was cut away; paths are of layers that attend")
        norm: nn.Module = layer.get_submodule(f"{name}_norm") if norms else nn.Identity()
        z = norm(x) if layer.placement == "pre" else x
        y = layer.feed(z) if name == "feed" else _run_attention_variant(one, name, z, path.pattern)
        x = x + y * layer.scale if path.skip == "with" else y * layer.scale
        x = norm(x) if layer.placement == "post" else x
    return x


def _run_attention_variant(one: RecordedLayerCall, name: str, z: Tensor, pattern: Pattern | None) -> Tensor:
    """What one attention gives, with another pattern than its own if that is said; cross-attentions keep theirs."""
    attention, call = one.layer.attentions[name], one.call
    if name == "attention":
        if pattern is not None:
            attention = Attention(replace(attention.spec, pattern=pattern), shared=attention.weights)
        return attention(z, sequence=call.at)
    source = call.source
    return attention(
        z,
        source=attention.project_source(source, sequence=call.told) if isinstance(source, Tensor) else source,
        sequence=call.at,
    )
