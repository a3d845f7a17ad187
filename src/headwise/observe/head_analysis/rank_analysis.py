"""Ranks in attention: dimensions of query-key weights, ranks of scores and weights over texts, rank
collapse over depth.

The spectra of query-key weights are compared with Gaussian weights of the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
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
from ..inspect.adapters.known_interfaces import HeadwiseCall
from ..inspect.hooks import record_modules
from ..inspect.model_inputs import prepare_inputs
from ..inspect.site import ObservedCall
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
    """Dimensions of one layer: of each head's W_Q W_K^T, and of their sum over heads.

    If heads compare the same few channels, the sum has far fewer dimensions than that of Gaussian
    weights (2006.16362).
    """

    site: str
    heads: tuple[DimensionCount, ...]
    summed: DimensionCount
    caveats: tuple[str, ...]

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        heads = [head._asdict() for head in self.heads]
        summed = self.summed._asdict()
        return {
            "site": self.site,
            "heads": heads,
            "summed": summed,
            "caveats": list(self.caveats),
        }


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
    spectra: list[LayerSpectrum] = []
    reason = "the model has no attention that can be read; see hw.sites(model)"
    for circuits in get_circuits(model).values():
        try:
            heads = [circuits.qk_circuit(head) for head in circuits.spec.core_score_heads]
        except SpecError as error:
            reason = str(error)
            continue
        generator = torch.Generator().manual_seed(seed)
        spectra.append(_layer_spectrum(circuits, heads, num_draws, generator))
    if not spectra:
        raise SpecError(reason)
    return tuple(spectra)


def spectra_table(spectra: Sequence[LayerSpectrum]) -> Table:
    """Return the dimensions of every layer, beside those of Gaussian weights."""
    columns = ("site", "of all heads", "at most", "Gaussian", "of a head", "most", "Gaussian head")
    rows: list[tuple[Any, ...]] = []
    for one in spectra:
        dims = np.mean([head.dims for head in one.heads]).item()
        chance = np.mean([head.chance for head in one.heads]).item()
        most = max(head.most for head in one.heads)
        rows.append((one.site, *one.summed[:2], one.summed.chance, dims, most, chance))
    return Table("dimensions that carry 90 % of the scores", columns, rows)


def _layer_spectrum(
    circuits: AttentionCircuits, heads: list[LowRankMap], num_draws: int, generator: torch.Generator
) -> LayerSpectrum:
    """Spectrum of one layer, with Gaussian weights that share key heads as the layer does."""
    spec = circuits.spec
    kv_heads = [spec.heads.kv_head_of_query[head] for head in spec.core_score_heads]
    first_with = [kv_heads.index(kv_head) for kv_head in kv_heads]  # each key head is read once
    samples = [heads]
    for _ in range(num_draws):
        keys: dict[int, Tensor] = {}
        for n in dict.fromkeys(first_with):
            keys[n] = torch.randn(heads[n].right.shape, generator=generator)
        draw: list[LowRankMap] = []
        for head, n in zip(heads, first_with, strict=True):
            draw.append(LowRankMap(torch.randn(head.left.shape, generator=generator), keys[n]))
        samples.append(draw)

    def count(values: Sequence[Tensor], most: int) -> DimensionCount:
        dims = [count_dims(singular) for singular in values]
        return DimensionCount(dims[0], most, sum(dims[1:]) / max(1, num_draws))

    by_head: list[DimensionCount] = []
    for n, head in enumerate(heads):
        most = min(*head.left.shape, *head.right.shape)
        by_head.append(count([maps[n].singular_values for maps in samples], most))
    sums: list[LowRankMap] = []
    for maps in samples:
        left = torch.cat([head.left for head in maps], 1)
        sums.append(LowRankMap(left, torch.cat([head.right for head in maps])))
    width_of_keys = sum(len(heads[n].right) for n in dict.fromkeys(first_with))
    most = min(*heads[0].shape, sums[0].left.shape[1], width_of_keys)
    summed = count([one.singular_values for one in sums], most)
    return LayerSpectrum(circuits.site, tuple(by_head), summed, circuits.caveats)


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
    """Scores and weights [B, heads, T, S] of the first queries, and scores after the parts that
    change them; only the weights if queries and keys are unknown.
    """
    queries = slice(0, MAX_QUERIES)
    stages: dict[str, Tensor] = {}
    if isinstance(call, HeadwiseCall):
        inputs = call.inputs
        bound = call.steps
        q = inputs.q[:, queries].transpose(1, 2).float()
        k = inputs.k[:, :, list(call.signature.core.key_head_of_query)].transpose(1, 2).float()
        scale = inputs.query_context.scale
        stages["scores"] = bound.similarity.scores(q, k, scale, bound.similarity_p)
        if bound.scores:
            job = replace(call.signature, probed_tensors=frozenset({"scores"}), training=False)
            probe = Probe("scores")
            backends.make_dispatch(job).attend(call.mask, inputs, bound, probe)
            stages["mixed"] = probe.tensors["scores"][:, :, queries]
    elif call.attention_inputs is not None:
        inputs = call.attention_inputs
        q = inputs.q_BTHK[:, queries].transpose(1, 2).float()
        kv_heads = [inputs.kv_head_of(head) for head in range(q.shape[1])]
        k = inputs.k_BSGK[:, :, kv_heads].transpose(1, 2).float()
        stages["scores"] = q @ k.transpose(2, 3) * inputs.scale
    return stages | {"weights": call.all_weights(queries)}


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
            for layers, x in enumerate(states):
                values = np.array([rank_one_residual(x), singular_value_ratio(x)])
                sums.setdefault((stack, layers), FoldedSums()).add(index, values, 1.0)
    rows: list[DepthSimilarity] = []
    for (stack, layers), folds in sums.items():
        means = folds.mean_intervals()
        chance = sums[stack, 0].mean.tolist()
        measures = [means.measure_at(n, chance[n]) for n in range(2)]
        rows.append(DepthSimilarity(stack, layers, *measures))
    return tuple(rows)


def _layer_states(
    model: nn.Module, example: Example, variant: ForwardVariant | None
) -> Mapping[str, list[Tensor]]:
    """States [tokens, model] of each stack, before the first layer and after each layer."""
    inputs = prepare_inputs(model, example.model_inputs, 0)
    if not isinstance(model, Transformer):
        with torch.inference_mode():
            outputs: Any = model(*inputs.args, **inputs.kwargs, output_hidden_states=True)
        states_by_name: dict[str, list[Tensor]] = {}
        for key, name in HIDDEN_STATE_FIELDS.items():
            if key in outputs:
                states_by_name[name] = [states[0] for states in outputs[key]]
        return states_by_name
    layers = {name: list(dict.fromkeys(stack.blocks)) for name, stack in model.stacks.items()}
    states_of_stack: dict[str, list[Tensor]] = {}
    with torch.inference_mode(), record_modules(chain(*layers.values())) as calls:
        model(*inputs.args, **inputs.kwargs)
    with torch.inference_mode():
        for name, blocks in layers.items():
            states: list[Tensor] = []
            recorded = chain.from_iterable(
                zip(repeat(one), calls[one], strict=False) for one in blocks
            )
            for layer, call in recorded:
                x, layer_inputs = call.args
                states = states or [x]
                y = call.output
                if variant is not None:
                    y = _run_layer_variant(layer, states[-1], layer_inputs, variant)
                states.append(y)
            if states:
                states_of_stack[name] = [x[0] for x in states]
    return states_of_stack


def _run_layer_variant(
    layer: TransformerLayer, x: Tensor, call: LayerInputs, variant: ForwardVariant
) -> Tensor:
    """Output of one layer in a variant of the forward pass; cross-attention keeps its pattern."""
    problem = "cannot run a variant"
    if layer.placement not in ("pre", "post"):
        fact = f"{layer.name} has norm placement {layer.placement!r}"
        raise ValueError(f"{problem}: {fact}; only 'pre' and 'post' are supported")
    for name in layer.sublayers:
        if name == "feed" and variant.feed == "without":
            continue
        if name == "mixer":
            fact = f"{layer.name} has a recurrence or convolution"
            raise ValueError(f"{problem}: {fact}, which is not supported")
        if name in layer.constant_sublayers:
            raise ValueError(f"{problem}: {layer.name}.{name} was pruned and is a constant")
        norm: nn.Module = nn.Identity()
        if variant.norm == "with":
            norm = layer.get_submodule(f"{name}_norm")
        z = norm(x) if layer.placement == "pre" else x
        if name == "feed":
            y = layer.feed(z)
        elif name == "attention":
            attention = layer.attentions[name]
            if variant.pattern is not None:
                spec = replace(attention.spec, pattern=variant.pattern)
                attention = Attention(spec, shared=attention.weights)
            y = attention(z, sequence=call.sequence)
        else:
            attention = layer.attentions[name]
            source = call.source
            if isinstance(source, Tensor):
                source = attention.project_source(source, sequence=call.source_sequence)
            y = attention(z, source=source, sequence=call.sequence)
        x = x + y * layer.scale if variant.skip == "with" else y * layer.scale
        x = norm(x) if layer.placement == "post" else x
    return x
