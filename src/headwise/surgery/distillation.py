"""Retraining of pruned or converted models, by distillation from the original model and on their own loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..data.example_order import EpochOrder, make_rng
from ..errors import SpecError, TrainingDiverged
from ..head_analysis.annotated_examples import Example
from ..head_analysis.objectives import Objective
from ..interfaces.registry import CheckedDataclass
from ..models import Transformer
from ..training.loop import InterruptGuard
from ..training.lr_schedules import SCHEDULES
from ..training.optimiser import AdamWOptimiser, group_parameters
from ..training.recipe import Recipe
from .attention_replacement import replace_attentions
from .distillation_data import STATE_LOSSES, DistillationBatch, DistillationTexts

HELD_OUT_STREAM = 1  # random stream for the held-out split, separate from that of the batches


@dataclass(frozen=True, repr=False, kw_only=True)
class RetrainingOptions(CheckedDataclass, ABC):
    """Options of retraining: steps, batch size, optimiser and loss.

    The loss is alpha times the distance from the teacher plus (1 - alpha) times the model's own loss, averaged over
    texts. The distance is KL(teacher || model) of the logits at a `temperature`, times its square (1503.02531); for a
    model without an output head it is 1 - cosine of the hidden states, or with states="l2" the mean squared error. A
    model without a loss of its own learns from the teacher alone.

    The optimiser is AdamW with peak learning rate `rate`; `warmup` is a fraction of the steps of the `schedule`. `clip`
    limits the gradient norm, 0 disables it. A fraction `held_out` of the texts is not trained on, and evaluated `every`
    that many steps.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "steps": (1, 10**9),
        "batch": (1, 10**7),
        "rate": (1e-12, 1),
        "warmup": (0, 1),
        "weight_decay": (0, 0.999),
        "clip": (0, 1e6),
        "temperature": (1e-3, 1e3),
        "alpha": (0, 1),
        "held_out": (1e-6, 0.9),
        "every": (1, 10**9),
        "seed": (0, 2**63 - 1),
    }
    choices: ClassVar[Mapping[str, Collection[str]]] = {"schedule": SCHEDULES, "states": STATE_LOSSES}
    steps: int = 200
    batch: int = 16
    rate: float = 3e-4
    schedule: str = "cosine"
    warmup: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    temperature: float = 2.0
    alpha: float = 0.5
    states: str = "cosine"
    objective: str | Objective | None = None
    held_out: float = 0.1
    every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields(self.ranges, self.choices)

    @property
    def recipe(self) -> Recipe:
        """The options as a training recipe of the optimiser."""
        args = {name: getattr(self, name) for name in ("steps", "schedule", "warmup", "weight_decay", "clip", "seed")}
        return Recipe(lr=self.rate, **args)


class DistillationLoader:
    """Batches of training texts, reshuffled every epoch, and a held-out split; both follow from the seed."""

    def __init__(self, texts: DistillationTexts, options: RetrainingOptions) -> None:
        count = len(texts.numbers)
        num_held_out = max(1, round(options.held_out * count))
        if count - num_held_out < options.batch:
            fact = f"cannot fill a batch of {options.batch}: {count} texts, {num_held_out} of them held out"
            remedy = f"Use batch={count - num_held_out}" if count > num_held_out else "Give more texts"
            raise SpecError(f"{fact}. {remedy}")
        shuffled = [texts.numbers[n] for n in make_rng(options.seed, HELD_OUT_STREAM).permutation(count)]
        self.texts, self.options = texts, options
        self.held_out_ids = sorted(shuffled[:num_held_out])
        self.train_ids = sorted(shuffled[num_held_out:])
        self._order = EpochOrder(len(self.train_ids))

    def get_batch(self, step: int) -> DistillationBatch:
        """Return the batch of a step, counted from 1."""
        chosen = self._order.take(step - 1, self.options.batch, self.options.seed)
        return self.texts.make_batch([self.train_ids[n] for n in chosen], epoch_seed=step)

    def iter_held_out(self) -> Iterator[tuple[DistillationBatch, int]]:
        """Yield batches of the held-out texts, each with its number of texts."""
        for first in range(0, len(self.held_out_ids), self.options.batch):
            numbers = self.held_out_ids[first : first + self.options.batch]
            yield self.texts.make_batch(numbers), len(numbers)


