"""What a backend is told before it decides, and what it is handed when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import AttentionSpec
from ..terms import Asked, Core


@dataclass(frozen=True)
class Job:
    """One kind of call. Everything in it is known without looking at the device."""

    spec: AttentionSpec
    core: Core
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    grad: bool = False
    one: bool = False  # a single query per row
    stated: bool = False  # past tokens are a state
    paged: bool = False  # they lie in pages that rows may share
    masked: bool = False  # the caller hands a mask of their own
    training: bool = False
    wants: frozenset[str] = field(default_factory=frozenset)
    compiled: bool = False  # traced into a graph, which cannot ask the data
    store: str | None = None  # the form in which past tokens are kept, where it is not `dtype`
    keys: int | None = None  # how many keys a row has at least, where who is asked shall be chosen by it

    straight: bool = field(init=False)  # every score head reads values for itself, in order
    groups: int = field(init=False)  # score heads to a key head when all groups are equal neighbours, else 0

    def __post_init__(self) -> None:
        keys = self.core.keys
        each = len(keys) // (max(keys) + 1)
        even = keys == self.core.values and keys == tuple(h // each for h in range(each * (max(keys) + 1)))
        object.__setattr__(self, "groups", each if even else 0)
        object.__setattr__(self, "straight", self.spec.voices == tuple(range(self.spec.heads.q)))

    def early(self, least: int, other: str) -> list[str]:
        """Why a call is left to others that could run here: with so few keys these were measured to be faster.

        That is a preference and no ability: nothing is said of calls whose keys are not told, on devices where nobody
        measured, or of past tokens that are a state.
        """
        if self.keys is None or self.keys >= least or self.device != "cpu" or self.stated:
            return []
        return [f"for {self.keys:,} keys {other}: it begins at {least:,}, or where it is asked for by name"]


class Inputs(NamedTuple):
    """The tensors of one call: q_BTHK, k_BSGK, v_BSGV, what queries bring, and what was remembered beside.

    `gates` are those of the spec in their order, [B, T, O, V] or broadcast to it: outputs are multiplied with them.
    Where the keys of a call were not gathered from pages (`Tokens.spans`), k and v have a row for each page.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    asked: Asked
    entry: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    gates: Sequence[Tensor] = ()
