"""`TrainingRun`: the state of a run with its steps, evaluations and checkpoints, which are one file
with a checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..attention import redraw_features
from ..models import Transformer, save
from ..models.distributed.ranks import find_difference
from ..models.distributed.sharded_model import ShardedModel
from ..util.errors import SpecError, TrainingDiverged, pluralise
from ..util.files import write_atomically
from .data import Batch, Task
from .data.task import iter_texts, pack_batch
from .evaluation import TaskEvaluator
from .recipe import Recipe
from .train_step import (
    AdamWOptimiser,
    BatchPrefetcher,
    ParameterGroups,
    TrainStep,
    check_batch,
    count_batch_tokens,
    count_step_flops,
    get_parameter_name,
    group_parameters,
    measure_peak_flops,
)

# --- Checkpoints ----------------------------------------------------------------------------------


CHECKPOINT_FORMAT = 1
CHECKPOINT_SUFFIX = ".safetensors"


class DamagedCheckpoint(SpecError):
    """Raised for a truncated checkpoint file, or one with a wrong checksum."""


@dataclass(frozen=True, eq=False)
class TrainingCheckpoint:
    """State after `step` steps: tensors named by kind and name ("model decoder.norm.weight"), and
    JSON values.
    """

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def tensors_of_kind(self, name: str) -> dict[str, Tensor]:
        """Tensors of one kind, such as "model", without the kind in their names."""
        prefix = f"{name} "
        return {
            key.removeprefix(prefix): value
            for key, value in self.tensors.items()
            if key.startswith(prefix)
        }


class CheckpointFolder:
    """A folder of checkpoints that keeps the last `keep` and the best one."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    @property
    def paths(self) -> list[Path]:
        """Paths of all checkpoints, newest first."""
        return sorted(self.folder.glob(f"*{CHECKPOINT_SUFFIX}"), reverse=True)

    def path(self, step: int) -> Path:
        """Path of the checkpoint of a step."""
        return self.folder / f"{step:010}{CHECKPOINT_SUFFIX}"

    def save(self, checkpoint: TrainingCheckpoint, best: int | None = None) -> None:
        """Write a checkpoint, then delete all but the last `keep` and the one of step `best`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(checkpoint.step), encode_checkpoint(checkpoint))
        for path in self.paths[self.keep :]:
            if best is None or path != self.path(best):
                path.unlink()

    def load_newest(self) -> tuple[TrainingCheckpoint | None, list[str]]:
        """Return the newest undamaged checkpoint (None without files), and a message for each
        damaged newer one.
        """
        damages: list[str] = []
        for path in self.paths:
            try:
                return read_checkpoint(path), damages
            except DamagedCheckpoint as error:
                damages.append(str(error))
        if damages:
            raise SpecError(
                f"cannot read any checkpoint in {self.folder}: {'; '.join(damages)}; start again "
                "in another folder"
            )
        return None, []


def encode_checkpoint(checkpoint: TrainingCheckpoint) -> bytes:
    """Content of a checkpoint file: a safetensors file with the JSON state and a checksum of both
    in its header.

    >>> checkpoint = TrainingCheckpoint(3, {"model w": torch.ones(2)}, {"best": None})
    >>> b"model w" in encode_checkpoint(checkpoint), b"sha256" in encode_checkpoint(checkpoint)
    (True, True)
    """
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()
    }
    text = json.dumps({"format": CHECKPOINT_FORMAT, "step": checkpoint.step, **checkpoint.state})
    return safetensors.torch.save(
        tensors, metadata={"state": text, "sha256": _digest(tensors, text)}
    )


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_checkpoint(path: Path) -> TrainingCheckpoint:
    """Read a checkpoint and verify its checksum; raises DamagedCheckpoint."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path.name} is truncated or not a checkpoint ({error})") from None
    if _digest(tensors, metadata.get("state", "")) != metadata.get("sha256"):
        raise DamagedCheckpoint(f"{path.name} is damaged: its checksum is wrong")
    state = json.loads(metadata["state"])
    if state["format"] != CHECKPOINT_FORMAT:
        raise SpecError(
            f"cannot read {path}: its format is {state['format']}, this version reads "
            f"{CHECKPOINT_FORMAT}; resume with the version of headwise that wrote it"
        )
    return TrainingCheckpoint(state["step"], tensors, state)


def read_checkpoint_state(path: Path) -> dict[str, Any] | None:
    """Return the JSON state of a checkpoint without its tensors, which are not verified; None if it
    cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})["state"])
    except (safetensors.SafetensorError, OSError, ValueError, KeyError):
        return None


def describe_first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe the first difference between two configurations; None if they are equal.

    >>> describe_first_difference(
    ...     {"recipe": {"lr": 0.1, "seed": 3}}, {"recipe": {"lr": 0.2, "seed": 3}}
    ... )
    'recipe.lr was 0.1, is now 0.2'
    """
    difference = find_difference(old, new)
    if difference is None:
        return None
    return f"{difference[0]} was {difference[1]}, is now {difference[2]}"


