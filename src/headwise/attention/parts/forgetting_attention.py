"""Forgetting attention: a gate of every token lowers the scores of all keys before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import RowFactors, RowStep
from ..interfaces.core_types import AxisLayout, Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, xavier_uniform, zeros_init


@part
class ForgetGate(RowStep):
    """s_ij -> s_ij + the sum of log f_l over the keys l after j, where f = sigmoid(W z + b) is one
    number per head and token (2503.02130).

    The sum covers the allowed keys of the query, up to the query itself, so a token does not forget
    itself. Recent keys lose less than old ones, and no positions are needed. Each head caches log f
    of every token. Two gates of 1/2 after a key lower its score by log 4:

    >>> import headwise as hw
    >>> layer = hw.Attention(
    ...     hw.design(model=4, heads=1, pattern="causal", modifiers=(ForgetGate(),))
    ... )
    >>> _ = [weight.data.zero_() for weight in layer.parameters()]
    >>> scores = hw.Probe("scores")
    >>> _ = layer(torch.ones(1, 3, 4), probe=scores)
    >>> scores.tensors["scores"][0, 0, 2].exp().tolist()
    [0.25, 0.5, 1.0]
    """

    paper = "2503.02130"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The released Pro architecture also normalises queries and keys, gates outputs and shifts "
        "keys and values by a token. Here it is the gate alone; QKNorm and OutputGate add the "
        "first two.",
    )
    unrestricted_sides: ClassVar[str] = "kv"
    additive: ClassVar[bool] = True

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from self.order_conflicts(spec)

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {
            "gate": weight("q source", xavier_uniform, "source"),
            "bias": weight("q", zeros_init),
        }

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"log_gate": AxisLayout.parse("q")}

    def key_factors(self, z_BSE: Tensor, q_BSHK: Tensor, p: PartParams) -> dict[str, Tensor]:
        return {"log_gate": F.logsigmoid(F.linear(z_BSE, p["gate"], p["bias"]))}

    def change_row(self, s_S: Tensor, head: int, factors: RowFactors, p: PartParams) -> Tensor:
        log_gate_S = factors.key["log_gate"][:, head]
        decay = [log_gate_S[n + 1 :].sum() for n in range(len(s_S))]
        return s_S + torch.stack(decay) if decay else s_S

    def change_rows(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor:
        log_gate_BH1S = factors.key["log_gate"].to(s_BHTS.dtype).transpose(1, 2)[:, :, None]
        return s_BHTS + factors.sum_after(log_gate_BH1S)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(cls(),), pattern="window(4)", vdim=5)