class Student:
    """A model being trained, with or without a teacher; only parameters named in `trainable` are updated."""

    def __init__(
        self, net: Transformer, teacher: Transformer | None, loader: DistillationLoader, trainable: Collection[str]
    ) -> None:
        self.net, self.teacher, self.loader, self.options = net, teacher, loader, loader.options
        has_loss = loader.texts.has_loss
        self.alpha = self.options.alpha if has_loss else 1.0
        if teacher is None and not has_loss:
            raise SpecError(f"{net.spec.name} has no loss on these texts and no teacher; give a teacher")
        if teacher is None:
            self.alpha = 0.0
        heads = net.spec.heads
        self._has_logits = bool(heads and heads[0].outputs)
        parameters = {name: p for name, p in net.named_parameters() if name in trainable}
        self._optimiser = (
            AdamWOptimiser(group_parameters(parameters, net.spec, "matrices"), self.options.recipe)
            if parameters
            else None
        )
        self._parameters = list(parameters.values())
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name in trainable)

    def loss(self, net: Transformer, batch: DistillationBatch) -> Tensor:
        """Return the training loss of a batch, a mean over texts."""
        outputs = batch.compute_outputs(net)
        parts = []
        if self.alpha < 1:
            parts.append((1 - self.alpha) * batch.losses(outputs))
        if self.alpha > 0:
            parts.append(self.alpha * self._teacher_loss(batch, outputs))
        return torch.stack(parts).sum(0).mean()

    def _teacher_loss(self, batch: DistillationBatch, outputs: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            teacher_outputs = batch.compute_outputs(self.teacher)
        if teacher_outputs.shape != outputs.shape:
            fact = f"the teacher has {teacher_outputs.shape[-1]} outputs per position, the model {outputs.shape[-1]}"
            raise SpecError(f"{fact}; use the model that this one was made from as the teacher")
        if self._has_logits:
            return batch.kl_divergences(outputs, teacher_outputs, self.options.temperature)
        return batch.state_distances(outputs, teacher_outputs, self.options.states)

    def held_out_loss(self, net: Transformer) -> float:
        """Return the loss on the held-out texts, of this model or one derived from it."""
        was_training = net.training
        net.eval()
        with torch.no_grad():
            losses = [(float(self.loss(net, batch)) * count, count) for batch, count in self.loader.iter_held_out()]
        net.train(was_training)
        return sum(loss for loss, _ in losses) / sum(count for _, count in losses)

    def step(self, step: int, extra_loss: Callable[[], Tensor | float]) -> float:
        """Take one optimiser step; return the loss without `extra_loss`."""
        self.net.train()
        loss = self.loss(self.net, self.loader.get_batch(step))
        (loss + extra_loss()).backward()
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if not (loss.isfinite() and norm.isfinite()):
            fact = f"loss {loss.item():g}, gradient norm {float(norm):g} at step {step}"
            raise TrainingDiverged(f"{fact}; use a rate below {self.options.rate:g}")
        if self.options.clip:
            nn.utils.clip_grads_with_norm_(self._parameters, self.options.clip, norm)
        if self._optimiser is not None:
            self._optimiser.step(self.options.recipe.lr_at(step))
        return loss.item()


def cast_for_training(net: Transformer, student: Transformer) -> Transformer:
    """Return the student in float32 or more: in lower precision, small updates are lost to rounding."""
    dtype = torch.promote_types(next(net.parameters()).dtype, torch.float32)
    return student.to(dtype)


# --- Training loop -------------------------------------------------------------------------------------


class RetrainingPoint(NamedTuple):
    """Progress of training: the mean training loss since the last evaluation, and the held-out loss.

    `num_open_gates` is the expected number of open gates, None without gates.
    """

    step: int
    loss: float | None
    held_out: float | None = None
    num_open_gates: float | None = None


PointCallback = Callable[[RetrainingPoint], None]


def no_progress(point: RetrainingPoint) -> None:
    """Progress callback that does nothing."""


class AuxiliaryTraining(ABC):
    """Training of additional parameters next to the model, such as gates."""

    @abstractmethod
    def extra_loss(self, step: int) -> Tensor | float:
        """Return the term added to the loss of a step."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Update the additional parameters."""

    @property
    @abstractmethod
    def num_open_gates(self) -> float | None:
        """Expected number of open gates, None without gates."""


class NoAuxiliaryTraining(AuxiliaryTraining):
    """No additional parameters."""

    def extra_loss(self, step: int) -> float:
        return 0.0

    def step(self, step: int) -> None:
        pass

    @property
    def num_open_gates(self) -> None:
        return None


class RetrainingLoop:
    """Training loop of a student: its loss curve, and its weights at the best or last evaluation."""

    def __init__(self, student: Student, auxiliary: AuxiliaryTraining, progress: PointCallback, keep: str) -> None:
        self.student, self.auxiliary, self.progress, self._keep = student, auxiliary, progress, keep
        self.curve: list[RetrainingPoint] = []
        self.step = self.saved_step = 0  # steps done, and the step of the saved weights
        self.stop_reason = ""
        self._losses: list[float] = []
        self._tensors: dict[str, Tensor] = {}

    def run(self) -> None:
        """Train for all steps or until interrupted, then load the saved weights."""
        stopped = False
        try:
            with InterruptGuard() as interrupts, fork_rng(self.student.options.seed), eval_mode(self.student.teacher):
                self._evaluate()
                while self.step < self.student.options.steps and not interrupts.is_requested:
                    self._train_step()
                if self._losses:
                    self._evaluate()
        except KeyboardInterrupt:  # within a step: weights saved before it are complete
            stopped = True
        if stopped or self.step < self.student.options.steps:
            self.stop_reason = f"interrupted at step {self.step} of {self.student.options.steps}"
        if not self._tensors:
            raise KeyboardInterrupt("interrupted before the first step; the model is unchanged")
        self.student.net.load_state_dict(self._tensors)

    def _train_step(self) -> None:
        """Take one step, and evaluate every `options.every` steps."""
        self.step += 1
        self._losses.append(self.student.step(self.step, lambda: self.auxiliary.extra_loss(self.step)))
        self.auxiliary.step(self.step)
        if self.step % self.student.options.every == 0:
            self._evaluate()
        else:
            self.progress(RetrainingPoint(self.step, self._losses[-1], num_open_gates=self.auxiliary.num_open_gates))

    def _evaluate(self) -> None:
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        point = RetrainingPoint(
            self.step, mean, self.student.held_out_loss(self.student.net), self.auxiliary.num_open_gates
        )
        best = min((earlier.held_out for earlier in self.curve if earlier.held_out is not None), default=None)
        self.curve.append(point)
        if self._keep == "last" or best is None or (point.held_out is not None and point.held_out < best):
            self.saved_step = self.step
            self._tensors = {name: tensor.detach().clone() for name, tensor in self.student.net.state_dict().items()}
        self._losses = []
        self.progress(point)


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Seed torch's generators within the block and restore their state afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def eval_mode(net: Transformer | None) -> Iterator[None]:
    """Put a model into eval mode within the block; None is ignored."""
    was_training = net is not None and net.training
    if net is not None:
        net.eval()
    try:
        yield
    finally:
        if net is not None:
            net.train(was_training)


# --- Uptraining of a changed model ---------------------------------------------------------------------

TRAINABLE_PARTS = ("all", "attention")
KEEP_MODES = ("best", "last")


@dataclass(frozen=True, repr=False, kw_only=True)
class UptrainingOptions(RetrainingOptions):
    """Options of `uptrain`: those of retraining, which parameters to train, and which weights to return.

    which="attention" trains the attention layers only. keep="best" returns the weights with the lowest held-out loss,
    which may be those of step 0, before any training; keep="last" those of the last step.

    >>> UptrainingOptions(steps=50, alpha=1.0)
    UptrainingOptions(steps=50, alpha=1.0)
    """

    choices: ClassVar = {**RetrainingOptions.choices, "which": TRAINABLE_PARTS, "keep": KEEP_MODES}
    which: str = "all"
    keep: str = "best"


class UptrainingResult(NamedTuple):
    """Uptrained model and its loss curve; its weights are those of `step`. `stop_reason` is set if interrupted."""

    net: Transformer
    curve: tuple[RetrainingPoint, ...]
    step: int
    stop_reason: str
    notes: tuple[str, ...]


def uptrain(
    student: Transformer,
    teacher: Transformer | None,
    examples: Sequence[Example],
    options: UptrainingOptions,
    progress: PointCallback = no_progress,
) -> UptrainingResult:
    """Train a copy of `student` to match its teacher's outputs and to lower its own loss.

    Neither argument is changed. `progress` is called after every step. On KeyboardInterrupt the weights saved so far
    are returned.
    """
    loader = DistillationLoader(DistillationTexts(student, examples, options.objective), options)
    net = cast_for_training(student, replace_attentions(student, {}))
    trainee = Student(net, teacher, loader, list_trainable(net, options.which))
    loop = RetrainingLoop(trainee, NoAuxiliaryTraining(), progress, options.keep)
    loop.run()
    net.requires_grad_(True).to(next(student.parameters()).dtype).train(student.training)
    return UptrainingResult(net, tuple(loop.curve), loop.saved_step, loop.stop_reason, loader.texts.notes)


def list_trainable(net: Transformer, trainable: str = "all") -> list[str]:
    """Return the names of the parameters to train: all, or those of the attention layers.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> list_trainable(hw.build(hw.families.read_model_spec(config), seed=0), "attention")[0]
    'decoder.0.attention.project.q'
    """
    sites = tuple(f"{site}." for site, _ in net.spec.attention_specs())
    names = [name for name, _ in net.named_parameters() if trainable == "all" or name.startswith(sites)]
    if not names:
        raise SpecError(f"{net.spec.name} has no attention parameters; use which='all'")
    return names
