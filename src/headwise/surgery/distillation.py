"""How a model that was cut or gated learns: from which texts, what is made small, and one step of it."""

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

HELD_OUT_STREAM = 1  # what is drawn beside batches: which texts are held back


@dataclass(frozen=True, repr=False, kw_only=True)
class RetrainingOptions(CheckedDataclass, ABC):
    """How long, on how many texts at once, with which steps, and what is made small.

    What is made small is alpha times how far the model lies from its teacher, and 1 - alpha times its own loss, of
    texts that count alike: of logits KL(teacher || model) at a `temperature`, times its square (1503.02531), of states,
    where there is no head, 1 - cosine or with states="l2" the mean square. Without a loss of its own, a model learns
    from its teacher alone. Steps are AdamW's, `rate` the highest of a `schedule` of which `warmup` is a part; `clip`
    bounds the norm of a gradient, 0 does not. A share of the texts is `held_out` and measured `every` so many steps.
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
        """What of this is said to an optimiser."""
        said = {name: getattr(self, name) for name in ("steps", "schedule", "warmup", "weight_decay", "clip", "seed")}
        return Recipe(lr=self.rate, **said)


class DistillationLoader:
    """Lessons of a batch of texts each, in another order every time round, and those held back, by a seed."""

    def __init__(self, texts: DistillationTexts, options: RetrainingOptions) -> None:
        count = len(texts.numbers)
        back = max(1, round(options.held_out * count))
        if count - back < options.batch:
            fact = f"{count} texts less {back} held back are fewer than a batch of {options.batch}"
            fits = f"use batch={count - back}" if count > back else "give more texts"
            raise SpecError(f"{fact}; {fits}")
        mixed = [texts.numbers[n] for n in make_rng(options.seed, HELD_OUT_STREAM).permutation(count)]
        self.texts, self.options, self.held_out_ids, self.train_ids = (
            texts,
            options,
            sorted(mixed[:back]),
            sorted(mixed[back:]),
        )
        self._order = EpochOrder(len(self.train_ids))

    def get_batch(self, step: int) -> DistillationBatch:
        """The lesson of a step, counted from 1."""
        chosen = self._order.take(step - 1, self.options.batch, self.options.seed)
        return self.texts.make_batch([self.train_ids[n] for n in chosen], epoch_seed=step)

    def iter_held_out(self) -> Iterator[tuple[DistillationBatch, int]]:
        """The texts held back, and how many of them each lesson has."""
        for first in range(0, len(self.held_out_ids), self.options.batch):
            numbers = self.held_out_ids[first : first + self.options.batch]
            yield self.texts.make_batch(numbers), len(numbers)


class Student:
    """A model that learns from lessons, with a teacher or without; only tensors of these names learn."""

    def __init__(
        self, net: Transformer, teacher: Transformer | None, loader: DistillationLoader, trainable: Collection[str]
    ) -> None:
        self.net, self.teacher, self.loader, self.options = net, teacher, loader, loader.options
        losses = loader.texts.has_loss
        self.alpha = self.options.alpha if losses else 1.0
        if teacher is None and not losses:
            raise SpecError(f"{net.spec.name} has no loss of its own in these texts, and no teacher; give one")
        if teacher is None:
            self.alpha = 0.0
        heads = net.spec.heads
        self._has_logits = bool(heads and heads[0].outputs)
        own = {name: p for name, p in net.named_parameters() if name in trainable}
        self._optimiser = (
            AdamWOptimiser(group_parameters(own, net.spec, "matrices"), self.options.recipe) if own else None
        )
        self._parameters = list(own.values())
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name in trainable)

    def loss(self, net: Transformer, batch: DistillationBatch) -> Tensor:
        """What is made small, a mean over texts."""
        said, parts = batch.compute_outputs(net), []
        if self.alpha < 1:
            parts.append((1 - self.alpha) * batch.losses(said))
        if self.alpha > 0:
            parts.append(self.alpha * self._teacher_loss(batch, said))
        return torch.stack(parts).sum(0).mean()

    def _teacher_loss(self, lesson: DistillationBatch, said: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            taught = lesson.compute_outputs(self.teacher)
        if taught.shape != said.shape:
            fact = f"the teacher says {taught.shape[-1]} numbers of each place, the model {said.shape[-1]}"
            raise SpecError(f"{fact}; give the model that this one was made of")
        if self._has_logits:
            return lesson.kl_divergences(said, taught, self.options.temperature)
        return lesson.state_distances(said, taught, self.options.states)

    def held_out_loss(self, net: Transformer) -> float:
        """The loss of the texts held back, of this model or one made of it."""
        was = net.training
        net.eval()
        with torch.no_grad():
            found = [(float(self.loss(net, lesson)) * count, count) for lesson, count in self.loader.iter_held_out()]
        net.train(was)
        return sum(loss for loss, _ in found) / sum(count for _, count in found)

    def step(self, step: int, extra_loss: Callable[[], Tensor | float]) -> float:
        """One step; the loss without what was added."""
        self.net.train()
        loss = self.loss(self.net, self.loader.get_batch(step))
        (loss + extra_loss()).backward()
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if not (loss.isfinite() and norm.isfinite()):
            fact = f"loss {loss.item():g}, gradient {float(norm):g} at step {step}"
            raise TrainingDiverged(f"{fact}; use a rate below {self.options.rate:g}")
        if self.options.clip:
            nn.utils.clip_grads_with_norm_(self._parameters, self.options.clip, norm)
        if self._optimiser is not None:
            self._optimiser.step(self.options.recipe.lr_at(step))
        return loss.item()


def cast_for_training(net: Transformer, student: Transformer) -> Transformer:
    """A model to learn, in float32 at least: steps are lost between numbers of less precision."""
    exact = torch.promote_types(next(net.parameters()).dtype, torch.float32)
    return student.to(exact)


# --- The way of a model through its steps of learning --------------------------------------------------


class RetrainingPoint(NamedTuple):
    """Where learning stood: the mean loss of the lessons since the point before, and that of texts held back.

    `opened` is how many gates are expected to be open, where there are any.
    """

    step: int
    loss: float | None
    held_out: float | None = None
    num_open_gates: float | None = None


PointCallback = Callable[[RetrainingPoint], None]


def no_progress(point: RetrainingPoint) -> None:
    """Nobody asks how it goes."""


class AuxiliaryTraining(ABC):
    """What learns beside a model's own tensors."""

    @abstractmethod
    def extra_loss(self, step: int) -> Tensor | float:
        """What joins the loss of a step."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Its own step."""

    @property
    @abstractmethod
    def num_open_gates(self) -> float | None:
        """How many gates are expected to be open."""


