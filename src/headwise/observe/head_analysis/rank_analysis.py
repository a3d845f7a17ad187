"""Ranks in attention: dimensions of query-key weights, ranks of scores and weights over texts, rank
collapse over depth.

The spectra of query-key weights are compared with Gaussian weights of the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.devices import to_float64
from ...models import Transformer
from ...report.data import Table
from ...util.errors import SpecError
from ..inspect.hooks import record_modules
from ..inspect.model_inputs import prepare_inputs
from .annotated_examples import Example
from .head_circuits import LowRankMap, get_circuits
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
    power = to_float64(singular).square()
    total = power.sum()
    return 1 + int((power.cumsum(0) < energy * total * (1 - 1e-12)).sum()) if total > 0 else 0


@dataclass(frozen=True)
class DimensionCount:
    """Dimensions that hold 90 % of the squared singular values, their maximum, and the mean for
    Gaussian weights.
    """

    dims: int
    most: int
    chance: float


@dataclass(frozen=True)
class LayerSpectrum:
    """Dimensions of one layer: of each head's W_Q W_K^T, and of their sum over heads.

    If heads compare the same few channels, the sum has far fewer dimensions than with Gaussian
    weights (2006.16362).
    """

    site: str
    heads: tuple[DimensionCount, ...]
    summed: DimensionCount
    caveats: tuple[str, ...]


def measure_qk_spectra(
    model: nn.Module, *, num_draws: int = NUM_GAUSSIAN_DRAWS, seed: int = 0
) -> tuple[LayerSpectrum, ...]:
    """Measure in how many dimensions the heads of each layer compare tokens, from the weights
    alone.

    Layers are left out if their scores are not a product of two linear maps. `caveats` of a layer
    name what changes queries and keys token by token, such as rotary embeddings.

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
        samples = [heads]
        generator = torch.Generator().manual_seed(seed)
        kv_heads = [
            circuits.spec.heads.kv_head_of_query[one] for one in circuits.spec.core_score_heads
        ]
        for _ in range(num_draws):  # Gaussian weights that share key heads as the layer does
            keys: dict[int, Tensor] = {}
            for head, kv_head in zip(heads, kv_heads, strict=True):
                if kv_head not in keys:
                    keys[kv_head] = torch.randn(head.right.shape, generator=generator)
            draw: list[LowRankMap] = []
            for head, kv_head in zip(heads, kv_heads, strict=True):
                left = torch.randn(head.left.shape, generator=generator)
                draw.append(LowRankMap(left, keys[kv_head]))
            samples.append(draw)
        by_head: list[DimensionCount] = []
        for n, head in enumerate(heads):
            most = min(*head.left.shape, *head.right.shape)
            by_head.append(_count_samples([maps[n] for maps in samples], most))
        sums: list[LowRankMap] = []
        for maps in samples:
            left = torch.cat([head.left for head in maps], 1)
            sums.append(LowRankMap(left, torch.cat([head.right for head in maps])))
        width_of_keys = len(set(kv_heads)) * len(heads[0].right)
        most = min(*heads[0].shape, sums[0].left.shape[1], width_of_keys)
        summed = _count_samples(sums, most)
        spectra.append(LayerSpectrum(circuits.site, tuple(by_head), summed, circuits.caveats))
    if not spectra:
        raise SpecError(reason)
    return tuple(spectra)


def spectra_table(spectra: Sequence[LayerSpectrum]) -> Table:
    """Return the dimensions of every layer next to Gaussian weights."""
    columns = ("site", "of all heads", "at most", "Gaussian", "of a head", "most", "Gaussian head")
    rows: list[tuple[Any, ...]] = []
    for one in spectra:
        dims = np.mean([head.dims for head in one.heads]).item()
        chance = np.mean([head.chance for head in one.heads]).item()
        most = max(head.most for head in one.heads)
        summed = astuple(one.summed)
        rows.append((one.site, *summed, dims, most, chance))
    return Table("dimensions that carry 90 % of the scores", columns, rows)


def _count_samples(maps: Sequence[LowRankMap], most: int) -> DimensionCount:
    """Dimensions of the first map, and as the mean of the others, which are Gaussian."""
    dims = [count_dims(one.singular_values) for one in maps]
    return DimensionCount(dims[0], most, sum(dims[1:]) / max(1, len(dims) - 1))


def effective_rank(matrices: Tensor) -> Tensor:
    """Effective rank of matrices [..., T, S]: exp of the entropy of the normalised singular values
    (Roy and Vetterli
    2007).

    >>> round(effective_rank(torch.eye(3)).item(), 6)
    3.0
    """
    values = torch.linalg.svdvals(to_float64(matrices))
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp(min=1e-300)
    return torch.where(total[..., 0] > 0, (-torch.special.xlogy(share, share).sum(-1)).exp(), 0.0)


# --- Rank collapse of hidden states over depth ----------------------------------------------------

HIDDEN_STATE_FIELDS = {
    "encoder_hidden_states": "encoder",
    "decoder_hidden_states": "decoder",
    "hidden_states": "states",
}


def rank_one_residual(states: Tensor) -> float:
    """||X - 1 x^T|| / ||X|| of states X [tokens, model] with mean x: 0 if all tokens are equal, at
    most 1.

    >>> rank_one_residual(torch.ones(3, 2)), rank_one_residual(torch.tensor([[1.0], [-1.0]]))
    (0.0, 1.0)
    """
    x = to_float64(states)
    return float((x - x.mean(0)).norm() / x.norm().clamp(min=1e-300))


def singular_value_ratio(states: Tensor) -> float:
    """Second singular value of states [tokens, model] over the first: 0 if all tokens are equal up
    to scale.

    >>> singular_value_ratio(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) < 1e-9
    True
    """
    values = torch.linalg.svdvals(to_float64(states))
    return float(values[1] / values[0].clamp(min=1e-300)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class DepthSimilarity:
    """Similarity of a text's tokens after `layers` layers of a stack.

    `residual` is `rank_one_residual`, `second` is `singular_value_ratio`.
    """

    stack: str
    layers: int
    residual: Measure
    second: Measure


def collapse_table(depths: Sequence[DepthSimilarity]) -> Table:
    """Return how much the tokens of each stack differ after each layer, as a share of their
    norm.
    """
    columns = ("stack", "layers", "low", "residual", "high", "second / first singular value")
    rows: list[tuple[Any, ...]] = []
    for depth in sorted(depths, key=lambda depth: (depth.stack, depth.layers)):
        value, low, high = depth.residual[:3]
        rows.append((depth.stack, depth.layers, low, value, high, depth.second.value))
    return Table(
        "difference of the states of a text's tokens (0: all tokens are equal)", columns, rows
    )


def measure_rank_collapse(
    model: nn.Module, examples: Iterable[Example]
) -> tuple[DepthSimilarity, ...]:
    """Measure how similar the hidden states of a text's tokens are after each layer, as means over
    texts.

    For headwise models and transformers models; the latter include the final norm in the last
    layer. The chance level of each measure is its value at the embeddings.
    """
    sums: dict[tuple[str, int], FoldedSums] = {}
    for index, example in enumerate(examples):
        for stack, states in _layer_states(model, example).items():
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


def _layer_states(model: nn.Module, example: Example) -> Mapping[str, list[Tensor]]:
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
    for name, blocks in layers.items():
        recorded = list(chain.from_iterable(calls[block] for block in blocks))
        if recorded:
            outputs = [call.output[0] for call in recorded]
            states_of_stack[name] = [recorded[0].args[0][0], *outputs]
    return states_of_stack
