"""How far two models of the same layers go along with each other, layer by layer and in what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .sayings import Saying


class Agreed(NamedTuple):
    """The cosine of what two models hold of a token: its mean over the tokens of all texts, and the lowest."""

    mean: float
    low: float


@dataclass(frozen=True)
class Agreement:
    """The cosine of states behind every layer, and of what is said; where a head says it, how often both hold the same
    for likeliest, and the mean of KL(before || after), in nats."""

    layers: Mapping[str, Agreed]
    output: Agreed
    same: float | None = None
    kl: float | None = None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        layers = {name: one._asdict() for name, one in self.layers.items()}
        return {"layers": layers, "output": self.output._asdict(), "same_likeliest": self.same, "kl": self.kl}


@dataclass
class Agreeing:
    """What was summed over texts; `speaks` says whether what is said are logits: "logits" or "states"."""

    speaks: str
    sums: dict[str, list[float]] = field(default_factory=dict)
    same: int = 0
    kl: float = 0.0
    places: int = 0

    def take(self, before: Saying, after: Saying) -> None:
        """What both made of one text more."""
        if before.states.keys() != after.states.keys():
            layers = f"{len(before.states)} and {len(after.states)}"
            raise ValueError(f"the two models have {layers} layers; compare models whose layers are the same in number")
        for name, states in before.states.items():
            self._angle(name, states, after.states[name])
        self._angle("", before.output, after.output)
        if self.speaks == "logits":
            own, other = (one.output.double().reshape(-1, one.output.shape[-1]) for one in (before, after))
            self.same += int((own.argmax(-1) == other.argmax(-1)).sum())
            self.kl += float(F.kl_div(other.log_softmax(-1), own.log_softmax(-1), log_target=True, reduction="sum"))
            self.places += len(own)

    def _angle(self, name: str, one: Tensor, other: Tensor) -> None:
        each = F.cosine_similarity(one.double().flatten(0, -2), other.double().flatten(0, -2), dim=-1)
        total = self.sums.setdefault(name, [0.0, 0.0, 1.0])
        total[:] = total[0] + float(each.sum()), total[1] + len(each), min(total[2], float(torch.min(each)))

    @property
    def agreement(self) -> Agreement:
        """The whole of it."""
        found = {name: Agreed(total / count, low) for name, (total, count, low) in self.sums.items()}
        said = found.pop("")
        if self.speaks != "logits":
            return Agreement(found, said)
        return Agreement(found, said, self.same / self.places, max(0.0, self.kl / self.places))
