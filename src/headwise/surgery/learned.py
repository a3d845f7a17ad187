"""Heads that a model learns to do without, by gates: a choice among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..heads.scene import Example
from ..models import Transformer
from .choices import HeadSelection, LogFunction
from .gates import GateTrainingOptions, train_gates
from .plans import PruningPlan


@dataclass(frozen=True)
class KeepOpenGates(HeadSelection):
    """Keep the heads whose gates stay open while the model learns with a gate on each (1905.09418), as `gating` says.

    What is cut is the model as it then is: it has learnt to live with fewer heads. With freeze="model" it is as it was.
    """

    options: GateTrainingOptions

    def prepare(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> tuple[Transformer, PruningPlan]:
        found = train_gates(net, examples, self.options, lambda at: log(f"gates: step {at.step}, {at.num_open_gates or 0:.1f} open"))
        chances = [chance for own in found.open_probabilities.values() for chance in own]
        surely = sum(chance > 0.9 or chance < 0.1 for chance in chances)
        notes = [f"{surely} of {len(chances)} gates were open or shut with 9 chances in 10 at the end", *found.notes]
        notes += [found.stop_reason] if found.stop_reason else []
        why = f"those whose gates stayed open over {self.options.steps} steps"
        return found.net, PruningPlan.of(net.described, found.keep, why, notes)

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        return self.prepare(net, examples, log)[1]
