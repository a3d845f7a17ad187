"""How many dimensions the query-key products of heads use, held to Gaussian weights of the same shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import SpecError
from .circuits import Circuits, Factors, circuits

ENERGY = 0.9
DRAWS = 8


def dims(singular: Tensor, energy: float = ENERGY) -> int:
    """The fewest of the largest singular values that hold this share of the sum of squares.

    >>> dims(torch.tensor([3.0, 1.0])), dims(torch.ones(10))
    (1, 9)
    """
    power = singular.double().square()
    total = power.sum()
    return 1 + int((power.cumsum(0) < energy * total * (1 - 1e-12)).sum()) if total > 0 else 0


class Count(NamedTuple):
    """Dimensions for 90 % of the squared singular values, the most there could be, and what Gaussian weights use."""

    dims: int
    most: int
    chance: float


class Spectrum(NamedTuple):
    """One layer: of each head's W_Q W_K^T; of their sum over heads; and of all W_Q, and all W_K, side by side.

    Where heads compare by the same few channels, those of the sum are far fewer than of Gaussian weights (2006.16362).
    """

    site: str
    heads: tuple[Count, ...]
    summed: Count
    queries: Count
    keys: Count
    caveats: tuple[str, ...]

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        one = {name: getattr(self, name)._asdict() for name in ("summed", "queries", "keys")}
        heads = [head._asdict() for head in self.heads]
        return {"site": self.site, "heads": heads, **one, "caveats": list(self.caveats)}


def spectra(model: nn.Module, *, draws: int = DRAWS, seed: int = 0) -> tuple[Spectrum, ...]:
    """How many dimensions every layer compares by; a layer whose scores are no product of two maps has none.

    The weights alone are asked: what turns queries and keys token by token is named beside each layer.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> found = spectra(net)[0]
    >>> [head.most for head in found.heads], found.summed.most
    ([4, 4], 8)
    """
    found, why = list[Spectrum](), ""
    for own in circuits(model).values():
        try:
            heads = [own.qk(head) for head in range(own.spec.heads.q)]
        except SpecError as error:
            why = str(error)
            continue
        found.append(_spectrum(own, heads, draws, torch.Generator().manual_seed(seed)))
    if not found:
        raise SpecError(why or "the model has no attention; hw.sites(model) says what it saw")
    return tuple(found)


def _spectrum(own: Circuits, heads: list[Factors], draws: int, draw: torch.Generator) -> Spectrum:
    """Of one layer, and of Gaussian weights where these keep who reads which keys."""
    reads = own.spec.heads.reads
    drawn = [_gaussian(heads, reads, draw) for _ in range(draws)]
    each = tuple(
        Count(dims(head.singular), min(*head.left.shape, *head.right.shape), _mean([one[n].singular for one in drawn]))
        for n, head in enumerate(heads)
    )
    summed = [_summed(one).singular for one in (heads, *drawn)]
    most = min(_queries(heads).shape + _keys(heads, reads).shape)
    queries = _stacked([_queries(one) for one in (heads, *drawn)])
    keys = _stacked([_keys(one, reads) for one in (heads, *drawn)])
    return Spectrum(own.site, each, Count(dims(summed[0]), most, _mean(summed[1:])), queries, keys, own.caveats)


def _stacked(matrices: list[Tensor]) -> Count:
    values = [torch.linalg.svdvals(matrix.double()) for matrix in matrices]
    return Count(dims(values[0]), len(values[0]), _mean(values[1:]))


def _mean(values: list[Tensor]) -> float:
    return sum(dims(one) for one in values) / max(1, len(values))


def _summed(heads: list[Factors]) -> Factors:
    """The sum over heads, as two matrices."""
    return Factors(_queries(heads), torch.cat([head.right for head in heads]))


def _queries(heads: list[Factors]) -> Tensor:
    return torch.cat([head.left for head in heads], 1)


def _keys(heads: list[Factors], reads: tuple[int, ...]) -> Tensor:
    """The matrices of all key heads, each once."""
    return torch.cat([heads[reads.index(key)].right for key in dict.fromkeys(reads)])


def _gaussian(heads: list[Factors], reads: tuple[int, ...], draw: torch.Generator) -> list[Factors]:
    """Heads of the same shapes drawn anew; those that read the same keys still do."""
    keys = {key: torch.randn(heads[reads.index(key)].right.shape, generator=draw) for key in dict.fromkeys(reads)}
    return [
        Factors(torch.randn(head.left.shape, generator=draw), keys[key]) for head, key in zip(heads, reads, strict=True)
    ]