# --- Finding the first NaN or inf -----------------------------------------------------------------


def find_first_non_finite(
    sharded_model: ShardedModel, groups: ParameterGroups, forward: Callable[[], Tensor]
) -> str:
    """Describe the first NaN or inf: in the weights, else in the outputs of `forward`, else in the
    gradients.

    All ranks search together; the message comes from the first rank that finds one.
    """
    parameters = sharded_model.own
    weights = [name for name, p in parameters.items() if not p.isfinite().all()]
    gradients = [
        name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()
    ]
    searches = {
        "the weight": lambda: weights[0] if weights else None,
        "the output of": lambda: _find_first_output(sharded_model.net, forward),
        "the gradient of": lambda: gradients[-1] if gradients else None,
    }
    for what, search in searches.items():
        first_name = sharded_model.world.first(search())
        if first_name:
            name, rank = first_name
            group = "no weights"
            for group_name, named in groups.items():
                if any(weight == name or weight.startswith(f"{name}.") for weight in named):
                    group = group_name
                    break
            return f"{what} {name} ({group}) is the first with NaN or inf{rank}"
    return "all weights, outputs and gradients are finite, but the gradient norm overflows"


@torch.no_grad()
def _find_first_output(net: nn.Module, forward: Callable[[], Tensor]) -> str | None:
    """Return the name of the first module with NaN or inf in its output, "the loss" if only the
    loss has it, or None.
    """
    non_finite: list[str] = []

    def check_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            non_finite.append(name)

    modules = [(name, module) for name, module in net.named_modules() if name]
    handles = [
        module.register_forward_hook(partial(check_output, name)) for name, module in modules
    ]
    try:
        loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    if not non_finite and not loss.isfinite():
        return "the loss"
    return non_finite[0] if non_finite else None


# --- The run --------------------------------------------------------------------------------------

CHECKPOINT_FOLDER = "checkpoint"  # name of the folder of checkpoints in the folder of the run
SEED_STRIDE = 0x9E3779B97F4A7C15  # difference between the seeds of two workers
TIME_SMOOTHING = 0.9  # exponential smoothing of the seconds per step, for the time left


@dataclass
class RunProgress:
    """Progress of a run; its fields are stored in checkpoints."""

    step: int = 0  # steps taken
    best: int | None = None  # step with the lowest validation loss
    loss: float | None = None  # that loss
    waited: int = 0  # evaluations since then
    seconds: float = 0.0  # total time of all processes that worked on the run, from their start


