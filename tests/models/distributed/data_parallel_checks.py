"""Training on several ranks by data parallelism and sharding; the tests compare
it with one rank.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import Transformer, model_spec as bp
from headwise.models.distributed import Parallelism, join_process_group, parallelism
from headwise.models.distributed.parallelism import ProcessInfo
from headwise.models.distributed.ranks import ProcessMesh, fingerprint_code
from headwise.models.distributed.sharded_model import shard_model
from headwise.training import Recipe, run_setup, train
from headwise.training.data import IGNORE_INDEX, Batch, Task
from headwise.training.train_step import AdamWOptimiser, StepOptions, TrainStep, group_parameters
from support.small_training import IDS, Echo, RoutedEcho, short_recipe

STEPS, ECHO = 3, Echo()


def rank() -> int:
    """The number of this rank."""
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class Irregular(Echo):
    """A task with hard cases for ranks: a position table shared by layers, experts, two stacks with
    one embedding, merged cross-attention, sources and targets of different lengths, most labels on
    the second rank.
    """

    name: ClassVar[str] = "odd"

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        found, source = super().batch(index, size, split), super().batch(index + 50, size, split)
        labels = found.labels.clone()
        labels[: size // 2, 2:] = IGNORE_INDEX  # the first rank is asked less than the second
        return Batch(found.x, labels, found.tokens, source.x, source.tokens)

    def model(self) -> bp.ModelSpec:
        relative = (hw.parts.T5Bias(buckets=4, reach=6),)
        full, causal = (
            hw.design(model=8, heads=2, pattern=p, modifiers=relative) for p in ("full", "causal")
        )
        cross = hw.design(model=8, heads=2)
        encoder = [bp.BlockSpec(full, feed=bp.FeedForwardSpec(13))] * 2
        feed = bp.ExpertsSpec(bp.FeedForwardSpec(5, bias="ud"), 3, 2)
        decoder = [
            bp.BlockSpec(causal, cross=cross, feed=feed),
            bp.BlockSpec(cross=cross, feed=feed, form="merged"),
        ]
        stacks = (
            bp.StackSpec.from_blocks(
                "encoder", 8, encoder, embedding=bp.EmbeddingSpec(tokens=IDS), norm=bp.NormSpec()
            ),
            bp.StackSpec.from_blocks(
                "decoder", 8, decoder, embedding=bp.EmbeddingSpec(tokens=IDS, table="encoder")
            ),
        )
        heads = (
            bp.OutputHeadSpec("tokens", IDS, table="encoder", bias="learned"),
            bp.OutputHeadSpec("unread", 3),
        )
        return bp.ModelSpec("odd", "encoder-decoder", stacks, heads)


def take_steps(
    task: Task,
    net: Transformer,
    recipe: Recipe,
    launch: ProcessInfo,
    parallelism: str,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Losses, norms and gathered gradients of a few steps, and the weights after them; the dtypes
    of matrices and vectors while a layer runs.

    Only the leader has the numbers of a model that is divided.
    """
    world = ProcessMesh(launch, Parallelism.over(parallelism, launch.size))
    if max(world.parallelism.shards, world.parallelism.tensor) > 1 and not world.is_leader:
        net = net.to("meta")
    options = StepOptions(precision, "off")
    sharded = shard_model(net, world, options.dtype)
    stepper = TrainStep(sharded, recipe, options)
    dtypes: set[tuple[bool, torch.dtype]] = set()

    def record(layer: nn.Module, inputs: object) -> None:
        dtypes.update((one.dim() > 1, one.dtype) for one in layer.parameters())

    list(net.stacks.values())[-1].blocks[0].register_forward_pre_hook(record)
    optimiser = AdamWOptimiser(
        group_parameters(sharded.own, net.spec, recipe.decayed_parameters), recipe
    )
    results: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        net.train()
        results["losses"].append(stepper.compute_gradients(task.batch(step, recipe.batch)).item())
        results["norms"].append(sharded.norm().item())
        sharded.clip(recipe.clip, sharded.norm())
        results["gradients"].append(
            {name: gradient(sharded, name, p) for name, p in sharded.own.items()}
        )
        optimiser.step(0.01)
    return results | {
        "dtypes": dtypes,
        "weights": {name: tensor.detach().clone() for name, tensor in sharded.tensors()},
    }


