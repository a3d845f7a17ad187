"""How many FLOPs a training step is worth: what use of the machine is measured by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import costs
from ..data import Batch, Task
from ..data.translation import iter_texts, pack_batch
from ..distributed.sharded_model import ShardedModel
from ..errors import TrainingDiverged
from ..interfaces.core_types import CallSize
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ExpertsSpec, FeedForwardSpec, ModelSpec, StackSpec
from ..models import Transformer, save
from .autotune import measure_peak_flops
from .checkpoint import CheckpointFolder, DamagedCheckpoint, TrainingCheckpoint, read_checkpoint
from .evaluation import TaskEvaluator
from .loss import check_batch
from .optimiser import AdamWOptimiser, ParameterGroups, get_parameter_name, group_parameters
from .recipe import Recipe
from .train_step import TrainStep

TRAINING_FLOP_FACTOR = 3  # a step is a forward pass and, backwards, two products for each of its own


def count_step_flops(model_spec: ModelSpec, batch: Batch) -> int:
    """FLOPs of one step on this batch, as the model asks for them: padding counts, what is computed twice does not.

    A matrix of n numbers that meets t tokens is 6 n t:

    >>> import torch
    >>> from headwise.model_spec import BlockSpec, EmbeddingSpec, FeedForwardSpec, OutputHeadSpec, StackSpec
    >>> stack = StackSpec.from_blocks(
    ...     "encoder", 3, [BlockSpec(feed=FeedForwardSpec(7))], embedding=EmbeddingSpec(tokens=11)
    ... )
    >>> batch = Batch(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64))
    >>> count_step_flops(ModelSpec("one", "encoder", (stack,), (OutputHeadSpec("tokens", 11),)), batch) == 6 * (
    ...     2 * 3 * 7 + 3 * 11
    ... ) * 10
    True
    """
    first, last = model_spec.stacks[0], model_spec.stacks[-1]
    rows = len(batch.labels)
    own = count_stack_tokens(last, batch.x.shape)
    source = 0 if batch.source is None or first is last else count_stack_tokens(first, batch.source.shape)
    forward = sum(_layer_flops(last, rows, own, source)) + (sum(_layer_flops(first, rows, source, 0)) if source else 0)
    for head in model_spec.heads[:1]:
        read = rows * (own if head.at == "each" else 1)
        matrices = [w.numel for w in head.weights(last.model) if len(w.layout.axes) == 2]
        table = head.outputs * (head.transform.hidden if head.transform else last.model) if head.table else 0
        forward += 2 * read * (sum(matrices) + table)
    return TRAINING_FLOP_FACTOR * forward


def count_stack_tokens(stack: StackSpec, shape: tuple[int, ...]) -> int:
    """How many tokens of a row a stack sees of an input of this shape."""
    embedding = stack.embedding
    if embedding is None or not embedding.patches:
        return shape[1]
    patches = embedding.patches
    return embedding.first + shape[-2] // patches.high * (shape[-1] // patches.wide)


def count_batch_tokens(model_spec: ModelSpec, batch: Batch) -> int:
    """How many tokens a model reads of a batch, padding left out."""
    first, last = model_spec.stacks[0], model_spec.stacks[-1]
    read = _count_valid_tokens(batch.tokens, len(batch.labels), count_stack_tokens(last, batch.x.shape))
    if batch.source is None:
        return read
    return read + _count_valid_tokens(
        batch.source_tokens, len(batch.labels), count_stack_tokens(first, batch.source.shape)
    )


def _count_valid_tokens(tokens: SequenceInfo | None, rows: int, each: int) -> int:
    if tokens is None:
        return rows * each
    return int(tokens.is_real.sum()) * (rows if len(tokens.is_real) == 1 else 1)


def _layer_flops(stack: StackSpec, rows: int, own: int, source: int) -> Iterator[int]:
    if stack.embedding and stack.embedding.patches:
        yield 2 * rows * own * sum(w.numel for w in stack.embedding.patches.weights(stack.model))
    for block in stack.layers:
        for name, spec in block.attention_specs.items():
            crossing = CallSize(rows, own, source, source)
            work = crossing if name == "cross" else costs.self_attention_work(spec, batch=rows, queries=own)
            yield costs.required_flops(spec, work)
        if block.feed is not None:
            yield 2 * rows * own * _active_parameters(block.feed, stack.model)


def _active_parameters(feed: FeedForwardSpec | ExpertsSpec, model: int) -> int:
    """How many numbers of its matrices a token meets: of experts only those that are active."""
    matrices = [w for w in feed.weights(model) if len([axis for axis in w.layout.axes if axis != "expert"]) == 2]
    if isinstance(feed, FeedForwardSpec):
        return sum(w.numel for w in matrices)
    each = sum(w.numel for w in matrices if "expert" in w.layout.axes)
    router = feed.count * model
    return sum(w.numel for w in matrices) - each + each * feed.active // feed.count + router


# --- Where numbers first stopped being finite ----------------------------------------------------------


def find_first_non_finite(sharded_model: ShardedModel, groups: ParameterGroups, forward: Callable[[], Tensor]) -> str:
    """What went bad first: a weight; else, going forward once more, an output; else, going backward, a gradient.

    Ranks look side by side and end together: the first that finds something names it.
    """
    owners = {name: group for group, named in groups.items() for name in named}
    first = sharded_model.world.first
    if name := first(next((n for n, p in sharded_model.own.items() if not p.isfinite().all()), None)):
        return f"the weight {name[0]} ({owners[name[0]]}) is not finite{name[1]}"
    with torch.no_grad():
        module = first(_find_first_output(sharded_model.net, forward))
    if module:
        group = next((g for name, g in owners.items() if name.startswith(f"{module[0]}.")), "no weights")
        return f"the output of {module[0]} ({group}) is the first that is not finite{module[1]}"
    gradients = [name for name, p in sharded_model.own.items() if p.grad is not None and not p.grad.isfinite().all()]
    if not (name := first(gradients[-1] if gradients else None)):
        return "every weight, output and gradient is finite, only their sum is not"
    return f"the gradient of {name[0]} ({owners[name[0]]}) is the first that is not finite{name[1]}"


def _find_first_output(net: nn.Module, forward: Callable[[], Tensor]) -> str | None:
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def seen(module: nn.Module, given: Any, out: Any) -> None:
            if isinstance(out, Tensor) and not out.isfinite().all():
                found.append(name)

        return seen

    handles = [module.register_forward_hook(look(name)) for name, module in net.named_modules() if name]
    try:
        loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    if not found and not loss.isfinite():
        return "the loss"
    return found[0] if found else None


# --- A run in hand -------------------------------------------------------------------------------------

CHECKPOINT_FOLDER = "checkpoint"  # the folder of them, in that of the run
SEED_STRIDE = 0x9E3779B97F4A7C15  # far from one worker's seed to the next
TIME_SMOOTHING = 0.9  # how much of the last estimate of a step's seconds stays


@dataclass
class RunProgress:
    """How far a run is: steps taken, which of them was the best and its loss, evaluations since, seconds in all."""

    step: int = 0
    best: int | None = None
    loss: float | None = None
    waited: int = 0
    seconds: float = 0.0


class TrainingRun:
    """A model that is being trained, the state of its optimiser, and how far it is."""

    def __init__(self, task: Task, train_step: TrainStep, folder: Path) -> None:
        self.task, self.train_step, self.folder = task, train_step, folder
        self.net: Transformer = train_step.net
        self.recipe: Recipe = train_step.recipe
        self.sharded_model, self.world, self.device = train_step.sharded_model, train_step.world, train_step.device
        self.groups = group_parameters(self.sharded_model.own, self.net.spec, self.recipe.decays)
        self.optimiser = AdamWOptimiser(self.groups, self.recipe)
        self.checkpoints = CheckpointFolder(folder / CHECKPOINT_FOLDER, self.recipe.keep)
        self.evaluator = TaskEvaluator(task, self.recipe, train_step.options, self.world)
        self.progress = RunProgress()
        self.peak_flops = measure_peak_flops(self.device, train_step.options.dtype or torch.float32)
        self._pace: float | None = None
        self._flops: dict[tuple[Any, ...], int] = {}

    @property
    def is_finished(self) -> bool:
        """Whether every step is taken, or enough were taken for nothing."""
        waited = self.recipe.patience and self.progress.waited >= self.recipe.patience
        return self.progress.step >= self.recipe.steps or bool(waited)

    @property
    def is_evaluation_due(self) -> bool:
        """Whether held-out data is to be looked at now."""
        return self.progress.step % self.recipe.evaluate_every == 0 or self.progress.step == self.recipe.steps

    def step(self) -> dict[str, Any]:
        """Take one step; its record."""
        begun, step = time.perf_counter(), self.progress.step + 1
        batch = self.task.batch(step - 1, self.recipe.batch, "train")
        check_batch(batch, self.net.spec, f"batch {step - 1}")
        self.net.train()
        loss = self.train_step.compute_gradients(batch)
        norm = self.sharded_model.norm()
        if not bool(loss.isfinite() & norm.isfinite()):
            self._raise_diverged(step, batch, loss)
        if self.recipe.clip:
            self.sharded_model.clip(self.recipe.clip, norm)
        rate = self.recipe.lr_at(step)
        self.optimiser.step(rate)
        self.progress.step = step
        seconds = time.perf_counter() - begun
        self.progress.seconds += seconds
        told = {"event": "step", "step": step, "loss": loss.item(), "rate": rate, "norm": norm.item()}
        return told | self._throughput(batch, seconds)

    def evaluate(self) -> dict[str, Any]:
        """Measure held-out data and remember whether it was never better; the record."""
        begun, step, before = time.perf_counter(), self.progress.step, self.progress.loss
        metrics = self.evaluator.compute_metrics(self.sharded_model.path, "valid")
        if not math.isfinite(metrics["loss"]):
            raise TrainingDiverged(self._divergence_message(f"step {step}: the held-out loss is {metrics['loss']}"))
        if before is None or metrics["loss"] < before:
            self.progress.best, self.progress.loss, self.progress.waited = step, metrics["loss"], 0
        else:
            self.progress.waited += 1
        self.progress.seconds += time.perf_counter() - begun
        return {"event": "evaluation", "step": step, "metrics": metrics, "best": self.progress.best == step}

    def save_checkpoint(self, config: Mapping[str, Any]) -> None:
        """Write a checkpoint of this moment; what ranks hold parts of is written whole, so that any world can go on."""
        tensors = {f"model {name}": value for name, value in self._gather_on_leader(self.sharded_model.tensors())}
        tensors |= {f"optimiser {key}": value for key, value in self._gather_on_leader(self._optimiser_tensors())}
        tensors |= {f"random {name}": value for name, value in self._rng_states().items()}
        state = {"config": config, "choice": asdict(self.train_step.options), "progress": asdict(self.progress)}
        if self.world.is_leader:
            self.checkpoints.save(TrainingCheckpoint(self.progress.step, tensors, state), self.progress.best)

    def save_model(self, readme: str) -> None:
        """Leave the model in the run's folder."""
        net = self.sharded_model.gathered()
        if self.world.is_leader:
            save(net, self.folder, readme=readme)

    def load_best(self) -> tuple[Transformer, str | None]:
        """The whole model with the weights that were best, as the leader finds them; the last, and why, if damaged."""
        path = self.checkpoints.path(self.progress.best or self.progress.step)
        last = dict(self._gather_on_leader(self.sharded_model.tensors()))

        def found() -> tuple[dict[str, Tensor], str | None]:
            try:
                return read_checkpoint(path).tensors_of_kind("model"), None
            except DamagedCheckpoint as error:
                return last, f"{error}; the last weights are taken"

        tensors, damage = self.world.told(found)
        return self.sharded_model.assemble_model(tensors), damage

    def restore(self, checkpoint: TrainingCheckpoint) -> None:
        """Go back to the moment of a checkpoint."""
        self.sharded_model.load(checkpoint.tensors_of_kind("model"))
        moments = checkpoint.tensors_of_kind("optimiser").items()
        self.optimiser.load_state(
            {key: self.sharded_model.part(get_parameter_name(key), value) for key, value in moments}
        )
        self.progress = RunProgress(**checkpoint.state["progress"])
        self._restore_rng(checkpoint.tensors_of_kind("random"))

    def _gather_on_leader(self, every: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All of these, put together with the others, for the leader alone."""
        return ((name, value.detach().cpu()) for name, value in every if self.world.is_leader)

    def _optimiser_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for key, value in self.optimiser.state_tensors.items():
            yield key, self.sharded_model.whole(get_parameter_name(key), value)

    def _rng_states(self) -> dict[str, Tensor]:
        """The states of torch's generators by worker, the leader's without a number; nothing else is drawn from."""
        here = {"cpu": torch.get_rng_state()}
        here |= {"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}
        every = enumerate(self.world.every(here)[:: self.world.spread.tensor])
        return {_worker_key(name, worker): state for worker, states in every for name, state in states.items()}

    def _restore_rng(self, states: Mapping[str, Tensor]) -> None:
        """Go on drawing where this worker stood; one that was not there begins a stream of its own."""
        cpu, cuda = (states.get(_worker_key(name, self.world.worker_index)) for name in ("cpu", "cuda"))
        if cpu is None:
            torch.manual_seed(derive_worker_seed(self.recipe.seed + self.progress.step, self.world.worker_index))
            return
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)

    def _throughput(self, batch: Batch, seconds: float) -> dict[str, float]:
        self._pace = seconds if self._pace is None else TIME_SMOOTHING * self._pace + (1 - TIME_SMOOTHING) * seconds
        return {
            "seconds": seconds,
            "tokens_per_second": count_batch_tokens(self.net.spec, batch) / seconds,
            "mfu": self._required_flops(batch) / seconds / self.peak_flops / self.world.size,
            "left": self._pace * (self.recipe.steps - self.progress.step),
        }

    def _required_flops(self, batch: Batch) -> int:
        """The FLOPs of a step on this batch, of packed rows those of every text by itself."""
        each = [batch] if self.train_step.options.rows == "padded" else iter_texts(pack_batch(batch).batch)
        return sum(self._batch_flops(one) for one in each)

    def _batch_flops(self, batch: Batch) -> int:
        shape = (batch.x.shape, None if batch.source is None else batch.source.shape)
        if shape not in self._flops:
            self._flops[shape] = count_step_flops(self.sharded_model.spec, batch)
        return self._flops[shape]

    def _raise_diverged(self, step: int, batch: Batch, loss: Tensor) -> None:
        own = self.sharded_model.share(batch).batch
        bad = find_first_non_finite(self.sharded_model, self.groups, lambda: self.train_step.compute_loss(own))
        what = "gradient is not finite" if bool(loss.isfinite()) else f"loss is {loss.item()}"
        raise TrainingDiverged(self._divergence_message(f"step {step}: the {what}; {bad}"))

    def _divergence_message(self, fact: str) -> str:
        paths = self.checkpoints.paths
        kept = f"the checkpoint of step {int(paths[0].stem)} is kept in {self.folder}" if paths else "nothing is lost"
        return f"{fact}; {kept}; train anew with a lower lr than {self.recipe.lr:g} or a longer warmup"


def derive_worker_seed(seed: int, worker: int) -> int:
    """The seed of what one of several workers draws: none draws what another does, and the first as if alone.

    >>> derive_worker_seed(7, 0), derive_worker_seed(7, 1) != derive_worker_seed(8, 0)
    (7, True)
    """
    return (seed + worker * SEED_STRIDE) % 2**63


def _worker_key(name: str, worker: int) -> str:
    return f"{name} {worker}" if worker else name
