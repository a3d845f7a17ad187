"""Ranks in attention: dimensions of query-key weights, ranks of scores and weights over texts, rank
collapse over depth.

The spectra of query-key weights are compared with Gaussian weights of the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...attention import backends
from ...attention.attention import Attention
from ...attention.interfaces.core_types import Probe
from ...attention.masking.patterns import Pattern
from ...models import Transformer
from ...models.block import LayerInputs, TransformerLayer
from ...report.data import Table
from ...report.render import to_plain
from ...util.errors import SpecError, suggest
from ..inspect.adapters.native_attention import HeadwiseCall
from ..inspect.hooks import record_modules
from ..inspect.model_inputs import prepare_inputs
from ..inspect.observed_call import ObservedCall
from .annotated_examples import Example
from .head_circuits import AttentionCircuits, LowRankMap, get_circuits
from .head_table import Measure
from .resampling import FoldedSums

# --- Dimensions of query-key weights --------------------------------------------------------------

ENERGY_FRACTION = 0.9
NUM_GAUSSIAN_DRAWS = 8


def count_dims(singular: Tensor, energy: float = ENERGY_FRACTION) -> int:
    """Smallest number of singular values, largest first, that hold this share of the sum of their
    squares.

    >>> count_dims(torch.tensor([3.0, 1.0])), count_dims(torch.ones(10))
    (1, 9)
    """
    power = singular.double().square()
    total = power.sum()
    return 1 + int((power.cumsum(0) < energy * total * (1 - 1e-12)).sum()) if total > 0 else 0


class DimensionCount(NamedTuple):
    """Dimensions that hold 90 % of the squared singular values, their maximum, and the mean for
    Gaussian weights.
    """

    dims: int
    most: int
    chance: float


class LayerSpectrum(NamedTuple):
    """Dimensions of one layer: of each head's W_Q W_K^T, of the sum over heads, and of all W_Q and
    all W_K concatenated.

    If heads compare the same few channels, the sum has far fewer dimensions than that of Gaussian
    weights (2006.16362).
    """

    site: str
    heads: tuple[DimensionCount, ...]
    summed: DimensionCount
    queries: DimensionCount
    keys: DimensionCount
    caveats: tuple[str, ...]

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        counts = {name: getattr(self, name)._asdict() for name in ("summed", "queries", "keys")}
        heads = [head._asdict() for head in self.heads]
        return {"site": self.site, "heads": heads, **counts, "caveats": list(self.caveats)}


def measure_qk_spectra(
    model: nn.Module, *, num_draws: int = NUM_GAUSSIAN_DRAWS, seed: int = 0
) -> tuple[LayerSpectrum, ...]:
    """Measure in how many dimensions the heads of each layer compare tokens, from the weights
    alone.

    Layers whose scores are not a product of two linear maps are left out. `caveats` of a layer name
    what changes queries and keys token by token, such as rotary embeddings.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... )
    >>> spectrum = measure_qk_spectra(net)[0]
    >>> [head.most for head in spectrum.heads], spectrum.summed.most
    ([4, 4], 8)
    """
    spectra = list[LayerSpectrum]()
    reason = ""
    for circuits in get_circuits(model).values():
        try:
            heads = [circuits.qk_circuit(head) for head in circuits.spec.core_score_heads]
        except SpecError as error:
            reason = str(error)
            continue
        spectra.append(
            _layer_spectrum(circuits, heads, num_draws, torch.Generator().manual_seed(seed))
        )
    if not spectra:
        raise SpecError(
            reason or "the model has no attention that can be read; see hw.sites(model)"
        )
    return tuple(spectra)


def spectra_table(spectra: Sequence[LayerSpectrum]) -> Table:
    """Return the dimensions of every layer, beside those of Gaussian weights."""
    columns = ("site", "of all heads", "at most", "Gaussian", "of a head", "most", "Gaussian head")
    rows: list[tuple[Any, ...]] = []
    for one in spectra:
        count = len(one.heads)
        dims = sum(head.dims for head in one.heads) / count
        chance = sum(head.chance for head in one.heads) / count
        most = max(head.most for head in one.heads)
        rows.append((one.site, *one.summed[:2], one.summed.chance, dims, most, chance))
    return Table("dimensions that carry 90 % of the scores", columns, rows)


def _layer_spectrum(
    circuits: AttentionCircuits, heads: list[LowRankMap], num_draws: int, generator: torch.Generator
) -> LayerSpectrum:
    """Spectrum of one layer, with Gaussian weights that share key heads as the layer does."""
    spec = circuits.spec
    kv_head_of_query = tuple(spec.heads.kv_head_of_query[head] for head in spec.core_score_heads)
    draws = [_sample_gaussian_maps(heads, kv_head_of_query, generator) for _ in range(num_draws)]
    by_head = tuple(
        DimensionCount(
            count_dims(head.singular_values),
            min(*head.left.shape, *head.right.shape),
            _mean_dims([draw[n].singular_values for draw in draws]),
        )
        for n, head in enumerate(heads)
    )
    own_and_draws = (heads, *draws)
    summed_values = [_sum_maps(maps).singular_values for maps in own_and_draws]
    most = min(
        _stack_query_weights(heads).shape + _stack_key_weights(heads, kv_head_of_query).shape
    )
    summed = DimensionCount(count_dims(summed_values[0]), most, _mean_dims(summed_values[1:]))
    queries = _count_joint_dims([_stack_query_weights(maps) for maps in own_and_draws])
    keys = _count_joint_dims([_stack_key_weights(maps, kv_head_of_query) for maps in own_and_draws])
    return LayerSpectrum(circuits.site, by_head, summed, queries, keys, circuits.caveats)


def _count_joint_dims(matrices: list[Tensor]) -> DimensionCount:
    values = [torch.linalg.svdvals(matrix.double()) for matrix in matrices]
    return DimensionCount(count_dims(values[0]), len(values[0]), _mean_dims(values[1:]))


def _mean_dims(values: list[Tensor]) -> float:
    return sum(count_dims(singular) for singular in values) / max(1, len(values))


def _sum_maps(heads: list[LowRankMap]) -> LowRankMap:
    """Sum over heads, as a product of two matrices."""
    return LowRankMap(_stack_query_weights(heads), torch.cat([head.right for head in heads]))


def _stack_query_weights(heads: list[LowRankMap]) -> Tensor:
    return torch.cat([head.left for head in heads], 1)


def _stack_key_weights(heads: list[LowRankMap], kv_head_of_query: tuple[int, ...]) -> Tensor:
    """Matrices of all key heads, each once."""
    return torch.cat(
        [
            heads[kv_head_of_query.index(kv_head)].right
            for kv_head in dict.fromkeys(kv_head_of_query)
        ]
    )


def _sample_gaussian_maps(
    heads: list[LowRankMap], kv_head_of_query: tuple[int, ...], generator: torch.Generator
) -> list[LowRankMap]:
    """Gaussian maps of the same shapes; heads that share a key head share a Gaussian one."""
    keys = {
        key: torch.randn(heads[kv_head_of_query.index(key)].right.shape, generator=generator)
        for key in dict.fromkeys(kv_head_of_query)
    }
    return [
        LowRankMap(torch.randn(head.left.shape, generator=generator), keys[key])
        for head, key in zip(heads, kv_head_of_query, strict=True)
    ]


# --- Ranks of scores and weights over texts -------------------------------------------------------

MAX_QUERIES = 256  # queries of a text that are used


def effective_rank(matrices: Tensor) -> Tensor:
    """Effective rank of matrices [..., T, S]: exp of the entropy of the normalised singular values
    (Roy and Vetterli
    2007).

    >>> round(effective_rank(torch.eye(3)).item(), 6)
    3.0
    """
    values = torch.linalg.svdvals(matrices.double())
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp(min=1e-300)
    return torch.where(total[..., 0] > 0, (-torch.special.xlogy(share, share).sum(-1)).exp(), 0.0)


def score_stages(call: ObservedCall) -> Mapping[str, Tensor]:
    """Scores and weights [B, heads, T, S] of the first queries; only the weights if queries and
    keys are unknown.
    """
    queries = slice(0, MAX_QUERIES)
    if isinstance(call, HeadwiseCall):
        return _native_score_stages(call)
    weights = call.all_weights(queries)
    inputs = call.attention_inputs
    if inputs is None:
        return {"weights": weights}
    q = inputs.q_BTHK[:, queries].transpose(1, 2).float()
    k = (
        inputs.k_BSGK[:, :, [inputs.kv_head_of(head) for head in range(q.shape[1])]]
        .transpose(1, 2)
        .float()
    )
    return {"scores": q @ k.transpose(2, 3) * inputs.scale, "weights": weights}


def _native_score_stages(call: HeadwiseCall) -> Mapping[str, Tensor]:
    """Scores, transformed scores and weights of a headwise attention."""
    inputs = call.inputs
    bound = call.steps
    q = inputs.q[:, :MAX_QUERIES].transpose(1, 2).float()
    k = inputs.k[:, :, list(call.signature.core.key_head_of_query)].transpose(1, 2).float()
    stages = {
        "scores": bound.similarity.scores(q, k, inputs.query_context.scale, bound.similarity_p)
    }
    if bound.scores:
        job = replace(call.signature, probed_tensors=frozenset({"scores"}), training=False)
        probe = Probe("scores")
        backends.make_dispatch(job).attend(call.mask, inputs, bound, probe)
        stages["mixed"] = probe.tensors["scores"][:, :, :MAX_QUERIES]
    return stages | {"weights": call.all_weights(slice(0, MAX_QUERIES))}


# --- Rank collapse of hidden states over depth ----------------------------------------------------

HIDDEN_STATE_FIELDS = {
    "encoder_hidden_states": "encoder",
    "decoder_hidden_states": "decoder",
    "hidden_states": "states",
}
PATH_CHOICES = ("with", "without")


def rank_one_residual(states: Tensor) -> float:
    """||X - 1 x^T|| / ||X|| of states X [tokens, model] with mean x: 0 if all tokens are equal, at
    most 1.

    >>> rank_one_residual(torch.ones(3, 2)), rank_one_residual(torch.tensor([[1.0], [-1.0]]))
    (0.0, 1.0)
    """
    x = states.double()
    return float((x - x.mean(0)).norm() / x.norm().clamp(min=1e-300))


def singular_value_ratio(states: Tensor) -> float:
    """Second singular value of states [tokens, model] over the first: 0 if all tokens are equal up
    to scale.

    >>> singular_value_ratio(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) < 1e-9
    True
    """
    values = torch.linalg.svdvals(states.double())
    return float(values[1] / values[0].clamp(min=1e-300)) if len(values) > 1 else 0.0


class DepthSimilarity(NamedTuple):
    """Similarity of a text's tokens after `layers` layers of a stack.

    `residual` is `rank_one_residual`, `second` is `singular_value_ratio`.
    """

    stack: str
    layers: int
    residual: Measure
    second: Measure

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return to_plain(self._asdict())


def collapse_table(depths: Sequence[DepthSimilarity]) -> Table:
    """Return how much the tokens of each stack differ after each layer, as a share of their norm."""
    columns = ("stack", "layers", "low", "residual", "high", "second / first singular value")
    rows: list[tuple[Any, ...]] = []
    for depth in sorted(depths, key=lambda depth: (depth.stack, depth.layers)):
        value, low, high = depth.residual[:3]
        rows.append((depth.stack, depth.layers, low, value, high, depth.second.value))
    return Table(
        "difference of the states of a text's tokens (0: all tokens are equal)", columns, rows
    )


@dataclass(frozen=True)
class ForwardVariant:
    """Variant of a model's forward pass with parts left out, or with another attention pattern.

    `skip` stands for residual connections, `feed` for feed-forward layers and `norm` for all norms;
    each is "with" or "without".
    """

    skip: str = "with"
    feed: str = "with"
    norm: str = "with"
    pattern: Pattern | None = None

    def __post_init__(self) -> None:
        for name in ("skip", "feed", "norm"):
            value = getattr(self, name)
            if value not in PATH_CHOICES:
                raise ValueError(f"unknown {name}={value!r}; {suggest(str(value), PATH_CHOICES)}")


def measure_rank_collapse(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    variant: ForwardVariant | None = None,
) -> tuple[DepthSimilarity, ...]:
    """Measure how similar the hidden states of a text's tokens are after each layer, as means over
    texts.

    For headwise models and transformers models; the latter include the final norm in the last
    layer. A `variant` of the forward pass starts from the model's embeddings and needs a headwise
    model. The chance level of each measure is its value at the embeddings.
    """
    if variant is not None and not isinstance(model, Transformer):
        fact = f"cannot change the forward pass of {type(model).__name__}"
        raise ValueError(f"{fact}; leave variant out, or use a headwise model, as hw.load makes")
    sums: dict[tuple[str, int], FoldedSums] = {}
    for index, example in enumerate(examples):
        for stack, states in _layer_states(model, example, variant).items():
            for layers, layer_states in enumerate(states):
                values = np.array(
                    [rank_one_residual(layer_states), singular_value_ratio(layer_states)]
                )
                sums.setdefault((stack, layers), FoldedSums()).add(index, values, 1.0)
    rows: list[DepthSimilarity] = []
    for (stack, layers), folds in sums.items():
        means = folds.mean_intervals()
        first = sums[stack, 0].mean
        rows.append(
            DepthSimilarity(
                stack,
                layers,
                means.measure_at(0, float(first[0])),
                means.measure_at(1, float(first[1])),
            )
        )
    return tuple(rows)


def _layer_states(
    model: nn.Module, example: Example, variant: ForwardVariant | None
) -> Mapping[str, list[Tensor]]:
    """States [tokens, model] of each stack, before the first layer and after each layer."""
    inputs = prepare_inputs(model, example.model_inputs, 0)
    if isinstance(model, Transformer):
        layers = {name: list(dict.fromkeys(stack.blocks)) for name, stack in model.stacks.items()}
        states: dict[str, list[Tensor]] = {}
        with torch.inference_mode(), record_modules(chain(*layers.values())) as calls:
            model(*inputs.args, **inputs.kwargs)
        with torch.inference_mode():
            for name, blocks in layers.items():
                recorded: list[RecordedLayerCall] = []
                for layer in blocks:
                    for call in calls[layer]:
                        x, layer_inputs = call.args
                        recorded.append(RecordedLayerCall(layer, x, layer_inputs, call.output))
                if recorded:
                    states[name] = _run_variant(recorded, variant)
        return states
    with torch.inference_mode():
        outputs: Any = model(*inputs.args, **inputs.kwargs, output_hidden_states=True)
    return {
        stack: [layer_states[0] for layer_states in outputs[key]]
        for key, stack in HIDDEN_STATE_FIELDS.items()
        if key in outputs
    }


class RecordedLayerCall(NamedTuple):
    """A layer with its inputs and its output."""

    layer: TransformerLayer
    x: Tensor
    call: LayerInputs
    output: Tensor


def _run_variant(calls: list[RecordedLayerCall], variant: ForwardVariant | None) -> list[Tensor]:
    """States of the model's own forward pass, or of a variant."""
    if variant is None:
        return [calls[0].x[0], *(recorded.output[0] for recorded in calls)]
    states = [calls[0].x]
    for recorded in calls:
        states.append(_run_layer_variant(recorded, states[-1], variant))
    return [x[0] for x in states]


