"""Training by heads and by tokens: what ranks do, as one alone does it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

import headwise as hw
from headwise import model_spec as bp
from headwise.data import Batch, Task
from headwise.distributed import Parallelism, ProcessInfo, join_process_group
from headwise.distributed.communication_volume import BatchShape, CommunicationMeter, count_communication
from headwise.distributed.ranks import ProcessMesh
from headwise.distributed.sharded_model import shard_model
from headwise.training import train
from headwise.training.train_step import StepOptions, TrainStep
from support.data_parallel_checks import STEPPED, Interrupted, Odd, stepped, steps_of, until
from support.small_training import IDS, Answered, Echo, quick

CASES = (*STEPPED, "shared keys")
PLAIN = StepOptions("fp32", "off")
WAYS = ("tensor=2", "context=2")
PAIRS = ("data=2,tensor=2", "data=2,context=2", "context=2,tensor=2", "shards=2,tensor=2", "context=2,shards=2")


def everything(folder: Path) -> dict[str, Any]:
    """All that ranks are asked for, in one world: beginning one takes longer than most of it."""
    with join_process_group() as launch:
        found = {"steps": steps(launch), "sent": sent(launch)}
        return found | ({"runs": runs(folder), "told": refusals(folder)} if launch.size == 2 else {})


def steps(launch: ProcessInfo) -> dict[str, Any]:
    """Every case, divided every way that this world can be."""
    return {way: {case: steps_as(case, launch, way) for case in CASES} for way in ways_of(launch)}


def steps_as(case: str, launch: ProcessInfo, way: str, **more: Any) -> dict[str, Any]:
    """Those of a case of many ranks, or of one more: heads that share a key, and a gradient that is shortened."""
    if case in STEPPED:
        return steps_of(case, launch, way, **more)
    return stepped(Pooled(), hw.build(Pooled().model(), seed=3).double(), quick(batch=6, clip=0.05), launch, way)


def ways_of(launch: ProcessInfo) -> tuple[str, ...]:
    return WAYS if launch.size == 2 else PAIRS


def sent(launch: ProcessInfo) -> dict[str, Any]:
    """The collectives that the gradients of one step call, and those that are counted, of rows without padding."""
    found: dict[str, Any] = {}
    for way in ways_of(launch):
        for name, task, parts in (("echo", Echo(), 1), ("odd", Odd(), 2), ("pooled", Pooled(), 1)):
            model, world = task.model(), ProcessMesh(launch, Parallelism.over(way, launch.size))
            stepper = TrainStep(shard_model(hw.build(model, seed=3), world), quick(batch=8, accumulate=parts), PLAIN)
            batch = replace(task.batch(0, 8), tokens=None, source_tokens=None)
            rows = BatchShape(8, batch.x.shape[1], 0 if batch.source is None else batch.source.shape[1])
            with CommunicationMeter() as meter:
                stepper.compute_gradients(batch)
            counted = count_communication(model, world.spread, parts, rows)
            found[way, name] = Counter(map(tuple, meter.messages)), Counter(map(tuple, counted))
    return found


def runs(folder: Path) -> dict[str, str]:
    """A run that goes on another way each time it is interrupted, and one whose loss has terms."""
    said = {"batch": 6, "steps": 6, "evaluate_every": 3, "lr": 0.01}
    for at, way in ((1, "tensor=2"), (3, "context=2"), (-1, "tensor=2")):
        until(at, quick(**said, spread=way), folder / "ways")
    for way in WAYS:
        train(Balanced(), recipe=quick(**BALANCED, spread=way), out=folder / f"balanced {way}")
        train(Answered(), recipe=quick(**said, spread=way, dropout=0.3), out=folder / f"dropped {way}")
    return {"drawn": drawn(folder)}


def drawn(folder: Path) -> list[float]:
    """Where this rank's stream stands at every step of a run by rows that goes on by heads."""
    Drawn.seen.clear()
    for at, way in ((2, "data=2"), (-1, "tensor=2")):
        Drawn.at = at
        with suppress(KeyboardInterrupt):
            train(Drawn(), recipe=quick(batch=6, dropout=0.3, spread=way), out=folder / "drawn", resume="allowed")
    return Drawn.seen


