"""Two processes against one on the same batches: how much of the second is gained, and what they
send each other.

`python -m benchmarks.distributed [--json]` starts two processes by torchrun, one thread each. Both
take steps of one GPT every way that work can be divided; in between the first takes them alone
while the other waits. Efficiency is the speed-up over two.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import headwise as hw
from benchmarks.reference_models import GPTShape, to_model_spec
from headwise.models.distributed import Parallelism, ProcessInfo, join_process_group
from headwise.models.distributed.ranks import ProcessMesh
from headwise.models.distributed.sharded_model import shard_model, wrap_single_process
from headwise.training import Recipe
from headwise.training.data import Batch
from headwise.training.train_step import AdamWOptimiser, StepOptions, TrainStep, group_parameters

MODES = ("data=2", "shards=2", "tensor=2", "context=2")
# A model of 0.8 million parameters, and one of 10.8 million; rows of a batch, steps in a row, how
# often.
CASES = (
    (GPTShape(), 48, 4, 7),
    (GPTShape(tokens=512, length=256, layers=6, heads=6, model=384), 8, 1, 3),
)


class Work:
    """Steps of one model, divided one way, on the same batch every time."""

    def __init__(self, shape: GPTShape, rows: int, world: ProcessMesh | None) -> None:
        ids = torch.randint(
            shape.tokens, (rows, shape.length), generator=torch.Generator().manual_seed(0)
        )
        self.batch = Batch(ids, ids.roll(-1, 1))
        self.world = world
        net = hw.build(to_model_spec(shape), seed=0)
        holding = wrap_single_process(net) if world is None else shard_model(net, world)
        recipe = Recipe(batch=rows, precision="fp32", compile="off", attention="fused")
        self.train_step = TrainStep(holding, recipe, StepOptions("fp32", "off"))
        self.optimiser = AdamWOptimiser(
            group_parameters(holding.own, net.spec, recipe.decayed_parameters), recipe
        )
        self.holding = holding
        self.clip = recipe.clip
        net.train()

    def step(self) -> None:
        """One step, as a run takes it."""
        self.train_step.compute_gradients(self.batch)
        self.holding.clip(self.clip, self.holding.norm())
        self.optimiser.step(1e-4)

    def count_messages(self) -> int:
        """How many messages the gradients of a step take."""
        with CommDebugMode() as counter:
            self.train_step.compute_gradients(self.batch)
        self.optimiser.zero_grad()
        return counter.get_total_counts()


def timed(work: Callable[[], None], calls: int) -> float:
    """Seconds a call."""
    begun = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begun) / calls


def rows_of(
    launch: ProcessInfo, shape: GPTShape, rows: int, calls: int, repeats: int
) -> list[dict[str, Any]]:
    """One row for each mode, of one shape."""
    works = {
        mode: Work(shape, rows, ProcessMesh(launch, Parallelism.over(mode, launch.size)))
        for mode in MODES
    }
    first = Work(shape, rows, None) if launch.is_leader else None
    taken: dict[str, list[float]] = {"alone": [], **{mode: [] for mode in MODES}}
    for turn in range(repeats + 1):
        seconds = {"alone": timed(first.step, calls) if first else 0.0}
        for mode, work in works.items():
            dist.barrier()
            seconds[mode] = timed(work.step, calls)
        for name in taken if turn else ():  # the first turn warms up
            taken[name].append(seconds[name])
    median = {name: statistics.median(some) for name, some in taken.items()}
    size = sum(p.numel() for p in (first or works[MODES[0]]).holding.own.values())
    found = []
    for mode, work in works.items():
        found.append(
            {
                "name": f"{size / 1e6:.1f} M, {rows} rows of {shape.length}, {mode}",
                "alone_s": median["alone"],
                "step_s": median[mode],
                "efficiency": median["alone"] / median[mode] / launch.size,
                "spread": (max(taken[mode]) - min(taken[mode])) / median[mode],
                "messages": work.count_messages(),
            }
        )  # fmt: skip
    return found


def main() -> int:
    """Start two processes; or be one of them, and print what was measured if it leads."""
    torch.set_num_threads(1)
    with join_process_group() as launch:
        if launch.size == 1:
            torchrun = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "benchmarks.distributed",
            ]
            return subprocess.run(
                [sys.executable, "-m", *torchrun, *sys.argv[1:]], check=False
            ).returncode
        rows = [row for case in CASES for row in rows_of(launch, *case)]
        if not launch.is_leader:
            return 0
        if "--json" in sys.argv[1:]:
            print(json.dumps({"torch": torch.__version__, "rows": rows}))
            return 0
        for row in rows:
            print(
                f"{row['name']:<38} one {row['alone_s'] * 1e3:.1f} ms, two "
                f"{row['step_s'] * 1e3:.1f} ms a step: "
                f"efficiency {row['efficiency']:.0%}; {row['messages']} messages; "
                f"spread {row['spread']:.0%}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