class NoAuxiliaryTraining(AuxiliaryTraining):
    """Nothing."""

    def extra_loss(self, step: int) -> float:
        return 0.0

    def step(self, step: int) -> None:
        pass

    @property
    def num_open_gates(self) -> None:
        return None


class RetrainingLoop:
    """The way of a pupil through its steps: the curve, and its tensors as they were at the point that is kept."""

    def __init__(self, student: Student, auxiliary: AuxiliaryTraining, progress: PointCallback, keep: str) -> None:
        self.student, self.auxiliary, self.progress, self._keep = student, auxiliary, progress, keep
        self.curve: list[RetrainingPoint] = []
        self.step = self.saved_step = 0  # how far it came, and the step whose tensors are kept
        self.stop_reason = ""
        self._losses: list[float] = []
        self._tensors: dict[str, Tensor] = {}

    def run(self) -> None:
        """All steps, or until somebody interrupts; the model is then as it was kept."""
        stopped = False
        try:
            with InterruptGuard() as interrupts, fork_rng(self.student.options.seed), eval_mode(self.student.teacher):
                self._evaluate()
                while self.step < self.student.options.steps and not interrupts.is_requested:
                    self._train_step()
                if self._losses:
                    self._evaluate()
        except KeyboardInterrupt:  # in the middle of a step: what was kept before it is whole
            stopped = True
        if stopped or self.step < self.student.options.steps:
            self.stop_reason = f"interrupted at step {self.step} of {self.student.options.steps}"
        if not self._tensors:
            raise KeyboardInterrupt("interrupted before the first step; nothing was changed")
        self.student.net.load_state_dict(self._tensors)

    def _train_step(self) -> None:
        """One step, and a look at texts held back where one is due."""
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
        best = min((old.held_out for old in self.curve if old.held_out is not None), default=None)
        self.curve.append(point)
        if self._keep == "last" or best is None or (point.held_out is not None and point.held_out < best):
            self.saved_step = self.step
            self._tensors = {name: one.detach().clone() for name, one in self.student.net.state_dict().items()}
        self._losses = []
        self.progress(point)


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Where numbers that torch draws follow from a seed; its own generators go on behind as if nothing had been."""
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(cards):
        torch.manual_seed(seed)
        yield


@contextmanager
def eval_mode(net: Transformer | None) -> Iterator[None]:
    """Where a model drops nothing out."""
    was = net is not None and net.training
    if net is not None:
        net.eval()
    try:
        yield
    finally:
        if net is not None:
            net.train(was)


# --- A cut or shared model learns again, from what it was made of and from texts -----------------------

TRAINABLE_PARTS = ("all", "attention")
KEEP_MODES = ("best", "last")


@dataclass(frozen=True, repr=False, kw_only=True)
class UptrainingOptions(RetrainingOptions):
    """The same, of a model that was changed and learns again.

    which="attention" lets nothing but attentions learn. keep="best" gives the model as it was at the lowest loss of
    texts held back, which may be step 0, before any; "last" as it ended.

    >>> UptrainingOptions(steps=50, alpha=1.0)
    UptrainingOptions(steps=50, alpha=1.0)
    """

    choices: ClassVar = {**RetrainingOptions.choices, "which": TRAINABLE_PARTS, "keep": KEEP_MODES}
    which: str = "all"
    keep: str = "best"


class UptrainingResult(NamedTuple):
    """A model that has learnt, and how: its tensors are those of `step`, and `ended` says what ended it early."""

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
    """A copy of a model that has learnt to say what its teacher says, and what its texts want.

    Neither of the two is changed. `progress` hears of every step. Who interrupts is given the best so far.
    """
    lessons = DistillationLoader(DistillationTexts(student, examples, options.objective), options)
    net = cast_for_training(student, replace_attentions(student, {}))
    pupil = Student(net, teacher, lessons, list_trainable(net, options.which))
    course = RetrainingLoop(pupil, NoAuxiliaryTraining(), progress, options.keep)
    course.run()
    net.requires_grad_(True).to(next(student.parameters()).dtype).train(student.training)
    return UptrainingResult(net, tuple(course.curve), course.saved_step, course.stop_reason, lessons.texts.notes)


def list_trainable(net: Transformer, trainable: str = "all") -> list[str]:
    """The names of what may learn: all that is learned, or that of attentions.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> list_trainable(hw.build(hw.families.read_model_spec(config), seed=0), "attention")[0]
    'decoder.0.attention.project.q'
    """
    sites = tuple(f"{site}." for site, _ in net.spec.attention_specs())
    found = [name for name, _ in net.named_parameters() if trainable == "all" or name.startswith(sites)]
    if not found:
        raise SpecError(f"{net.spec.name} has no attention that could learn; use which='all'")
    return found
