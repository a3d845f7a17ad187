"""How much each head matters: a number for every head, where it might have come out, and how it was found."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import suggest
from ..inspect.hooks import SiteModule
from .head_table import Measure
from .objectives import EvaluationInput, Objective
from .partial_forward import HeadAblationHook, HeadOutputCapture, RepeatedForward
from .resampling import (
    CORRECTION_METHODS,
    Array,
    confidence_interval,
    correct_p_values,
    draw_resamples,
    ratio_of_sums,
    resampled_ratios,
    sign_flip_p_values,
)

NORMALISATIONS = ("", "layer")
SIGNIFICANCE_LEVEL = 0.05  # what is less likely by chance is told from it
MIN_NORM = 1e-20  # as the authors of 1905.10650 keep from dividing by nothing
ImportanceSums = Mapping[str, tuple[Array, Array]]  # of each site: sums [heads], and what they are a mean over [heads]


@dataclass(frozen=True)
class ImportanceOptions:
    """What is asked of an estimate beside its method.

    `budget` seconds are spent at most, begun texts aside; `sample` texts are drawn, all are read where nothing is said.
    normalised="layer" divides by the root of the sum of squares over the heads of a site (1905.10650). `correction` is
    of p-values, over all heads: "holm", "bonferroni" or "none".

    >>> ImportanceOptions(correction="hol")
    Traceback (most recent call last):
    ValueError: correction='hol' is unknown; did you mean 'holm'?
    """

    max_seconds: float | None = None
    num_examples: int | None = None
    normalisation: str = ""
    correction: str = "holm"
    num_resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("normalisation", NORMALISATIONS), ("correction", CORRECTION_METHODS)):
            if (said := getattr(self, name)) not in known:
                raise ValueError(f"{name}={said!r} is unknown; {suggest(str(said), [one for one in known if one])}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"budget={self.max_seconds!r} leaves no time; give seconds, or leave it out")
        for name, least in (("num_examples", 2), ("num_resamples", 1)):
            said = getattr(self, name)
            if said is not None and (type(said) is not int or said < least):
                raise ValueError(f"{name}={said!r} is too few; give a whole number of {least} or more")


@dataclass(frozen=True)
class HeadImportance:
    """One head, what it is worth, between what that might have come out, and how likely chance would do as much.

    `p` is that of this head alone, `level` the same corrected for all heads; nan where nothing is tested.
    """

    site: str
    stack: str
    kind: str
    layer: int
    head: int
    kv: int
    value: float
    low: float
    high: float
    p: float = math.nan
    level: float = math.nan

    @property
    def measure(self) -> Measure:
        """The same as a table keeps it; chance is to matter not at all."""
        return Measure(self.value, self.low, self.high, 0.0)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values; what is not tested is None."""
        told = asdict(self)
        return {name: None if isinstance(one, float) and math.isnan(one) else one for name, one in told.items()}


@dataclass(frozen=True)
class ImportanceResult:
    """Every head of a model with its worth, of which objective, by which method, over how many texts."""

    model: str
    method: str
    objective: str
    texts: int
    heads: tuple[HeadImportance, ...]
    notes: tuple[str, ...] = ()

    def head(self, site: str, number: int) -> HeadImportance:
        """One of them."""
        found = [one for one in self.heads if (one.site, one.head) == (site, number)]
        if not found:
            sites = ", ".join(dict.fromkeys(one.site for one in self.heads))
            raise ValueError(f"no head {number} of {site!r} was rated; the sites are {sites}")
        return found[0]

    @property
    def by_importance(self) -> tuple[HeadImportance, ...]:
        """The heads that matter most first; those of which nothing is known last."""
        return tuple(sorted(self.heads, key=lambda one: math.inf if math.isnan(one.value) else -one.value))

    @property
    def significant_heads(self) -> tuple[HeadImportance, ...]:
        """Those that are told from chance, with all heads that were tested in mind."""
        return tuple(one for one in self.heads if one.level < SIGNIFICANCE_LEVEL)

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "model": self.model,
            "method": self.method,
            "objective": self.objective,
            "texts": self.texts,
            "heads": [one.data for one in self.heads],
            "notes": list(self.notes),
        }


