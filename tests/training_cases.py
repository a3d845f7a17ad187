"""Training by heads and by tokens: what ranks do, as one alone does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import headwise as hw
from headwise import blueprint as bp
from headwise.spread import Spread, joined
from headwise.spread.holding import hold
from headwise.spread.inside import Rows
from headwise.spread.traffic import Meter, traffic
from headwise.spread.world import World
from headwise.tasks import Batch
from headwise.training.choosing import Choice
from headwise.training.stepping import Stepper
from learning import IDS, Echo, quick
from many import STEPPED, Odd, steps_of

PLAIN = Choice("fp32", "off")
WAYS = ("tensor=2", "context=2")
PAIRS = ("data=2,tensor=2", "data=2,context=2", "context=2,tensor=2", "shards=2,tensor=2", "context=2,shards=2")


def steps(folder: Path) -> dict[str, Any]:
    """Every case, divided every way that this world can be."""
    with joined() as launch:
        ways = WAYS if launch.size == 2 else PAIRS
        return {way: {case: steps_of(case, launch, way) for case in STEPPED} for way in ways}


def sent(folder: Path) -> dict[str, Any]:
    """The collectives that the gradients of one step call, and those that are counted, of rows without padding."""
    found: dict[str, Any] = {}
    with joined() as launch:
        for way in WAYS if launch.size == 2 else PAIRS:
            for name, task, parts in (("echo", Echo(), 1), ("odd", Odd(), 2), ("pooled", Pooled(), 1)):
                model, world = task.model(), World(launch, Spread.over(way, launch.size))
                stepper = Stepper(hold(hw.build(model, seed=3), world), quick(batch=8, accumulate=parts), PLAIN)
                batch = replace(task.batch(0, 8), tokens=None, source_tokens=None)
                rows = Rows(8, batch.x.shape[1], 0 if batch.source is None else batch.source.shape[1])
                with Meter() as meter:
                    stepper.gradients(batch)
                found[way, name] = [tuple(message) for message in meter.messages]
                found[way, name, "counted"] = [tuple(m) for m in traffic(model, world.spread, parts, rows)]
    return found


class Pooled(Echo):
    """One label of a row, which a head reads off its mean; heads of one key, and whole rows of an even length."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        found = super().batch(index, size, split)
        return Batch(found.x, found.x[:, 0])

    def model(self) -> bp.Model:
        spec = hw.design(model=8, heads=4, kv=1, modifiers=(hw.QKNorm(),))
        stack = bp.Stack.of(
            "encoder", 8, [bp.Block(spec, feed=bp.Dense(13, bias="d"))] * 2, embedding=bp.Embedding(IDS)
        )
        return bp.Model("pooled", "encoder", (stack,), (bp.Head("class", IDS, at="mean"),))
