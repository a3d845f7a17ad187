"""How far two models of the same layers go along with each other, layer by layer and in what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .sayings import OutputAndStates


class CosineSummary(NamedTuple):
    """The cosine of what two models hold of a token: its mean over the tokens of all texts, and the lowest."""

    mean: float
    low: float


@dataclass(frozen=True)
class ModelAgreement:
    """The cosine of states behind every layer, and of what is said; where a head says it, how often both hold the same
    for likeliest, and the mean of KL(before || after), in nats."""

    layers: Mapping[str, CosineSummary]
    output: CosineSummary
    top1_match: float | None = None
    kl: float | None = None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        layers = {name: one._asdict() for name, one in self.layers.items()}
        return {"layers": layers, "output": self.output._asdict(), "same_likeliest": self.top1_match, "kl": self.kl}


@dataclass
class AgreementAccumulator:
    """What was summed over texts; `speaks` says whether what is said are logits: "logits" or "states"."""

    output_kind: str
    sums: dict[str, list[float]] = field(default_factory=dict)
    num_top1_matches: int = 0
    kl: float = 0.0
    num_positions: int = 0

    def update(self, before: OutputAndStates, after: OutputAndStates) -> None:
        """What both made of one text more."""
        if before.states.keys() != after.states.keys():
            layers = f"{len(before.states)} and {len(after.states)}"
            raise ValueError(f"the two models have {layers} layers; compare models whose layers are the same in number")
        for name, states in before.states.items():
            self._add_cosine(name, states, after.states[name])
        self._add_cosine("", before.output, after.output)
        if self.output_kind == "logits":
            own, other = (one.output.double().reshape(-1, one.output.shape[-1]) for one in (before, after))
            self.num_top1_matches += int((own.argmax(-1) == other.argmax(-1)).sum())
            self.kl += float(F.kl_div(other.log_softmax(-1), own.log_softmax(-1), log_target=True, reduction="sum"))
            self.num_positions += len(own)

    def _add_cosine(self, name: str, one: Tensor, other: Tensor) -> None:
        each = F.cosine_similarity(one.double().flatten(0, -2), other.double().flatten(0, -2), dim=-1)
        total = self.sums.setdefault(name, [0.0, 0.0, 1.0])
        total[:] = total[0] + float(each.sum()), total[1] + len(each), min(total[2], float(torch.min(each)))

    @property
    def result(self) -> ModelAgreement:
        """The whole of it."""
        found = {name: CosineSummary(total / count, low) for name, (total, count, low) in self.sums.items()}
        said = found.pop("")
        if self.output_kind != "logits":
            return ModelAgreement(found, said)
        return ModelAgreement(found, said, self.num_top1_matches / self.num_positions, max(0.0, self.kl / self.num_positions))
