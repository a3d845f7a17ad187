"""Retraining of pruned or converted models, by distillation from the original model and on their
own loss.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.interfaces.part import CheckedDataclass
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.parts.feature_map import to_at_least_float32
from ..models import Transformer
from ..models.embeddings_heads import TokenTypeInput
from ..models.generation import eval_mode
from ..observe.head_analysis.annotated_examples import Example
from ..observe.head_analysis.objectives import EvaluationInput, Objective, choose_objective
from ..training.data import IGNORE_INDEX
from ..training.data.file_task import EpochOrder, make_rng
from ..training.loop import InterruptGuard
from ..training.recipe import SCHEDULES, Recipe
from ..training.train_step import AdamWOptimiser, count_stack_tokens, group_parameters
from ..util.errors import SpecError, TrainingDiverged, pluralise
from .attention_replacement import replace_attentions
from .verification.model_comparison import is_float_tensor

# --- Batches and losses per text ------------------------------------------------------------------


# Inputs of a model, each with the argument of its positions and segments, and its stack.
STREAMS = {"x": ("sequence", -1), "source": ("source_sequence", 0)}


class DistillationBatch(NamedTuple):
    """Padded batch: the model's keyword arguments, a mask of output positions without padding, and
    labels.

    `positions` and `labels` are [texts, positions]; a text with one output, such as a class, has
    one position.
    """

    inputs: Mapping[str, Any]
    positions: Tensor
    labels: Tensor | None = None

    def compute_outputs(self, net: Transformer) -> Tensor:
        """Return the model's outputs, [texts, positions, width]."""
        like = next(net.parameters())
        inputs = {
            name: value.to(like) if is_float_tensor(value) else value
            for name, value in self.inputs.items()
        }
        return net(**inputs).reshape(*self.positions.shape, -1)

    def losses(self, outputs: Tensor) -> Tensor:
        """Return the cross-entropy of each text, a mean over its labelled positions."""
        assert self.labels is not None
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).transpose(1, 2)
        per_position = F.cross_entropy(
            logits, self.labels, ignore_index=IGNORE_INDEX, reduction="none"
        )
        return _mean_by_text(per_position, self.labels != IGNORE_INDEX)

    def kl_divergences(
        self, outputs: Tensor, teacher_outputs: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Return KL(teacher || model) of each text, averaged over positions.

        Logits are divided by `temperature` and the result is multiplied by its square (1503.02531).

        >>> batch = DistillationBatch({}, torch.tensor([[True, False]]))
        >>> outputs, teacher_outputs = (
        ...     torch.zeros(1, 2, 2),
        ...     torch.tensor([[[0.0, 100.0], [7.0, 8.0]]]),
        ... )
        >>> batch.kl_divergences(
        ...     outputs, teacher_outputs
        ... )  # log 2: the padding position does not count
        tensor([0.6931])
        """
        log_probs, teacher_log_probs = (
            to_at_least_float32(logits / temperature).log_softmax(-1)
            for logits in (outputs, teacher_outputs)
        )
        per_position = F.kl_div(
            log_probs, teacher_log_probs, reduction="none", log_target=True
        ).sum(-1)
        return _mean_by_text(per_position, self.positions) * temperature**2

    def state_distances(self, outputs: Tensor, teacher_outputs: Tensor) -> Tensor:
        """Return 1 - cosine of hidden states and the teacher's, per text."""
        states = (to_at_least_float32(one) for one in (outputs, teacher_outputs))
        return _mean_by_text(1 - F.cosine_similarity(*states, dim=-1), self.positions)


def _mean_by_text(per_position: Tensor, mask: Tensor) -> Tensor:
    return per_position.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)