class TrainingRun:
    """State of a training run: the model, its optimiser and the progress."""

    def __init__(self, task: Task, train_step: TrainStep, folder: Path, started_at: float) -> None:
        self.task = task
        self.train_step = train_step
        self.folder = folder
        self.net: Transformer = train_step.net
        self.recipe: Recipe = train_step.recipe
        self.sharded_model = train_step.sharded_model
        self.world = train_step.world
        self.device = train_step.device
        self.groups = group_parameters(
            self.sharded_model.own, self.net.spec, self.recipe.decayed_parameters
        )
        self.optimiser = AdamWOptimiser(self.groups, self.recipe)
        self.checkpoints = CheckpointFolder(folder / CHECKPOINT_FOLDER, self.recipe.keep)
        self.evaluator = TaskEvaluator(task, self.recipe, train_step.options, self.world)
        self.progress = RunProgress()
        self.history: list[dict[str, Any]] = []  # changes of the recipe, as plain values
        self._started_at = started_at
        self._earlier_seconds = 0.0
        self.peak_flops = measure_peak_flops(self.device, train_step.options.dtype or torch.float32)
        self._pace: float | None = None
        self._update_seconds = 0.0  # of the call that updated the weights in the last step
        # Of a step that has not changed weights.
        self._rng_before_step: dict[str, Tensor] | None = None
        self._flops: dict[tuple[Any, ...], int] = {}

    @property
    def is_finished(self) -> bool:
        """True if all steps are taken, or `patience` evaluations brought no lower loss."""
        return self.progress.step >= self.recipe.steps or self.is_out_of_patience

    @property
    def is_out_of_patience(self) -> bool:
        """True if `patience` evaluations brought no lower loss."""
        return 0 < self.recipe.patience <= self.progress.waited

    @property
    def end_reason(self) -> str:
        """Why a finished run has ended, as a sentence."""
        progress = self.progress
        steps = self.recipe.steps
        if not self.is_out_of_patience:
            return "the only step is taken" if steps == 1 else f"all {steps} steps are taken"
        return (
            f"stopped early at step {progress.step} of {steps}: no lower validation loss in "
            f"{pluralise(progress.waited, 'evaluation')} (patience={self.recipe.patience}); the "
            f"lowest, {progress.loss:.4f}, was at step {progress.best}"
        )

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the run was started, start-up included, without the time in which no
        process worked on it.
        """
        return self._earlier_seconds + time.perf_counter() - self._started_at

    def count_earlier_seconds(self, seconds: float) -> None:
        """Count what an ended run took after its last checkpoint; `seconds` is its time until the
        end.
        """
        self._earlier_seconds = max(self._earlier_seconds, seconds)

    def step(self, batches: BatchPrefetcher) -> dict[str, Any]:
        """Take one training step; returns its record for the loggers."""
        start = time.perf_counter()
        step = self.progress.step + 1
        self._rng_before_step = self._rng_states() if self.world.size == 1 else None
        batch = batches.get(step - 1)
        check_batch(batch, self.net.spec, f"batch {step - 1}")
        self.net.train()
        redraw_every = self.recipe.redraw_features
        if redraw_every and step > 1 and (step - 1) % redraw_every == 0:
            self._rng_before_step = None
            redraw_features(self.net, self.recipe.seed + step)
        loss = self.train_step.compute_gradients(batch)
        norm = self.sharded_model.norm()
        numbers = torch.stack([loss, norm]).tolist()  # the one wait of a step
        read_at = time.perf_counter()
        # A device ends the update of the step before while this step runs.
        seconds = self._update_seconds + read_at - start
        if not all(map(math.isfinite, numbers)):
            self._raise_diverged(step, batch, loss)
        if self.recipe.clip:
            self.sharded_model.clip(self.recipe.clip, norm)
        rate = self.recipe.lr_at(step)
        self._rng_before_step = None
        self.optimiser.step(rate)
        self.progress.step = step
        record = {
            "event": "step",
            "step": step,
            "loss": numbers[0],
            "rate": rate,
            "norm": numbers[1],
        }
        self._update_seconds = time.perf_counter() - read_at
        return record | self._throughput(batch, seconds)

    def undo_step(self) -> bool:
        """Make the run as it was before an interrupted step; False if that step changed weights."""
        if not self.progress.step or self._rng_before_step is None:
            return False
        self._restore_rng(self._rng_before_step)
        return True

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model on the validation split and update `progress`; returns the record for
        the loggers.
        """
        step = self.progress.step
        progress = self.progress
        metrics = self.evaluator.compute_metrics(self.sharded_model.forward, "valid")
        if not math.isfinite(metrics["loss"]):
            raise TrainingDiverged(
                self._divergence_message(f"step {step}: the validation loss is {metrics['loss']}")
            )
        if progress.loss is None or metrics["loss"] < progress.loss:
            progress.best = step
            progress.loss = metrics["loss"]
            progress.waited = 0
        else:
            progress.waited += 1
        is_best = progress.best == step
        return {"event": "evaluation", "step": step, "metrics": metrics, "best": is_best}

    def save_checkpoint(self, config: Mapping[str, Any]) -> None:
        """Write a checkpoint; sharded tensors are gathered, so that it can be resumed on any number
        of ranks.
        """
        kinds = {
            "model": self._gather_on_leader(self.sharded_model.tensors()),
            "optimiser": self._gather_on_leader(self._optimiser_tensors()),
            "random": self._rng_states().items(),
        }
        tensors: dict[str, Tensor] = {}
        for kind, of_kind in kinds.items():
            for name, value in of_kind:
                tensors[f"{kind} {name}"] = value
        self.progress.seconds = self.elapsed_seconds
        state = {
            "config": config,
            "choice": asdict(self.train_step.options),
            "progress": asdict(self.progress),
            "history": self.history,
        }
        if self.world.is_leader:
            checkpoint = TrainingCheckpoint(self.progress.step, tensors, state)
            self.checkpoints.save(checkpoint, self.progress.best)

    def save_model(self, readme: str) -> None:
        """Save the model in the folder of the run."""
        net = self.sharded_model.gathered()
        if self.world.is_leader:
            save(net, self.folder, readme=readme)

    def load_best(self) -> tuple[Transformer, str | None]:
        """Return the full model with the best weights, read by the leader.

        If their checkpoint is damaged, the model has the last weights, and the second result is a
        message about it.
        """
        path = self.checkpoints.path(self.progress.best or self.progress.step)
        last_tensors = dict(self._gather_on_leader(self.sharded_model.tensors()))

        def read_best() -> tuple[dict[str, Tensor], str | None]:
            try:
                return read_checkpoint(path).tensors_of_kind("model"), None
            except DamagedCheckpoint as error:
                return last_tensors, f"{error}; the last weights are used instead"

        tensors, damage = self.world.run_on_leader(read_best)
        return self.sharded_model.assemble_model(tensors), damage

    def restore(self, checkpoint: TrainingCheckpoint) -> None:
        """Restore model, optimiser, progress and random states from a checkpoint."""
        self.sharded_model.load(checkpoint.tensors_of_kind("model"))
        moments = checkpoint.tensors_of_kind("optimiser")
        for key, value in moments.items():
            moments[key] = self.sharded_model.part(get_parameter_name(key), value)
        self.optimiser.load_state(moments)
        self.progress = RunProgress(**checkpoint.state["progress"])
        self._earlier_seconds = self.progress.seconds
        self.history = list(checkpoint.state["history"])
        self._restore_rng(checkpoint.tensors_of_kind("random"))

    def _gather_on_leader(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """CPU copies of all tensors on the leader, nothing elsewhere; iterating over `tensors`
        gathers the shards.
        """
        return ((name, value.detach().cpu()) for name, value in tensors if self.world.is_leader)

    def _optimiser_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for key, value in self.optimiser.state_tensors.items():
            yield key, self.sharded_model.whole(get_parameter_name(key), value)

    def _rng_states(self) -> dict[str, Tensor]:
        """States of torch's random generators for all workers; the names of worker 0 have no
        number.
        """
        local_states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            local_states["cuda"] = torch.cuda.get_rng_state(self.device)
        gathered = self.world.all_gather_objects(local_states)
        named: dict[str, Tensor] = {}
        for worker, states in enumerate(gathered[:: self.world.parallelism.tensor]):
            named |= {_worker_key(name, worker): state for name, state in states.items()}
        return named

    def _restore_rng(self, states: Mapping[str, Tensor]) -> None:
        """Restore the random state of this worker; a worker that the checkpoint lacks starts with a
        new seed.
        """
        worker = self.world.worker_index
        cpu = states.get(_worker_key("cpu", worker))
        cuda = states.get(_worker_key("cuda", worker))
        if cpu is None:
            torch.manual_seed(derive_worker_seed(self.recipe.seed + self.progress.step, worker))
            return
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)

    def _throughput(self, batch: Batch, seconds: float) -> dict[str, float]:
        old_pace = seconds if self._pace is None else self._pace
        self._pace = TIME_SMOOTHING * old_pace + (1 - TIME_SMOOTHING) * seconds
        flops = self._required_flops(batch) / seconds / self.world.size
        # A step that reaches more than was measured shows that the measurement was disturbed.
        self.peak_flops = max(self.peak_flops, flops)
        return {
            "seconds": seconds,
            "tokens_per_second": count_batch_tokens(self.net.spec, batch) / seconds,
            "mfu": flops / self.peak_flops,
            "left": self._pace * (self.recipe.steps - self.progress.step),
        }

    def _required_flops(self, batch: Batch) -> int:
        """FLOPs that a step on this batch requires; with packed rows the sum over its texts."""
        if self.train_step.options.rows == "padded":
            return self._batch_flops(batch)
        return sum(map(self._batch_flops, iter_texts(pack_batch(batch).batch)))

    def _batch_flops(self, batch: Batch) -> int:
        shape = (batch.x.shape, None if batch.source is None else batch.source.shape)
        if shape not in self._flops:
            self._flops[shape] = count_step_flops(self.sharded_model.spec, batch)
        return self._flops[shape]

    def _raise_diverged(self, step: int, batch: Batch, loss: Tensor) -> None:
        shard = self.sharded_model.shard(batch).batch
        cause = find_first_non_finite(
            self.sharded_model, self.groups, lambda: self.train_step.compute_loss(shard)
        )
        symptom = f"the loss is {loss.item()}"
        if bool(loss.isfinite()):
            symptom = "the gradient holds NaN or inf"
        raise TrainingDiverged(self._divergence_message(f"step {step}: {symptom}; {cause}"))

    def _divergence_message(self, fact: str) -> str:
        paths = self.checkpoints.paths
        if paths:
            fact += f"; the checkpoint of step {int(paths[0].stem)} is in {self.folder}"
        return f"{fact}; train again with lr below {self.recipe.lr:g} or a longer warmup"


def derive_worker_seed(seed: int, worker: int) -> int:
    """Seed of one of several data-parallel workers: different for each, and `seed` itself for
    worker 0.

    >>> derive_worker_seed(7, 0), derive_worker_seed(7, 1) != derive_worker_seed(8, 0)
    (7, True)
    """
    return (seed + worker * SEED_STRIDE) % 2**63


def _worker_key(name: str, worker: int) -> str:
    return f"{name} {worker}" if worker else name
