"""Heads that a model learns to do without, by gates: a choice among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..heads.scene import Scene
from ..models import Transformer
from .choices import Choice, Tell
from .gates import Gating, gated
from .plans import Plan


@dataclass(frozen=True)
class Gated(Choice):
    """Keep the heads whose gates stay open while the model learns with a gate on each (1905.09418), as `gating` says.

    What is cut is the model as it then is: it has learnt to live with fewer heads. With freeze="model" it is as it was.
    """

    gating: Gating

    def ready(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> tuple[Transformer, Plan]:
        found = gated(net, scenes, self.gating, lambda at: tell(f"gates: step {at.step}, {at.opened or 0:.1f} open"))
        chances = [chance for own in found.chances.values() for chance in own]
        surely = sum(chance > 0.9 or chance < 0.1 for chance in chances)
        notes = [f"{surely} of {len(chances)} gates were open or shut with 9 chances in 10 at the end", *found.notes]
        notes += [found.ended] if found.ended else []
        why = f"those whose gates stayed open over {self.gating.steps} steps"
        return found.net, Plan.of(net.described, found.keep, why, notes)

    def plan(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> Plan:
        return self.ready(net, scenes, tell)[1]