def gradient(holding: Any, name: str, own: nn.Parameter) -> Tensor | None:
    return None if own.grad is None else holding.whole(name, own.grad).clone()


# Steps that every layout of ranks takes: a task, what its recipe says, and by how many parts each
# batch is taken.
STEPPED: dict[str, tuple[Task, dict[str, Any]]] = {
    "echo": (Echo(), {"batch": 5}),
    "odd": (Irregular(), {"batch": 6, "clip": 0.1}),
    "terms": (RoutedEcho(), {"batch": 8, "aux_losses": (("balance", 0.5),)}),
    "parts": (Echo(), {"batch": 6, "accumulate": 3}),
    "recomputed": (Irregular(), {"batch": 6, "activations": "recompute"}),
}


def steps_of_case(
    case: str, launch: ProcessInfo, parallelism: str, precision: str = "fp32", **also: Any
) -> dict[str, Any]:
    """Steps of one case in float64, where only the order of sums differs, or in bfloat16 on
    weights in float32.
    """
    task, settings = STEPPED[case]
    recipe = short_recipe(**settings, **also)
    net = hw.build(task.model(), seed=3).to(torch.float64 if precision == "fp32" else torch.float32)
    net.checkpointing = "block" if recipe.activations == "recompute" else "none"
    return take_steps(task, net, recipe, launch, parallelism, precision)


def steps(folder: Path) -> dict[str, Any]:
    """Steps of every case under every parallelism of this group."""
    with join_process_group() as launch:
        return {
            way: {case: steps_of_case(case, launch, way) for case in STEPPED}
            | {"bf16": steps_of_case("echo", launch, way, "bf16")}
            | {"bf16 odd": steps_of_case("odd", launch, way, "bf16")}
            for way in parallelisms_of(launch)
        }


def parallelisms_of(launch: ProcessInfo) -> list[str]:
    return [
        f"data={launch.size}",
        f"shards={launch.size}",
        *(["data=2,shards=2"] if launch.size == 4 else []),
    ]


def wait_for_silent_rank(folder: Path) -> str:
    """The error message of a rank that waits for one which does not respond."""
    parallelism.COLLECTIVE_TIMEOUT = timedelta(seconds=2)
    try:
        with join_process_group() as process:
            world = ProcessMesh(process, Parallelism.over("auto", process.size))
            if not world.is_leader:
                time.sleep(6)
            world.all_gather_objects(rank())
    except ConnectionError as error:
        return str(error)
    return "nothing"


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interrupted(Echo):
    """Raises SIGINT on the last rank while batch `at` is made."""

    name: ClassVar[str] = "echo"
    at: ClassVar[int] = -1

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        if split == "train" and index == self.at and last == rank():
            signal.raise_signal(signal.SIGINT)
        return super().batch(index, size, split)


def run_until(step: int, recipe: Recipe, folder: Path) -> str:
    """The message at the end of a run that is interrupted at a step, or not (-1)."""
    Interrupted.at = step
    try:
        train(Interrupted(), recipe=recipe, out=folder, resume="allowed")
    except KeyboardInterrupt as error:
        return str(error)
    return ""