def collate_questions(net: Transformer, questions: Sequence[EvaluationInput]) -> DistillationBatch:
    """Collate texts into one batch; shorter ones are padded on the right."""
    inputs: dict[str, Any] = {}
    for stream, (argument, stack) in STREAMS.items():
        arguments = [question.inputs.kwargs for question in questions]
        num_given = sum(stream in kwargs for kwargs in arguments)
        if not num_given:
            continue
        if num_given < len(questions):
            raise SpecError(
                "some texts have a source and some have none; give a source with every text"
            )
        rows = [kwargs[stream] for kwargs in arguments]
        if all(isinstance(row, TokenTypeInput) for row in rows):
            inputs[stream] = TokenTypeInput(
                *(_pad_rows(column, 0) for column in zip(*rows, strict=True))
            )
        else:
            inputs[stream] = _pad_rows(rows, 0)
        count = _count_tokens(net, inputs[stream], stack)
        sequences = list[SequenceInfo]()
        for kwargs, row in zip(arguments, rows, strict=True):
            own = kwargs.get(argument)
            if own is None:
                device = _ids(row).device
                own = SequenceInfo.contiguous(0, _count_tokens(net, row, stack), device)
            sequences.append(own)
        inputs[argument] = None  # all texts start at 0 and have no padding
        if any(own.start != 0 or own.count != count for own in sequences):
            gaps = [(own, (0, count - own.count)) for own in sequences]
            position = torch.cat([F.pad(own.position, gap) for own, gap in gaps])
            segment = torch.cat([F.pad(own.segment, gap, value=-1) for own, gap in gaps])
            inputs[argument] = SequenceInfo(position, segment)
    counts = torch.tensor([_count_positions(net, question) for question in questions])
    positions = torch.arange(int(counts.max()))[None] < counts[:, None]
    device = next(net.parameters()).device
    label_rows = [question.labels[None] for question in questions if question.labels is not None]
    labels = _pad_rows(label_rows, IGNORE_INDEX).to(device) if label_rows else None
    return DistillationBatch(inputs, positions.to(device), labels)


def _ids(x: Tensor | TokenTypeInput) -> Tensor:
    return x.ids if isinstance(x, TokenTypeInput) else x


def _count_tokens(net: Transformer, x: Tensor | TokenTypeInput, stack: int) -> int:
    return count_stack_tokens(net.spec.stacks[stack], _ids(x).shape)


def _count_positions(net: Transformer, question: EvaluationInput) -> int:
    """Return the number of output positions of a text."""
    heads = net.spec.heads
    is_single = bool(heads) and heads[0].at != "each"
    return 1 if is_single else _count_tokens(net, question.inputs.kwargs["x"], -1)


def _pad_rows(rows: Sequence[Tensor], value: int) -> Tensor:
    """Pad rows [1, tokens] of ids, or [1, ..., tokens, width], into one tensor."""
    axis = 1 if rows[0].dim() == 2 else -2
    longest = max(row.shape[axis] for row in rows)
    unpadded = (0,) if axis == 1 else (0, 0, 0)
    try:
        padded = [F.pad(row, (*unpadded, longest - row.shape[axis]), value=value) for row in rows]
        return torch.cat(padded)
    except (RuntimeError, IndexError):
        shapes = sorted({str(list(row.shape[1:])) for row in rows})
        raise SpecError(
            f"cannot batch texts of shapes {' and '.join(shapes)}. Use batch=1"
        ) from None


# --- Retraining -----------------------------------------------------------------------------------

HELD_OUT_STREAM = 1  # random stream for the held-out split, separate from the batches