def rate_heads(
    located_sites: Sequence[SiteModule], units: Sequence[ImportanceSums], options: ImportanceOptions, tested: str
) -> tuple[HeadImportance, ...]:
    """The heads of these sites, of what was found in each unit, a text or a batch of them.

    tested="signs" tells what is likely chance; "none" does not.
    """
    draws = draw_resamples(len(units), options.num_resamples, options.seed)
    sites = [one for one in located_sites if all(one.site.name in unit for unit in units)]
    stacked = {
        one.site.name: (
            np.stack([unit[one.site.name][0] for unit in units]),
            np.stack([unit[one.site.name][1] for unit in units]),
        )
        for one in sites
    }
    p = np.full(sum(sums.shape[1] for sums, _ in stacked.values()), math.nan)
    if tested == "signs":
        p = sign_flip_p_values(np.concatenate([sums / numbers for sums, numbers in stacked.values()], 1), options.seed)
    tests, found = iter(zip(p, correct_p_values(p, options.correction), strict=True)), list[HeadImportance]()
    for one in sites:
        sums, numbers = stacked[one.site.name]
        value, others = (
            _normalise_scores(told, options)
            for told in (ratio_of_sums(sums, numbers), resampled_ratios(sums, numbers, draws))
        )
        low, high = confidence_interval(others)
        found += [
            _rate_head(one, len(value), n, row) for n, row in enumerate(zip(value, low, high, tests, strict=False))
        ]
    return tuple(found)


def _rate_head(one: SiteModule, heads: int, number: int, row: tuple[Any, ...]) -> HeadImportance:
    site, (value, low, high, (p, level)) = one.site, row
    kv = number // max(1, heads // max(1, site.kv))
    told = (float(value), float(low), float(high), float(p), float(level))
    return HeadImportance(site.name, site.stack, site.kind, site.layer, number, kv, *told)


def _normalise_scores(told: Array, how: ImportanceOptions) -> Array:
    return told / (np.linalg.norm(told, axis=-1, keepdims=True) + MIN_NORM) if how.normalisation == "layer" else told


# --- Ways to find how much each head matters in a text, each under the name of the paper that has it ---

CheckTime = Callable[[], None]
GRANULARITIES = ("paper", "code", "bertology")


class TimeLimitReached(Exception):
    """The seconds that were given are used up."""


def make_time_check(max_seconds: float | None, now: Callable[[], float] = time.monotonic) -> CheckTime:
    """What is asked between two runs whether there is time for another."""
    begun = now()

    def check() -> None:
        if max_seconds is not None and now() - begun > max_seconds:
            raise TimeLimitReached

    return check


class ImportanceInput(NamedTuple):
    """A text as methods see it: its number, its way through the model, and what is asked of it."""

    index: int
    run: RepeatedForward
    evaluation: EvaluationInput
    objective: Objective

    def value(self, outputs: object) -> Tensor:
        """The objective of what a model says."""
        plain = None if self.objective.has_gradient else self.run.baseline_outputs
        return self.objective.value(outputs, plain, self.evaluation)

    def value_without(self, ablated_heads: Mapping[str, Sequence[int]]) -> float:
        """The objective while these heads are silent."""
        said = self.run.run_with_hooks({name: HeadAblationHook(*heads) for name, heads in ablated_heads.items()})
        return float(self.value(said))