def refusals(folder: Path) -> dict[str, str]:
    """What each rank is told of what cannot be."""

    def told(task: Task, **said: Any) -> str:
        try:
            train(task, recipe=quick(**said), out=folder / "never")
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return {
        "mixed": told(Mixed(), spread="tensor=2"),
        "one head": told(OneHead(), spread="tensor=2"),
        "pixels": told(Pictures(), spread="context=2"),
        "compiled": told(Echo(), spread="tensor=2", compile="on"),
        "compiled rows": told(Echo(), spread="context=2", compile="on"),
    }


@dataclass(frozen=True)
class Balanced(Echo):
    """Tokens that choose their heads, and are to choose them evenly."""

    name: ClassVar[str] = "balanced"

    def model(self) -> bp.ModelSpec:
        gates = (hw.Rotary(), hw.Routed(always=1, active=1))
        return of(hw.design(model=8, heads=4, kv=2, pattern="causal", modifiers=gates))


BALANCED = {"batch": 6, "steps": 4, "evaluate_every": 2, "lr": 0.01, "terms": (("balance", 0.5),)}


@dataclass(frozen=True)
class Drawn(Interrupted):
    """One that notes where torch's generator stands when a batch is made."""

    at: ClassVar[int] = -1
    seen: ClassVar[list[float]] = []

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        self.seen.append(torch.get_rng_state().double().sum().item())
        return super().batch(index, size, split)


class Mixed(Echo):
    """Every head of it needs every other."""

    def model(self) -> bp.ModelSpec:
        return of(hw.design(model=8, heads=4, modifiers=(hw.TalkingHeads(),)))


class OneHead(Echo):
    """Nothing to divide."""

    def model(self) -> bp.ModelSpec:
        return of(hw.design(model=8, heads=1))


class Pictures(Echo):
    """A row of it is no row of tokens yet."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        return Batch(torch.zeros(size, 1, 4, 4), torch.zeros(size, dtype=torch.int64))

    def model(self) -> bp.ModelSpec:
        patches = bp.EmbeddingSpec(patches=bp.PatchSpec(2, 2, 2, 2, channels=1))
        stack = bp.StackSpec.from_blocks("encoder", 8, [bp.BlockSpec(feed=bp.FeedForwardSpec(4))], embedding=patches)
        return bp.ModelSpec("pictures", "vision", (stack,), (bp.OutputHeadSpec("class", 3, at="mean"),))


def of(spec: hw.AttentionSpec) -> bp.ModelSpec:
    """One layer of a decoder."""
    stack = bp.StackSpec.from_blocks(
        "decoder", 8, [bp.BlockSpec(spec, feed=bp.FeedForwardSpec(6))], embedding=bp.EmbeddingSpec(IDS)
    )
    return bp.ModelSpec("one", "decoder", (stack,), (bp.OutputHeadSpec("tokens", IDS),))


class Pooled(Echo):
    """One label of a row, which a head reads off its mean; heads of one key, and whole rows of an even length."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        found = super().batch(index, size, split)
        return Batch(found.x, found.x[:, 0])

    def model(self) -> bp.ModelSpec:
        spec = hw.design(model=8, heads=4, kv=1, modifiers=(hw.QKNorm(),))
        stack = bp.StackSpec.from_blocks(
            "encoder",
            8,
            [bp.BlockSpec(spec, feed=bp.FeedForwardSpec(13, bias="d"))] * 2,
            embedding=bp.EmbeddingSpec(IDS),
        )
        return bp.ModelSpec("pooled", "encoder", (stack,), (bp.OutputHeadSpec("class", IDS, at="mean"),))