def refusals(folder: Path) -> dict[str, str]:
    """The error message on each rank of runs that cannot work; the second rank differs in one thing
    each time.
    """

    def message_of(work: Callable[[], object]) -> str:
        try:
            work()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def run(task: Task = ECHO, described: Any = None, out: str = "never", **options: Any) -> str:
        return message_of(lambda: train(task, described, short_recipe(**options), folder / out))

    def with_code() -> str:
        values, run_setup.fingerprint_code = (
            run_setup.fingerprint_code,
            lambda: {**fingerprint_code(), **({"source": "other"} if second else {})},
        )
        try:
            return run()
        finally:
            run_setup.fingerprint_code = values

    second = rank() == 1
    return {
        "code": with_code(),
        "recipe": run(lr=0.002 if second else 0.001),
        "task": run(Echo(noise=0.5 if second else 0.0)),
        "data": run(Shifted() if second else Echo()),
        "model": run(described=smaller_model() if second else None),
        "weights": run(described=hw.build(Echo().model(), seed=rank())),
        "parallelism": run(parallelism="shards=2" if second else "data=2"),
        "rows": run(batch=1),
        "parts": run(batch=4, accumulate=4),
        "size": run(parallelism="data=3"),
        "compile": run(parallelism="shards=2", compile="on"),
        "one rank": run(Missing() if second else Echo()),
        "diverged": run(described=diverging_model(), out="diverged"),
        "diverged slices": run(
            described=diverging_model(), out="diverged-slices", parallelism="shards=2"
        ),
        "bad weight": run(
            described=model_with_nan_weight(), out="bad-weight", parallelism="shards=2"
        ),
    }


@dataclass(frozen=True)
class Shifted(Echo):
    """Other data under one name."""

    name: ClassVar[str] = "echo"

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        return super().batch(index + 1, size, split)


@dataclass(frozen=True)
class Missing(Echo):
    """Data that does not exist."""

    name: ClassVar[str] = "echo"

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        raise FileNotFoundError("the data is not here; copy it to this machine")


def smaller_model() -> bp.ModelSpec:
    return bp.from_toml(bp.to_toml(Echo().model()).replace("hidden = 13", "hidden = 17"))


def diverging_model() -> Transformer:
    """A model whose feed-forward returns NaN on the second rank only."""
    net = hw.build(Echo().model(), seed=0)
    if rank() == 1:
        net.get_submodule("decoder.0.feed").register_forward_hook(
            lambda module, inputs, out: out * float("nan")
        )
    return net


def model_with_nan_weight() -> Transformer:
    """A model with a NaN weight in the last row of a matrix, which is on the second rank."""
    net = hw.build(Echo().model(), seed=0)
    with torch.no_grad():
        net.get_parameter("decoder.0.feed.up")[-1] = float("nan")
    return net


DROPPED = {"dropout": 0.2, "accumulate": 2, "batch": 12, "steps": 6, "evaluate_every": 3}
PLAIN = {"batch": 7, "steps": 6, "evaluate_every": 3, "patience": 1, "lr": 0.01}


def run_two_ranks(folder: Path) -> dict[str, Any]:
    """Everything that needs two ranks, in one group, because starting a group takes longer than
    most checks.
    """
    with join_process_group():
        return {"steps": steps(folder), "runs": runs(folder)}


def runs(folder: Path) -> dict[str, Any]:
    """Runs that complete, and runs that are interrupted and resumed, under one parallelism and
    under others.
    """
    random = short_recipe(**DROPPED)
    messages = {
        "whole": run_until(-1, random, folder / "whole"),
        "stopped": run_until(3, random, folder / "stopped"),
        "resumed": run_until(-1, random, folder / "stopped"),
    }
    slices = short_recipe(**DROPPED, parallelism="shards=2")
    run_until(-1, slices, folder / "slices")
    run_until(3, slices, folder / "slices stopped")
    run_until(-1, slices, folder / "slices stopped")
    run_until(1, short_recipe(**PLAIN, parallelism="shards=2"), folder / "other ways")
    run_until(3, short_recipe(**PLAIN, parallelism="data=2"), folder / "other ways")
    run_until(-1, short_recipe(**PLAIN, parallelism="shards=2"), folder / "other ways")
    run_until(4, short_recipe(**PLAIN), folder / "one, two, one")
    return messages | refusals(folder)