class ImportanceMethod(ABC):
    """A way to find what every head is worth in some texts.

    `sloped` says whether it needs the objective's gradients, `tested` whether what it gives may be of either sign, so
    that it can be told from chance; `batch` texts are asked at once. `measures` names what it measures where that is no
    objective of the caller's; `notes` say what must be known beside.
    """

    name: str
    needs_gradient: ClassVar[bool] = False
    significance_test: ClassVar[str] = "none"
    measured_quantity: ClassVar[str] = ""
    notes: ClassVar[tuple[str, ...]] = ()
    batch_size: int = 1

    def unsupported_reason(self, model: nn.Module) -> str:
        """Why it cannot be used on this model; empty if it can."""
        return ""

    @abstractmethod
    def estimate(self, texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
        """The sums of every head of every site over these texts, and what they are means over."""


@dataclass(frozen=True)
class LeaveOneOut(ImportanceMethod):
    """How much more the objective is when one head alone is silent: positive where the head helps (1905.10650)."""

    name = "leave-one-out"
    significance_test = "signs"

    def estimate(self, texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
        text = texts[0]
        before, found = float(text.value(text.run.baseline_outputs)), dict[str, list[float]]()
        for site, count in text.run.head_counts.items():
            for head in range(count):
                check_time()
                found.setdefault(site, []).append(text.value_without({site: [head]}) - before)
        return {site: _as_single_mean(np.array(told)) for site, told in found.items()}


@dataclass(frozen=True)
class ShapleyValue(ImportanceMethod):
    """What a head adds to those that still speak, a mean over orders in which they fall silent (2210.05709).

    It needs no gradients, and sees that two heads stand in for each other, which leave-one-out does not. Each text
    draws `orders` of its own; what all heads are worth together is what silence of all of them costs, exactly.
    """

    name = "shapley"
    significance_test = "signs"
    num_permutations: int = 1
    seed: int = 0

    def estimate(self, texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
        text = texts[0]
        every = [(site, head) for site, count in text.run.head_counts.items() for head in range(count)]
        found = {site: np.zeros(count) for site, count in text.run.head_counts.items()}
        draw, plain = np.random.default_rng((self.seed, text.index)), float(text.value(text.run.baseline_outputs))
        for _ in range(self.num_permutations):
            silenced, before = dict[str, list[int]](), plain
            for site, head in (every[n] for n in draw.permutation(len(every))):
                check_time()
                silenced.setdefault(site, []).append(head)
                after = text.value_without(silenced)
                found[site][head] += (after - before) / self.num_permutations
                before = after
        return {site: _as_single_mean(told) for site, told in found.items()}


@dataclass(frozen=True)
class GradientTimesActivation(ImportanceMethod):
    """z_h . dL/dz_h, which is how L follows a mask on the head, in one of three granularities (1905.10650).

    "paper": the size of its sum over the tokens of a text, a mean over texts. "code": as the authors' code has it, the
    sum of its sizes token by token, over all tokens. "bertology": as transformers had it, the size of its sum over
    `batch` texts, whose L is one mean, over all tokens.
    """

    granularity: str = "paper"
    batch_size: int = 1
    needs_gradient = True

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            known = suggest(self.granularity, GRANULARITIES)
            raise ValueError(f"granularity={self.granularity!r} is unknown; {known}")
        if self.batch_size != 1 and (self.granularity != "bertology" or self.batch_size < 1):
            raise ValueError(
                f"batch_size={self.batch_size} texts are summed for granularity='bertology' alone; leave it out"
            )

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """As it is asked for."""
        return "michel" if self.granularity == "paper" else f"michel-{self.granularity}"

    def estimate(self, texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
        if self.granularity == "bertology":
            return self._estimate_batch(texts, check_time)
        found = {site: slope.per_token for site, slope in compute_activation_gradients(texts[0]).items()}
        if self.granularity == "paper":
            return {site: _as_single_mean(np.abs(told.sum(0))) for site, told in found.items()}
        return {site: (np.abs(told).sum(0), np.full(told.shape[1], len(told))) for site, told in found.items()}

    def _estimate_batch(self, texts: Sequence[ImportanceInput], check: CheckTime) -> ImportanceSums:
        asked = sum(text.evaluation.num_targets for text in texts)
        sums, tokens = dict[str, np.ndarray](), dict[str, int]()
        for text in texts:
            check()
            for site, slope in compute_activation_gradients(text).items():
                share = slope.per_token.sum(0) * text.evaluation.num_targets / asked
                sums[site] = sums.get(site, 0) + share
                tokens[site] = tokens.get(site, 0) + len(slope.per_token)
        return {site: (np.abs(told), np.full(len(told), float(tokens[site]))) for site, told in sums.items()}


@dataclass(frozen=True)
class TaylorExpansion(ImportanceMethod):
    """What leave-one-out is to first order, - z_h . dL/dz_h of a text; of="size", the size of its mean (1611.06440)."""

    quantity: str = "change"
    needs_gradient = True

    def __post_init__(self) -> None:
        if self.quantity not in ("change", "size"):
            raise ValueError(f"of={self.quantity!r} is unknown; {suggest(self.quantity, ('change', 'size'))}")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """As it is asked for."""
        return "taylor" if self.quantity == "change" else "taylor-size"

    @property
    def significance_test(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """Only what has a sign is."""
        return "signs" if self.quantity == "change" else "none"

    def estimate(self, texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
        found = compute_activation_gradients(texts[0])
        if self.quantity == "change":
            return {site: _as_single_mean(-slope.per_token.sum(0)) for site, slope in found.items()}
        return {
            site: _as_single_mean(np.abs(slope.per_token.mean(0)) / slope.head_dim) for site, slope in found.items()
        }


class ActivationGradient(NamedTuple):
    """z_h . dL/dz_h at each token, [tokens, heads], and how wide a head is."""

    per_token: np.ndarray
    head_dim: int


def compute_activation_gradients(text: ImportanceInput) -> dict[str, ActivationGradient]:
    """How the objective follows what each head says."""
    kept = {one.site.name: HeadOutputCapture() for one in text.run.sites}
    with torch.enable_grad():
        value = text.value(text.run.run_with_gradients(kept))
        every = [z for one in kept.values() for z in one.outputs]
        told = torch.autograd.grad(value, every, allow_unused=True)
    grads = iter(told)
    return {
        name: _activation_gradient([(z, next(grads)) for z in one.outputs]) for name, one in kept.items() if one.outputs
    }


def _activation_gradient(told: Sequence[tuple[Tensor, Tensor | None]]) -> ActivationGradient:
    """Of all calls of a site: tokens one behind the other."""
    flat = [(z * (torch.zeros_like(z) if grad is None else grad)).sum(-1).flatten(0, -2) for z, grad in told]
    return ActivationGradient(torch.cat(flat).detach().double().cpu().numpy(), told[0][0].shape[-1])


def _as_single_mean(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A mean over texts."""
    return sums, np.ones(len(sums))
