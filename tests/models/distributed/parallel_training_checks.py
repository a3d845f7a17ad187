"""Training by tensor and context parallelism; the tests compare it with one rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import headwise as hw
from headwise.models import model_spec as bp
from headwise.models.distributed import ProcessInfo, join_process_group
from headwise.training import train
from headwise.training.data import Batch, Task
from headwise.training.train_step import StepOptions
from models.distributed.data_parallel_checks import (
    STEPPED,
    Interrupted,
    run_until,
    steps_of_case,
    take_steps,
)
from support.small_training import IDS, Answered, Echo, short_recipe

CASES = (*STEPPED, "shared keys")
PLAIN = StepOptions("fp32", "off")
TWO_RANKS = ("tensor=2", "context=2")
FOUR_RANKS = (
    "data=2,tensor=2",
    "data=2,context=2",
    "context=2,tensor=2",
    "context=2,shards=2",
)


def run_everything(folder: Path) -> dict[str, Any]:
    """Everything that ranks are needed for, in one group, because starting a group takes longer
    than most checks.
    """
    with join_process_group() as launch:
        results = {"steps": steps(launch)}
        return results | (
            {"runs": runs(folder), "refusals": refusals(folder)} if launch.size == 2 else {}
        )


def steps(launch: ProcessInfo) -> dict[str, Any]:
    """Steps of every case under every parallelism of this group."""
    return {
        way: {case: steps_of_any_case(case, launch, way) for case in CASES}
        for way in parallelisms_of(launch)
    }


def steps_of_any_case(case: str, launch: ProcessInfo, way: str, **more: Any) -> dict[str, Any]:
    """Steps of a case of data parallelism, or of the case with shared keys and
    gradient clipping.
    """
    if case in STEPPED:
        return steps_of_case(case, launch, way, **more)
    return take_steps(
        Pooled(),
        hw.build(Pooled().model(), seed=3).double(),
        short_recipe(batch=6, clip=0.05),
        launch,
        way,
    )


def parallelisms_of(launch: ProcessInfo) -> tuple[str, ...]:
    return TWO_RANKS if launch.size == 2 else FOUR_RANKS


def runs(folder: Path) -> dict[str, str]:
    """A run that is resumed under another parallelism after each interrupt, and a run with
    auxiliary losses.
    """
    settings = {"batch": 6, "steps": 6, "evaluate_every": 3, "lr": 0.01}
    for at, way in ((1, "tensor=2"), (3, "context=2"), (-1, "tensor=2")):
        run_until(at, short_recipe(**settings, parallelism=way), folder / "ways")
    for way in TWO_RANKS:
        train(
            Balanced(),
            recipe=short_recipe(**BALANCED, parallelism=way),
            out=folder / f"balanced {way}",
        )
        train(
            Answered(),
            recipe=short_recipe(**settings, parallelism=way, dropout=0.3),
            out=folder / f"dropped {way}",
        )
    return {"drawn": rng_states(folder)}


def rng_states(folder: Path) -> list[float]:
    """The random state of this rank at every step of a data-parallel run that resumes with tensor
    parallelism.
    """
    RecordsRng.seen.clear()
    for at, parallelism in ((2, "data=2"), (-1, "tensor=2")):
        RecordsRng.at = at
        with suppress(KeyboardInterrupt):
            train(
                RecordsRng(),
                recipe=short_recipe(batch=6, dropout=0.3, parallelism=parallelism),
                out=folder / "drawn",
                resume="allowed",
            )
    return RecordsRng.seen


def refusals(folder: Path) -> dict[str, str]:
    """The error message on each rank of runs that cannot work."""

    def message_of(task: Task, **options: Any) -> str:
        try:
            train(task, recipe=short_recipe(**options), out=folder / "never")
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return {
        "mixed": message_of(Mixed(), parallelism="tensor=2"),
        "one head": message_of(OneHead(), parallelism="tensor=2"),
        "pixels": message_of(Pictures(), parallelism="context=2"),
        "compiled": message_of(Echo(), parallelism="tensor=2", compile="on"),
        "compiled rows": message_of(Echo(), parallelism="context=2", compile="on"),
    }


@dataclass(frozen=True)
class Balanced(Echo):
    """Tokens that choose their heads, with a load-balance loss."""

    name: ClassVar[str] = "balanced"

    def model(self) -> bp.ModelSpec:
        gates = (hw.parts.Rotary(), hw.parts.MixtureOfHeads(always=1, active=1))
        return decoder_of(hw.design(model=8, heads=4, kv=2, pattern="causal", modifiers=gates))


BALANCED = {
    "batch": 6,
    "steps": 4,
    "evaluate_every": 2,
    "lr": 0.01,
    "aux_losses": (("balance", 0.5),),
}


@dataclass(frozen=True)
class RecordsRng(Interrupted):
    """Records the random state of torch when a batch is made."""

    at: ClassVar[int] = -1
    seen: ClassVar[list[float]] = []

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        self.seen.append(torch.get_rng_state().double().sum().item())
        return super().batch(index, size, split)


class Mixed(Echo):
    """Heads that are all mixed with each other."""

    def model(self) -> bp.ModelSpec:
        return decoder_of(hw.design(model=8, heads=4, modifiers=(hw.parts.TalkingHeads(),)))


class OneHead(Echo):
    """A single head, which cannot be divided."""

    def model(self) -> bp.ModelSpec:
        return decoder_of(hw.design(model=8, heads=1))


class Pictures(Echo):
    """Images, whose rows are not tokens before the embedding."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        return Batch(torch.zeros(size, 1, 4, 4), torch.zeros(size, dtype=torch.int64))

    def model(self) -> bp.ModelSpec:
        patches = bp.EmbeddingSpec(patches=bp.PatchSpec(2, 2, 2, 2, channels=1))
        stack = bp.StackSpec.from_blocks(
            "encoder", 8, [bp.BlockSpec(feed=bp.FeedForwardSpec(4))], embedding=patches
        )
        return bp.ModelSpec(
            "pictures", "vision", (stack,), (bp.OutputHeadSpec("class", 3, at="mean"),)
        )


def decoder_of(spec: hw.AttentionSpec) -> bp.ModelSpec:
    """A decoder of one layer."""
    stack = bp.StackSpec.from_blocks(
        "decoder",
        8,
        [bp.BlockSpec(spec, feed=bp.FeedForwardSpec(6))],
        embedding=bp.EmbeddingSpec(IDS),
    )
    return bp.ModelSpec("one", "decoder", (stack,), (bp.OutputHeadSpec("tokens", IDS),))


class Pooled(Echo):
    """One label per row, from its mean; heads that share one key, and full rows of even length."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        found = super().batch(index, size, split)
        return Batch(found.x, found.x[:, 0])

    def model(self) -> bp.ModelSpec:
        spec = hw.design(model=8, heads=4, kv=1, modifiers=(hw.parts.QKNorm(),))
        stack = bp.StackSpec.from_blocks(
            "encoder",
            8,
            [bp.BlockSpec(spec, feed=bp.FeedForwardSpec(13, bias="d"))] * 2,
            embedding=bp.EmbeddingSpec(IDS),
        )
        return bp.ModelSpec(
            "pooled", "encoder", (stack,), (bp.OutputHeadSpec("class", IDS, at="mean"),)
        )