def _run_layer_variant(recorded: RecordedLayerCall, x: Tensor, variant: ForwardVariant) -> Tensor:
    """Output of one layer for other inputs, in a variant of the forward pass."""
    layer = recorded.layer
    with_norms = variant.norm == "with"
    if layer.placement not in ("pre", "post"):
        fact = f"{layer.name} has norm placement {layer.placement!r}"
        raise ValueError(f"cannot run a variant: {fact}; only 'pre' and 'post' are supported")
    for name in layer.sublayers:
        if name == "feed" and variant.feed == "without":
            continue
        if name == "mixer":
            raise ValueError(
                f"cannot run a variant: {layer.name} has a recurrence or convolution, which is "
                "not supported"
            )
        if name in layer.constant_sublayers:
            raise ValueError(
                f"cannot run a variant: {layer.name}.{name} was pruned and is a constant"
            )
        norm: nn.Module = layer.get_submodule(f"{name}_norm") if with_norms else nn.Identity()
        z = norm(x) if layer.placement == "pre" else x
        y = (
            layer.feed(z)
            if name == "feed"
            else _run_attention_variant(recorded, name, z, variant.pattern)
        )
        x = x + y * layer.scale if variant.skip == "with" else y * layer.scale
        x = norm(x) if layer.placement == "post" else x
    return x


def _run_attention_variant(
    recorded: RecordedLayerCall, name: str, z: Tensor, pattern: Pattern | None
) -> Tensor:
    """Output of one attention, with another pattern if it is self-attention; cross-attention keeps
    its own.
    """
    attention = recorded.layer.attentions[name]
    call = recorded.call
    if name == "attention":
        if pattern is not None:
            attention = Attention(
                replace(attention.spec, pattern=pattern), shared=attention.weights
            )
        return attention(z, sequence=call.sequence)
    source = call.source
    return attention(
        z,
        source=attention.project_source(source, sequence=call.source_sequence)
        if isinstance(source, Tensor)
        else source,
        sequence=call.sequence,
    )
