"""How a model is trained, as one frozen description that survives a trip through TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..distributed.parallelism import AUTO, Parallelism
from ..errors import SpecError, suggest
from ..interfaces.registry import CheckedDataclass
from ..spec.serialization import format_toml
from .lr_schedules import SCHEDULES, ScheduleStep

RECIPE_CHOICES = {
    "schedule": tuple(SCHEDULES),
    "decays": ("matrices", "maps"),
    "precision": ("auto", "fp32", "bf16"),
    "compile": ("auto", "on", "off"),
    "attention": ("auto", "fused", "plain"),
    "rows": ("auto", "padded", "packed"),
    "activations": ("keep", "recompute"),
}
# The smallest and the largest value that can be meant. What lies beyond is a slip, not a wish.
RECIPE_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 10**9),
    "batch": (1, 10**7),
    "accumulate": (1, 10**7),
    "lr": (1e-12, 1),
    "warmup": (0, 1),
    "decay": (0, 1),
    "floor": (0, 1),
    "eps": (1e-16, 1),
    "weight_decay": (0, 10),
    "clip": (0, 1e6),
    "smoothing": (0, 0.999),
    "dropout": (0, 0.999),
    "seed": (0, 2**63 - 1),
    "evaluate_every": (1, 10**9),
    "evaluate_batches": (1, 10**6),
    "patience": (0, 10**6),
    "checkpoint_every": (1, 10**9),
    "keep": (1, 10**4),
}


@dataclass(frozen=True, repr=False)
class Recipe(CheckedDataclass):
    """How long, on how much at once, with which steps, and what is looked at on the way.

    A step takes `batch` examples, in `accumulate` parts where memory is short. `lr` is the highest rate; `schedule`
    says how it is reached and left: `warmup`, and for "wsd" `decay`, are parts of the steps, `floor` a part of `lr`.
    Of AdamW (1711.05101) `weight_decay` reaches what `decays` names: "matrices", or "maps", those but for tables of
    tokens and positions. `clip` bounds the norm of a gradient, 0 does not. `terms` are what parts set in the ledger,
    each with the factor by which it joins the loss.

    Every `evaluate_every` steps `evaluate_batches` held-out batches are measured; after `patience` of these without
    a lower loss training ends, with 0 it never ends early. Every `checkpoint_every` steps a checkpoint is written; the
    last `keep` stay, and the best. `start` is how fresh tensors are drawn, as `build` knows it. precision, attention,
    rows and compile are chosen by measuring where they are "auto"; attention="plain" runs its operations one by one,
    "fused" as each layer chooses; rows="packed" lays the texts of a batch one behind the other, "padded" fills its rows
    up; activations="recompute" keeps none inside a block, and computes them again when gradients need them. `spread`
    says what the ranks that torchrun started divide among themselves, "data=2" or "data=2,shards=2"; "auto" divides
    the data.

    >>> Recipe(steps=600, lr=0.003)
    Recipe(steps=600, lr=0.003)
    >>> Recipe(batch=64, accumulate=5)
    Traceback (most recent call last):
    headwise.errors.SpecError: a batch of 64 cannot be taken in 5 equal parts; use accumulate=4 or batch=65
    """

    steps: int = 1000
    batch: int = 128
    accumulate: int = 1
    lr: float = 2e-3
    schedule: str = "one-cycle"
    warmup: float = 0.1
    decay: float = 0.2
    floor: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decays: str = "matrices"
    clip: float = 1.0
    smoothing: float = 0.0
    dropout: float = 0.0
    terms: tuple[tuple[str, float], ...] = ()
    start: str = "xavier"
    seed: int = 0
    evaluate_every: int = 100
    evaluate_batches: int = 4
    patience: int = 0
    checkpoint_every: int = 100
    keep: int = 2
    precision: str = "auto"
    compile: str = "auto"
    attention: str = "auto"
    rows: str = "auto"
    activations: str = "keep"
    device: str = "auto"
    spread: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields(RECIPE_RANGES, RECIPE_CHOICES)
        if len(self.betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise SpecError(f"Recipe(betas={self.betas!r}) must be two numbers from 0 to below 1, as in (0.9, 0.98)")
        for row in self.terms:
            if len(row) != 2 or not isinstance(row[0], str) or not _is_number(row[1]):
                raise SpecError(f"Recipe(terms={self.terms!r}) must name factors; write terms=(('balance', 0.01),)")
        if self.spread != AUTO:
            Parallelism.parse(self.spread)
        self._check_combinations()

    def lr_at(self, step: int) -> float:
        """The rate of learning at a step, counted from 1.

        >>> [Recipe(steps=10, lr=0.5, schedule="wsd").lr_at(step) for step in (1, 8, 9, 10)]
        [0.5, 0.5, 0.25, 0.0]
        """
        warmup, decay = self.warmup * self.steps, self.decay * self.steps
        return self.lr * SCHEDULES[self.schedule](ScheduleStep(step, self.steps, warmup, decay, self.floor))

    def _check_combinations(self) -> None:
        """What is right alone and wrong beside another."""
        if self.batch % self.accumulate:
            fits = max(n for n in range(1, self.accumulate) if self.batch % n == 0)
            more = -(-self.batch // self.accumulate) * self.accumulate
            fact = f"a batch of {self.batch} cannot be taken in {self.accumulate} equal parts"
            raise SpecError(f"{fact}; use accumulate={fits} or batch={more}")
        if self.rows == "packed" and self.compile == "on":
            fact = "packed rows have another shape in every batch, for which each would be compiled anew"
            raise SpecError(f"{fact}; use rows='padded', or compile='off'")
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            both = f"warmup={self.warmup} and decay={self.decay}"
            raise SpecError(f"{both} are more than all steps; use decay={1 - self.warmup:g} or less")
        if self.lr * self.weight_decay >= 1:
            fact = f"weight_decay={self.weight_decay} at lr={self.lr} turns every weight around"
            raise SpecError(f"{fact}; use less than {1 / self.lr:g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values, all of them."""
    said = {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
    return said | {"betas": list(recipe.betas), "terms": dict(recipe.terms)}


def from_dict(entries: Mapping[str, Any], defaults: Recipe | None = None) -> Recipe:
    """The recipe that plain values describe; `usual` says what they leave out.

    >>> from_dict({"steps": 3, "terms": {"balance": 0.01}}).terms
    (('balance', 0.01),)
    """
    known = [f.name for f in fields(Recipe)]
    for name in entries:
        if name not in known:
            raise SpecError(f"a recipe has no {name!r}; {suggest(name, known)}")
    values = ({} if defaults is None else vars(defaults)) | {name: _to_tuples(value) for name, value in entries.items()}
    return Recipe(**values)


def _to_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def to_toml(recipe: Recipe) -> str:
    """One TOML document.

    >>> from_toml(to_toml(Recipe(steps=5, terms=(("l0", 0.5),)))) == Recipe(steps=5, terms=(("l0", 0.5),))
    True
    """
    return "".join(f"{name} = {format_toml(value)}\n" for name, value in to_dict(recipe).items())


def from_toml(text: str, defaults: Recipe | None = None) -> Recipe:
    """The recipe that a TOML document describes."""
    try:
        said = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"this is not TOML: {error}; write lines such as steps = 1000") from None
    return from_dict(said, defaults)
