"""How many dimensions the query-key products of heads use, held to Gaussian weights of the same shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import SpecError
from .circuits import AttentionCircuits, LowRankMap, get_circuits

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


def measure_qk_spectra(model: nn.Module, *, num_draws: int = NUM_GAUSSIAN_DRAWS, seed: int = 0) -> tuple[LayerSpectrum, ...]:
    """How many dimensions every layer compares by; a layer whose scores are no product of two maps has none.

    The weights alone are asked: what turns queries and keys token by token is named beside each layer.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
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


def _layer_spectrum(own: AttentionCircuits, heads: list[LowRankMap], draws: int, draw: torch.Generator) -> LayerSpectrum:
    """Of one layer, and of Gaussian weights where these keep who reads which keys."""
    reads = own.spec.heads.reads
    drawn = [_sample_gaussian_maps(heads, reads, draw) for _ in range(draws)]
    each = tuple(
        DimensionCount(count_dims(head.singular_values), min(*head.left.shape, *head.right.shape), _mean_dims([one[n].singular_values for one in drawn]))
        for n, head in enumerate(heads)
    )
    summed = [_sum_maps(one).singular_values for one in (heads, *drawn)]
    most = min(_stack_query_weights(heads).shape + _stack_key_weights(heads, reads).shape)
    queries = _count_joint_dims([_stack_query_weights(one) for one in (heads, *drawn)])
    keys = _count_joint_dims([_stack_key_weights(one, reads) for one in (heads, *drawn)])
    return LayerSpectrum(own.site, each, DimensionCount(count_dims(summed[0]), most, _mean_dims(summed[1:])), queries, keys, own.caveats)


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


def _sample_gaussian_maps(heads: list[LowRankMap], kv_head_of_query: tuple[int, ...], draw: torch.Generator) -> list[LowRankMap]:
    """Heads of the same shapes drawn anew; those that read the same keys still do."""
    keys = {key: torch.randn(heads[kv_head_of_query.index(key)].right.shape, generator=draw) for key in dict.fromkeys(kv_head_of_query)}
    return [
        LowRankMap(torch.randn(head.left.shape, generator=draw), keys[key]) for head, key in zip(heads, kv_head_of_query, strict=True)
    ]