@dataclass(frozen=True, repr=False, kw_only=True)
class RetrainingOptions(CheckedDataclass, ABC):
    """Options of retraining: steps, batch size, optimiser and loss.

    The loss is alpha times the distance from the teacher plus (1 - alpha) times the model's own
    loss, averaged over texts. The distance is KL(teacher || model) of the logits at a
    `temperature`, times its square (1503.02531); for a model without an output head it is 1 -
    cosine of the hidden states. A model without a loss learns only from the teacher.

    The optimiser is AdamW with peak learning rate `rate`; `warmup` is a fraction of the steps of
    the `schedule`. `clip` limits the gradient norm, 0 disables it. A fraction `held_out` of the
    texts is not trained on, and evaluated `every` that many steps.
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
    choices: ClassVar[Mapping[str, Collection[str]]] = {"schedule": SCHEDULES}
    steps: int = 200
    batch: int = 16
    rate: float = 3e-4
    schedule: str = "cosine"
    warmup: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    temperature: float = 2.0
    alpha: float = 0.5
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
        args = {
            name: getattr(self, name)
            for name in ("steps", "schedule", "warmup", "weight_decay", "clip", "seed")
        }
        return Recipe(lr=self.rate, **args)


class DistillationTexts:
    """Training texts of a model: batches reshuffled every epoch, and a held-out split; both follow
    from the seed.

    `has_loss` is true if the objective has labels; `notes` name the objective and the number of
    texts left out because they have no target.
    """

    def __init__(
        self, net: Transformer, examples: Sequence[Example], options: RetrainingOptions
    ) -> None:
        if not isinstance(net, Transformer):
            raise SpecError(
                f"expected a headwise model, got {type(net).__name__}; load it with hw.load"
            )
        if not examples:
            raise SpecError("no texts to train on; give at least one example")
        self.net = net
        self.examples = examples
        self.options = options
        self.objective, note = choose_objective(net, options.objective, examples[0])
        numbers = list[int]()
        for number in range(len(examples)):
            question = self._question(number)
            self._check_question(number, question)
            self.has_loss = question.labels is not None
            if question.num_targets:
                numbers.append(number)
        num_skipped = len(examples) - len(numbers)
        skipped = f"left out {pluralise(num_skipped, 'text')} without targets"
        self.notes = tuple(filter(None, [note, skipped if num_skipped else ""]))
        count = len(numbers)
        num_held_out = max(1, round(options.held_out * count))
        if count - num_held_out < options.batch:
            fact = (
                f"cannot fill a batch of {options.batch}: {count} texts, {num_held_out} of "
                "them held out"
            )
            remedy = (
                f"Use batch={count - num_held_out}" if count > num_held_out else "Give more texts"
            )
            raise SpecError(f"{fact}. {remedy}")
        order = make_rng(options.seed, HELD_OUT_STREAM).permutation(count)
        shuffled = [numbers[n] for n in order]
        self.held_out_ids = sorted(shuffled[:num_held_out])
        self.train_ids = sorted(shuffled[num_held_out:])
        self._order = EpochOrder(len(self.train_ids))

    def _question(self, number: int, epoch_seed: int = 0) -> EvaluationInput:
        """Return the input and labels of a text."""
        seed = number + epoch_seed * len(self.examples)
        return self.objective.prepare_input(self.net, self.examples[number], seed)

    def _check_question(self, number: int, question: EvaluationInput) -> None:
        arguments = [argument for argument, _ in STREAMS.values()]
        for name in question.inputs.kwargs:
            if name not in (*STREAMS, *arguments):
                raise SpecError(
                    f"cannot train on text {number}: it has the input {name!r}. Supported are "
                    f"{' and '.join(STREAMS)}"
                )
        if question.inputs.args:
            raise SpecError(
                f"cannot train on text {number}: it has positional inputs. Give named ones such "
                "as {'x': ids}"
            )
        if question.labels is None:
            return
        num_positions = _count_positions(self.net, question)
        if len(question.labels) != num_positions:
            raise SpecError(
                f"text {number} has {num_positions} output positions and {len(question.labels)} "
                "labels; give one label per position"
            )
        num_classes = self.net.spec.heads[0].outputs
        labels = question.labels[question.labels != IGNORE_INDEX]
        wrong = labels[(labels < 0) | (labels >= num_classes)]
        if len(wrong):
            raise SpecError(
                f"text {number} has the label {int(wrong[0])}, the model has {num_classes} "
                f"outputs; give labels in 0..{num_classes - 1}"
            )

    def make_batch(self, numbers: Sequence[int], epoch_seed: int = 0) -> DistillationBatch:
        """Return a padded batch of these texts; random masks, if the objective has any, differ by
        `epoch_seed`.
        """
        questions = [self._question(number, epoch_seed) for number in numbers]
        return collate_questions(self.net, questions)

    def get_batch(self, step: int) -> DistillationBatch:
        """Return the training batch of a step, counted from 1."""
        chosen = self._order.take(step - 1, self.options.batch, self.options.seed)
        return self.make_batch([self.train_ids[n] for n in chosen], epoch_seed=step)

    def iter_held_out(self) -> Iterator[tuple[DistillationBatch, int]]:
        """Yield batches of the held-out texts, each with its number of texts."""
        for first in range(0, len(self.held_out_ids), self.options.batch):
            numbers = self.held_out_ids[first : first + self.options.batch]
            yield self.make_batch(numbers), len(numbers)


def cast_for_training(net: Transformer, student: Transformer) -> Transformer:
    """Return the student in float32 or more: in lower precision, small updates are lost to
    rounding.
    """
    dtype = torch.promote_types(next(net.parameters()).dtype, torch.float32)
    return student.to(dtype)


class RetrainingPoint(NamedTuple):
    """Progress of training: the mean training loss since the last evaluation, and the held-out
    loss.

    `num_open_gates` is the expected number of open gates, None without gates.
    """

    step: int
    loss: float | None
    held_out: float | None = None
    num_open_gates: float | None = None


PointCallback = Callable[[RetrainingPoint], None]


def no_progress(point: object) -> None:
    """Progress callback that does nothing."""


class AuxiliaryTraining:
    """Training of additional parameters next to the model, such as gates; this one has none."""

    num_open_gates: float | None = None  # expected number

    def extra_loss(self, step: int) -> Tensor | float:
        """Return the term added to the loss of a step."""
        return 0.0

    def step(self, step: int) -> None:
        """Update the additional parameters."""


class Retraining:
    """Training of a model, with or without a teacher; only parameters named in `trainable` are
    updated.

    `curve` has the evaluations, `saved_step` is the step of the weights that `run` leaves in `net`:
    the best, or with keep="last" the last evaluation.
    """

    def __init__(
        self,
        net: Transformer,
        teacher: Transformer | None,
        texts: DistillationTexts,
        trainable: Collection[str],
        progress: PointCallback = no_progress,
        keep: str = "last",
    ) -> None:
        self.net = net
        self.teacher = teacher
        self.texts = texts
        self.options = texts.options
        self.progress = progress
        self._keep = keep
        self.auxiliary = AuxiliaryTraining()
        if teacher is None and not texts.has_loss:
            raise SpecError(
                f"{net.spec.name} has no loss on these texts and no teacher; give a teacher"
            )
        self.alpha = 0.0 if teacher is None else self.options.alpha if texts.has_loss else 1.0
        parameters = {name: p for name, p in net.named_parameters() if name in trainable}
        self._parameters = list(parameters.values())
        self._optimiser: AdamWOptimiser | None = None
        if parameters:
            groups = group_parameters(parameters, net.spec, "matrices")
            self._optimiser = AdamWOptimiser(groups, self.options.recipe)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name in trainable)
        self.curve: list[RetrainingPoint] = []
        self.step = self.saved_step = 0  # steps done, and the step of the saved weights
        self.stop_reason = ""
        self._losses: list[float] = []
        self._tensors: dict[str, Tensor] = {}

    def loss(self, net: Transformer, batch: DistillationBatch) -> Tensor:
        """Return the training loss of a batch, a mean over texts."""
        outputs = batch.compute_outputs(net)
        parts = list[Tensor]()
        if self.alpha < 1:
            parts.append((1 - self.alpha) * batch.losses(outputs))
        if self.alpha > 0:
            assert self.teacher is not None
            with eval_mode(self.teacher):
                expected = batch.compute_outputs(self.teacher)
            if expected.shape != outputs.shape:
                raise SpecError(
                    f"the teacher has {expected.shape[-1]} outputs per position, the model "
                    f"{outputs.shape[-1]}; use the model that this one was made from as the teacher"
                )
            heads = self.net.spec.heads
            if heads and heads[0].outputs:
                distances = batch.kl_divergences(outputs, expected, self.options.temperature)
            else:
                distances = batch.state_distances(outputs, expected)
            parts.append(self.alpha * distances)
        return torch.stack(parts).sum(0).mean()

    def held_out_loss(self, net: Transformer) -> float:
        """Return the loss on the held-out texts, of this model or one derived from it."""
        total = 0.0
        with eval_mode(net):
            for batch, count in self.texts.iter_held_out():
                total += float(self.loss(net, batch)) * count
        return total / len(self.texts.held_out_ids)

    def train_steps(self) -> None:
        """Train for all steps or until interrupted, then load the saved weights."""
        options = self.options
        stopped = False
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        try:
            with InterruptGuard() as interrupts, torch.random.fork_rng(devices):
                torch.manual_seed(options.seed)
                self._evaluate()
                while self.step < options.steps and not interrupts.is_requested:
                    self._train_step()
                if self._losses:
                    self._evaluate()
        except KeyboardInterrupt:  # within a step: weights saved before it are complete
            stopped = True
        if stopped or self.step < options.steps:
            self.stop_reason = f"interrupted at step {self.step} of {options.steps}"
        if not self._tensors:
            raise KeyboardInterrupt("interrupted before the first step; the model is unchanged")
        self.net.load_state_dict(self._tensors)

    def _train_step(self) -> None:
        """Take one step, and evaluate every `options.every` steps."""
        self.step += 1
        self.net.train()
        loss = self.loss(self.net, self.texts.get_batch(self.step))
        (loss + self.auxiliary.extra_loss(self.step)).backward()
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if not (loss.isfinite() and norm.isfinite()):
            raise TrainingDiverged(
                f"loss {loss.item():g}, gradient norm {float(norm):g} at step {self.step}; use a "
                f"rate below {self.options.rate:g}"
            )
        if self.options.clip:
            nn.utils.clip_grads_with_norm_(self._parameters, self.options.clip, norm)
        if self._optimiser is not None:
            self._optimiser.step(self.options.recipe.lr_at(self.step))
        self.auxiliary.step(self.step)
        self._losses.append(loss.item())
        if self.step % self.options.every == 0:
            self._evaluate()
        else:
            gates = self.auxiliary.num_open_gates
            self.progress(RetrainingPoint(self.step, loss.item(), None, gates))

    def _evaluate(self) -> None:
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        held_out = self.held_out_loss(self.net)
        earlier = [point.held_out for point in self.curve if point.held_out is not None]
        gates = self.auxiliary.num_open_gates
        self.curve.append(RetrainingPoint(self.step, mean, held_out, gates))
        if self._keep == "last" or not earlier or held_out < min(earlier):
            self.saved_step = self.step
            state = self.net.state_dict().items()
            self._tensors = {name: tensor.detach().clone() for name, tensor in state}
        self._losses = []
        self.progress(self.curve[-1])


# --- Uptraining of a changed model ----------------------------------------------------------------

KEEP_MODES = ("best", "last")


@dataclass(frozen=True, repr=False, kw_only=True)
class UptrainingOptions(RetrainingOptions):
    """Options of `uptrain`: retraining options, and which weights to return.

    keep="best" returns the weights with the lowest held-out loss, possibly from step 0, before any
    training; keep="last" returns the last weights.

    >>> UptrainingOptions(steps=50, alpha=1.0)
    UptrainingOptions(steps=50, alpha=1.0)
    """

    choices: ClassVar = {**RetrainingOptions.choices, "keep": KEEP_MODES}
    keep: str = "best"


class UptrainingResult(NamedTuple):
    """Uptrained model with the weights of `step`, and its loss curve. `stop_reason` is set if
    interrupted.
    """

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

    Neither argument is changed. `progress` is called after every step. On KeyboardInterrupt the
    weights saved so far are returned.
    """
    texts = DistillationTexts(student, examples, options)
    net = cast_for_training(student, replace_attentions(student, {}))
    trainable = [name for name, _ in net.named_parameters()]
    training = Retraining(net, teacher, texts, trainable, progress, options.keep)
    training.train_steps()
    net.requires_grad_(True).to(next(student.parameters()).dtype).train(student.training)
    curve = tuple(training.curve)
    return UptrainingResult(net, curve, training.saved_step, training.stop_reason, texts.notes)
