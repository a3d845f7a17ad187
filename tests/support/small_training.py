"""A task and a model that train in a second, for tests of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import headwise as hw
from headwise.models import Transformer
from headwise.models.distributed.sharded_model import wrap_single_process
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from headwise.report.data import Figure
from headwise.training import Recipe
from headwise.training.data import IGNORE_INDEX, SPLITS, Batch, MetricSums, Task
from headwise.training.data.task import check_split
from headwise.training.loggers import CURVE_FILES
from headwise.training.train_step import StepOptions, TrainStep
from headwise.util.files import write_atomically

IDS, LONGEST = 11, 7
QUICK = {
    "precision": "fp32",
    "compile": "off",
    "attention": "fused",
    "rows": "padded",
    "device": "cpu",
    "evaluate_batches": 1,
}


@dataclass(frozen=True)
class Echo(Task):
    """Predict the previous token: rows of 3 to 7 random ids, labels shifted by one, no label for
    the first.
    """

    name: ClassVar[str] = "echo"
    noise: float = 0.0

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        check_split(split)
        rows = []
        for n in range(index * size, (index + 1) * size):
            generator = torch.Generator().manual_seed(
                1000003 * self.seed + 3 * n + SPLITS.index(split)
            )
            length = int(torch.randint(3, LONGEST + 1, (1,), generator=generator))
            rows.append(torch.randint(1, IDS, (length,), generator=generator))
        x = torch.zeros(size, LONGEST, dtype=torch.int64)
        labels = torch.full_like(x, IGNORE_INDEX)
        for n, row in enumerate(rows):
            x[n, : len(row)] = row
            labels[n, 1 : len(row)] = row[:-1]
        return Batch(x, labels, hw.SequenceInfo.from_batch(x, lengths=[len(row) for row in rows]))

    def model(self) -> ModelSpec:
        spec = hw.design(model=8, heads=2, pattern="causal")
        embedding = EmbeddingSpec(tokens=IDS, positions=PositionSpec("learned", LONGEST))
        stack = StackSpec.from_blocks(
            "decoder",
            8,
            [BlockSpec(spec, feed=FeedForwardSpec(13, bias="ud"))],
            embedding=embedding,
        )
        return ModelSpec(
            "echo",
            "decoder",
            (stack,),
            (OutputHeadSpec("tokens", IDS, table="decoder", bias="learned"),),
        )

    @property
    def chance(self) -> Mapping[str, float]:
        return {"accuracy": 1 / (IDS - 1), "exact_match": 0.0}


@dataclass(frozen=True)
class Answered(Echo):
    """The echo task with two tokens generated after each prompt of three."""

    name: ClassVar[str] = "answered"
    answers: ClassVar[int] = 2

    def prompt(self, batch: Batch) -> tuple[Tensor, None]:
        return batch.x[:, :3], None

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        right = sum(row == x[1:3].tolist() for row, x in zip(generated, batch.x, strict=True))
        return {"exact_match": (float(right), len(generated))}


@dataclass(frozen=True)
class RoutedEcho(Echo):
    """The echo task with heads chosen per token and a load-balance loss."""

    name: ClassVar[str] = "routed"

    def model(self) -> ModelSpec:
        described = super().model()
        spec = hw.design(
            model=8,
            heads=4,
            pattern="causal",
            modifiers=(hw.parts.MixtureOfHeads(always=1, active=2),),
        )
        stack = described.stacks[0]
        blocks = [BlockSpec(spec, feed=block.feed) for block in stack.layers * 2]
        return ModelSpec(
            "routed",
            "decoder",
            (StackSpec.from_blocks("decoder", 8, blocks, embedding=stack.embedding),),
            described.heads,
        )


def short_recipe(**options: object) -> Recipe:
    """A recipe of a few plain steps."""
    return Recipe(
        **{"steps": 6, "batch": 5, "evaluate_every": 3, "checkpoint_every": 2, **QUICK, **options}
    )


PLAIN = StepOptions("fp32", "off")


def make_train_step(net: Transformer, recipe: Recipe, choice: StepOptions = PLAIN) -> TrainStep:
    """A training step on this rank alone, on the CPU."""
    return TrainStep(wrap_single_process(net), recipe, choice)


# Arguments that make a documented command short; its other arguments stay as they are.
SHORT_RUNS = {
    "train": [*("--steps", "3"), *("--batch", "8"), *("--set", "recipe.evaluate_batches=1")],
    "study": [
        *("--set", "recipe.steps=2", "--set", "recipe.evaluate_batches=1"),
        *("--set", "seeds=[1,2]", "--set", "head_texts=2", "--jobs", "0"),
    ],
}


def save_small_curves(folder: Path, figure: Figure) -> None:
    """Empty pictures instead of learning curves, because drawing them takes longer than most runs
    of tests.
    """
    for name in CURVE_FILES.values():
        write_atomically(folder / name, b"<svg/>")


class CrashingLogger:
    """A logger that ends a run at a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def open(self, folder: Path, config: object) -> None:
        pass

    def write(self, record: Mapping[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == self.step:
            raise RuntimeError("a crash")

    def close(self) -> None:
        pass
