"""`Recipe`: the hyperparameters of a training run, their conversion to and from TOML, and
learning-rate schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

from ..attention.interfaces.part import CheckedDataclass
from ..attention.spec.serialization import dump_toml
from ..models.distributed.parallelism import AUTO, Parallelism
from ..util.errors import SpecError, suggest
from ..util.size_limits import parse_toml

# --- Learning-rate schedules ----------------------------------------------------------------------


# a one-cycle schedule starts at 1 / 25 of the peak, as in torch.optim.lr_scheduler.OneCycleLR
ONE_CYCLE_DIVISOR = 25


class ScheduleStep(NamedTuple):
    """Position in a schedule: `step` of `steps`, counted from 1; numbers of warm-up and decay
    steps; the lowest factor.
    """

    step: int
    steps: int
    warmup: float
    decay: float
    min_factor: float

    @property
    def warmup_progress(self) -> float:
        """Share of the warm-up that is done, at most 1."""
        return min(1.0, self.step / self.warmup) if self.warmup else 1.0


def _half_cosine(progress: float, first: float, last: float) -> float:
    """Half a cosine from `first` to `last`, for progress from 0 to 1."""
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


def constant(schedule: ScheduleStep) -> float:
    """Linear warm-up, then constant.

    >>> [constant(ScheduleStep(step, 8, 2, 0, 0)) for step in (1, 2, 3, 8)]
    [0.5, 1.0, 1.0, 1.0]
    """
    return schedule.warmup_progress


def cosine(schedule: ScheduleStep) -> float:
    """Linear warm-up, then half a cosine down (1608.03983).

    >>> [round(cosine(ScheduleStep(step, 10, 2, 0, 0)), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if schedule.step <= schedule.warmup:
        return schedule.warmup_progress
    progress = (schedule.step - schedule.warmup) / (schedule.steps - schedule.warmup)
    return _half_cosine(progress, 1.0, schedule.min_factor)


def inverse_sqrt(schedule: ScheduleStep) -> float:
    """min(s / w, sqrt(w / s)) at step s with w warm-up steps: the schedule of 1706.03762, scaled to
    a peak of 1.

    >>> [inverse_sqrt(ScheduleStep(step, 100, 4, 0, 0)) for step in (1, 4, 16, 64)]
    [0.25, 1.0, 0.5, 0.25]
    """
    warmup = max(schedule.warmup, 1)
    return min(schedule.step / warmup, max(schedule.min_factor, math.sqrt(warmup / schedule.step)))


def wsd(schedule: ScheduleStep) -> float:
    """Warmup-stable-decay: linear warm-up, constant, then linear decay over the last steps
    (2404.06395).

    >>> [wsd(ScheduleStep(step, 10, 2, 4, 0)) for step in (1, 2, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    left = (schedule.steps - schedule.step) / schedule.decay if schedule.decay else 1.0
    return min(
        schedule.warmup_progress, schedule.min_factor + (1 - schedule.min_factor) * min(1.0, left)
    )


def one_cycle(schedule: ScheduleStep) -> float:
    """Half a cosine up from 1 / 25, then half a cosine down to the floor at the last step
    (1708.07120), as in PyTorch.

    >>> [round(one_cycle(ScheduleStep(step, 9, 3, 0, 0)), 3) for step in (1, 2, 3, 6, 9)]
    [0.04, 0.52, 1.0, 0.5, 0.0]
    """
    peak = schedule.warmup - 1
    step = schedule.step - 1  # counted from 0
    if step < peak:
        return _half_cosine(step / peak, 1 / ONE_CYCLE_DIVISOR, 1.0)
    peak = max(peak, 0.0)
    progress = (step - peak) / max(schedule.steps - 1 - peak, 1e-9)
    return _half_cosine(progress, 1.0, schedule.min_factor)


SCHEDULES: Mapping[str, Callable[[ScheduleStep], float]] = {
    "constant": constant,
    "cosine": cosine,
    "inverse-sqrt": inverse_sqrt,
    "wsd": wsd,
    "one-cycle": one_cycle,
}

# --- Hyperparameters ------------------------------------------------------------------------------

RECIPE_CHOICES = {
    "schedule": tuple(SCHEDULES),
    "decayed_parameters": ("matrices", "non-embeddings"),
    "precision": ("auto", "fp32", "bf16"),
    "compile": ("auto", "on", "off"),
    "attention": ("fused", "plain"),
    "rows": ("padded", "packed"),
    "activations": ("keep", "recompute"),
}
# Smallest and largest value of each field; values outside are most likely typing errors.
RECIPE_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 10**9),
    "batch": (1, 10**7),
    "accumulate": (1, 10**7),
    "lr": (1e-12, 1),
    "warmup": (0, 1),
    "decay": (0, 1),
    "min_lr_ratio": (0, 1),
    "schedule_start": (0, 10**9),
    "eps": (1e-16, 1),
    "weight_decay": (0, 10),
    "clip": (0, 1e6),
    "label_smoothing": (0, 0.999),
    "dropout": (0, 0.999),
    "redraw_features": (0, 10**9),
    "seed": (0, 2**63 - 1),
    "evaluate_every": (1, 10**9),
    "evaluate_batches": (1, 10**6),
    "patience": (0, 10**6),
    "checkpoint_every": (1, 10**9),
    "keep": (1, 10**4),
    "prefetch": (0, 64),
}
# Fields that a run may change from one step on when it is resumed; the others decide what it is.
OPTIMISATION_FIELDS = ("steps", "lr", "schedule", "warmup", "decay", "min_lr_ratio")
OPTIMISATION_FIELDS += ("schedule_start", "betas", "eps", "weight_decay", "clip")
EVALUATION_FIELDS = ("evaluate_every", "evaluate_batches", "patience", "checkpoint_every", "keep")
CHANGEABLE_FIELDS = (*OPTIMISATION_FIELDS, "label_smoothing", *EVALUATION_FIELDS)
# Fields that change how fast a run is, and none of its numbers.
FIELDS_WITHOUT_EFFECT = ("parallelism", "prefetch")


@dataclass(frozen=True, repr=False)
class Recipe(CheckedDataclass):
    """Hyperparameters of a training run.

    Optimisation: a step takes `batch` examples, in `accumulate` parts if memory is short. `lr` is
    the peak learning rate; `schedule` is its shape, with `warmup` and (for "wsd") `decay` as shares
    of the steps; it does not fall below `min_lr_ratio` x `lr`. With `schedule_start` the schedule
    covers the steps after this one, and the first `schedule_start` steps have its first rate. The
    optimiser is AdamW (1711.05101) with `betas` and `eps`. `weight_decay` applies to all matrices
    (decayed_parameters="matrices") or to all but the token and position embeddings
    ("non-embeddings"). `clip` bounds the gradient norm; 0 turns clipping off. `aux_losses` are the
    weights of auxiliary losses by name, such as (("balance", 0.01),). Every `redraw_features`
    steps, the random features of linear attention are sampled again, as by
    `hw.attention.redraw_features`; 0 turns that off. `init` is the initialisation of new tensors,
    as in `build`.

    Evaluation and checkpoints: every `evaluate_every` steps, `evaluate_batches` held-out batches
    are evaluated. Training stops early after `patience` evaluations without a lower loss; 0 turns
    that off. Every `checkpoint_every` steps a checkpoint is written; the last `keep` and the best
    one are kept.

    Execution: precision="auto" is "bf16" where it was measured to be faster, else "fp32";
    compile="auto" is "on" where it is estimated to save more time than compiling takes.
    attention="plain" runs the operations of attention one by one, "fused" lets each layer choose a
    backend. rows="packed" concatenates the texts of a batch into one row, "padded" pads each to
    the longest. activations="recompute" recomputes the activations of each block in the
    backward pass. `parallelism` is how the ranks of torchrun divide the work, such as "data=2" or
    "data=2,shards=2"; "auto" is data parallelism. `prefetch` is the number of batches that a thread
    prepares ahead on one rank; 0, or several ranks, prepare each when it is needed.

    >>> Recipe(steps=600, lr=0.003)
    Recipe(steps=600, lr=0.003)
    >>> Recipe(batch=64, accumulate=5)
    Traceback (most recent call last):
    headwise.util.errors.SpecError: batch=64 is not divisible by accumulate=5; use accumulate=4 or
    batch=65
    """

    steps: int = 1000
    batch: int = 128
    accumulate: int = 1
    lr: float = 2e-3
    schedule: str = "one-cycle"
    warmup: float = 0.1
    decay: float = 0.2
    min_lr_ratio: float = 0.0
    schedule_start: int = 0
    betas: tuple[float, ...] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decayed_parameters: str = "matrices"
    clip: float = 1.0
    label_smoothing: float = 0.0
    dropout: float = 0.0
    aux_losses: tuple[tuple[str, float], ...] = ()
    redraw_features: int = 0
    init: str = "xavier"
    seed: int = 0
    evaluate_every: int = 100
    evaluate_batches: int = 4
    patience: int = 0
    checkpoint_every: int = 100
    keep: int = 2
    precision: str = "auto"
    compile: str = "auto"
    attention: str = "fused"
    rows: str = "padded"
    activations: str = "keep"
    device: str = "auto"
    parallelism: str = "auto"
    prefetch: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields(RECIPE_RANGES, RECIPE_CHOICES)
        if len(self.betas) != 2 or not all(
            _is_number(beta) and 0 <= beta < 1 for beta in self.betas
        ):
            raise SpecError(
                f"betas={self.betas!r} must be two numbers >= 0 and < 1; use for example "
                "betas=(0.9, 0.98)"
            )
        for term in self.aux_losses:
            is_pair = isinstance(cast(object, term), tuple) and len(term) == 2
            if not (is_pair and isinstance(term[0], str) and _is_number(term[1])):
                fact = f"aux_losses={self.aux_losses!r} must be pairs of a name and a weight"
                raise SpecError(f"{fact}; write for example aux_losses=(('balance', 0.01),)")
        if self.parallelism != AUTO:
            Parallelism.parse(self.parallelism)
        self._check_combinations()

    def lr_at(self, step: int) -> float:
        """Learning rate at a step, counted from 1.

        >>> [Recipe(steps=10, lr=0.5, schedule="wsd").lr_at(step) for step in (1, 8, 9, 10)]
        [0.5, 0.5, 0.25, 0.0]
        """
        steps = self.steps - self.schedule_start
        position = ScheduleStep(
            max(step - self.schedule_start, 1),
            steps,
            self.warmup * steps,
            self.decay * steps,
            self.min_lr_ratio,
        )
        return self.lr * SCHEDULES[self.schedule](position)

    def _check_combinations(self) -> None:
        """Raise SpecError for values that are valid alone but not together."""
        if self.batch % self.accumulate:
            small = [n for n in range(1, math.isqrt(self.batch) + 1) if self.batch % n == 0]
            divisors = [*small, *(self.batch // n for n in small)]
            divisor = max(n for n in divisors if n < self.accumulate)
            multiple = -(-self.batch // self.accumulate) * self.accumulate
            raise SpecError(
                f"batch={self.batch} is not divisible by accumulate={self.accumulate}; use "
                f"accumulate={divisor} or batch={multiple}"
            )
        if self.rows == "packed" and self.compile == "on":
            raise SpecError(
                "rows='packed' would be compiled again for every batch, because the shape of "
                "packed rows changes; use rows='padded' or compile='off'"
            )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise SpecError(
                f"warmup={self.warmup} and decay={self.decay} are shares of the steps and exceed 1 "
                f"together; use decay={1 - self.warmup:g} or less"
            )
        if self.schedule_start >= self.steps:
            raise SpecError(
                f"schedule_start={self.schedule_start} leaves no step of steps={self.steps} for "
                f"the schedule; use schedule_start={self.steps - 1} or less"
            )
        if self.lr * self.weight_decay >= 1:
            raise SpecError(
                f"weight_decay={self.weight_decay} with lr={self.lr} flips the sign of every "
                f"weight; use weight_decay below {1 / self.lr:g}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return all fields of a recipe as plain values."""
    values = {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
    return values | {"betas": list(recipe.betas), "aux_losses": dict(recipe.aux_losses)}


def from_dict(entries: Mapping[str, Any], defaults: Recipe | None = None) -> Recipe:
    """Recipe from plain values; fields that are missing are taken from `defaults`.

    >>> from_dict({"steps": 3, "aux_losses": {"balance": 0.01}}).aux_losses
    (('balance', 0.01),)
    """
    field_names = [f.name for f in fields(Recipe)]
    for name in entries:
        if name not in field_names:
            raise SpecError(f"a recipe has no field {name!r}; {suggest(name, field_names)}")
    values = ({} if defaults is None else vars(defaults)) | {
        name: _to_tuples(value) for name, value in entries.items()
    }
    return Recipe(**values)


def _to_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def to_toml(recipe: Recipe) -> str:
    """TOML document with all fields of a recipe.

    >>> from_toml(to_toml(Recipe(steps=5, aux_losses=(("l0", 0.5),)))) == Recipe(
    ...     steps=5, aux_losses=(("l0", 0.5),)
    ... )
    True
    """
    return dump_toml(to_dict(recipe))


def from_toml(text: str, defaults: Recipe | None = None) -> Recipe:
    """Recipe from a TOML document; fields that are missing are taken from `defaults`."""
    return from_dict(parse_toml("the recipe", text, "write lines such as steps = 1000"), defaults)
