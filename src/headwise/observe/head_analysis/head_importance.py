"""Importance of every attention head for a named objective, over texts, with confidence intervals
and a time limit.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from torch import nn

from ...report.text import format_seconds
from ...util.errors import check_known, pluralise
from ..inspect.attention_sites import left_out_notes, require_ability
from ..inspect.hooks import SiteModule
from .annotated_examples import Example
from .attention_sinks import DistinctExamples
from .head_table import HeadImportance, ImportanceResult
from .importance_methods import (
    ImportanceInput,
    ImportanceMethod,
    ImportanceSums,
    OutOfTimeError,
    RepeatedForward,
    leave_one_out,
    michel,
    michel_bertology,
    michel_code,
    shapley_method,
    taylor,
)
from .lrp import LRP_NOTE, relevance, why_no_relevance
from .objectives import Objective, choose_objective
from .resampling import Array, Jackknife, correct_p_values, stack_texts

IMPORTANCE_METHODS: Mapping[str, ImportanceMethod] = {
    method.name: method
    for method in (
        ImportanceMethod(
            "leave-one-out", leave_one_out, is_tested=True, num_forwards=lambda heads: heads
        ),
        shapley_method(),
        ImportanceMethod("michel", michel, needs_gradient=True),
        ImportanceMethod("michel-code", michel_code, needs_gradient=True),
        ImportanceMethod("michel-bertology", michel_bertology, needs_gradient=True, batch_size=8),
        ImportanceMethod("taylor", taylor, needs_gradient=True, is_tested=True),
        ImportanceMethod(
            "lrp",
            relevance,
            measured_quantity="largest logit",
            note=LRP_NOTE,
            unsupported_reason=why_no_relevance,
        ),
    )
}
NORMALISATIONS = ("", "layer")
MIN_NORM = 1e-20  # prevents division by zero, with the value of the code of 1905.10650


@dataclass(frozen=True)
class ImportanceOptions:
    """Options of `estimate_importance` that do not depend on the method.

    - `max_seconds`: time limit. The result has what was finished by then: whole texts, or some
      sites of the first text.
    - `num_examples`: size of a random sample of the examples; None uses all.
    - `normalisation`: "layer" divides the scores of a site by their l2 norm (1905.10650).
    - `seed`: of random samples.

    >>> ImportanceOptions(max_seconds=0)
    Traceback (most recent call last):
    ValueError: max_seconds must be positive, got 0; leave it out for no limit
    """

    max_seconds: float | None = None
    num_examples: int | None = None
    normalisation: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        check_known("normalisation", self.normalisation, NORMALISATIONS)
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(
                f"max_seconds must be positive, got {self.max_seconds!r}; leave it out for no limit"
            )
        count = self.num_examples
        if count is not None and (type(count) is not int or count < 2):
            raise ValueError(f"num_examples must be an integer >= 2, got {count!r}")


DEFAULT_OPTIONS = ImportanceOptions()


def estimate_importance(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    method: str | ImportanceMethod = "leave-one-out",
    objective: str | Objective | None = None,
    options: ImportanceOptions = DEFAULT_OPTIONS,
    progress: Callable[[int], object] = lambda _: None,
    log: Callable[[str], object] = lambda _: None,
) -> ImportanceResult:
    """Estimate how much each head of a model matters, over texts.

    `method` and `objective` are names, or objects with options; see `IMPORTANCE_METHODS` and
    `OBJECTIVES`. If no objective is given, it is the loss of the model's own head, or the drift of
    its outputs if it has none; the result's `notes` name it. Examples are read one at a time, and
    `progress` is called with their number so far. `log` is called with an estimate of the time for
    a text, if the method needs many forward passes. A note reports what the time limit left out.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> result = estimate_importance(net.eval(), texts, method="taylor")
    >>> result.objective, result.texts, [(head.site, head.head) for head in result.heads]
    ('next-token', 5, [('decoder.0.attention', 0), ('decoder.0.attention', 1)])
    """
    start = time.monotonic()
    sites = require_ability(model, "ablate")
    method = _resolve_method(model, method)
    distinct = DistinctExamples(examples)
    sampled, notes = _sample_examples(distinct, options)
    first = next(sampled, None)
    if first is None:
        raise ValueError("cannot estimate importance without texts; give at least two")
    resolved, objective_note = _resolve_objective(model, objective, first, method)
    skipped: Counter[str] = Counter()
    deadline = math.inf if options.max_seconds is None else start + options.max_seconds
    inputs = _read_inputs(model, sites, resolved, chain([first], sampled), skipped, deadline)
    rated = _rate_texts(method, inputs, progress, log)
    sums = rated.sums
    notes.append(objective_note)
    if rated.is_over:
        notes += _describe_time_limit(rated, options)
    elif len(sums) < 2:
        if distinct.num_repeated:
            distinct.check_min_count()
        unit = "texts" if method.batch_size == 1 else f"batches of {method.batch_size} texts"
        fact = f"cannot compute confidence intervals from {len(sums)} {unit}"
        raise ValueError(f"{fact}; give at least two")
    notes += distinct.notes
    if skipped["without target"]:
        count = pluralise(skipped["without target"], "text")
        notes.append(f"left out {count} without any target")
    if rated.row_problem:
        notes.append(f"each ablation ran alone, in a full forward pass: {rated.row_problem}")
    names = [module.site.name for module in sites]
    missing = [name for name in names if name not in _common_sites(sums)]
    if missing:
        reason = "some texts do not reach them" if rated.num_texts else "the time was over"
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        notes.append(f"not rated because {reason}: {missing[0]}{others}")
    notes += [method.note, *left_out_notes(model, "ablate")]
    return ImportanceResult(
        type(model).__name__,
        method.name,
        method.measured_quantity or resolved.name,
        rated.num_texts,
        rate_heads(sites, sums, options, method.is_tested),
        tuple(note for note in notes if note),
    )


def _resolve_method(model: nn.Module, method: str | ImportanceMethod) -> ImportanceMethod:
    """Return the method of this name; raise if the model cannot use it."""
    if isinstance(method, str):
        check_known("method", method, IMPORTANCE_METHODS)
        method = IMPORTANCE_METHODS[method]
    reason = method.unsupported_reason(model)
    if reason:
        raise ValueError(f"cannot use method {method.name!r}: {reason}")
    return method


def _read_inputs(
    model: nn.Module,
    sites: Sequence[SiteModule],
    objective: Objective,
    examples: Iterable[Example],
    skipped: Counter[str],
    deadline: float,
) -> Iterator[ImportanceInput]:
    """Yield the inputs of a method; count texts without targets."""
    for index, example in enumerate(examples):
        evaluation = objective.prepare_input(model, example, index)
        if not evaluation.num_targets:
            skipped["without target"] += 1
            continue
        forward = RepeatedForward(model, sites, evaluation.inputs)
        yield ImportanceInput(index, forward, evaluation, objective, deadline)


class RatedTexts(NamedTuple):
    """Sums of each text or batch of texts, and how they were computed.

    `is_over` if the time limit was reached; without any whole text, `sums` then has the finished
    sites of the first one. `row_problem` is why ablations ran one by one.
    """

    sums: list[ImportanceSums]
    num_texts: int
    is_over: bool
    seconds_per_text: float
    row_problem: str


def _rate_texts(
    method: ImportanceMethod,
    inputs: Iterator[ImportanceInput],
    progress: Callable[[int], object],
    log: Callable[[str], object],
) -> RatedTexts:
    """Run a method on texts until they end, or the time does."""
    sums: list[ImportanceSums] = []
    num_texts = 0
    seconds_per_text = math.nan
    row_problem = ""
    is_over = False
    while batch := list(islice(inputs, method.batch_size)):
        started = time.monotonic()
        is_over = started > batch[0].deadline
        if is_over:
            break
        if method.num_forwards is not None:
            num_heads = sum(batch[0].run.head_counts.values())
            if not sums:
                one_forward = time.monotonic() - started
                seconds_per_text = one_forward * method.num_forwards(num_heads)
                log(f"{method.name}: at most {format_seconds(seconds_per_text)} for each text")
            row_problem = row_problem or batch[0].run.row_problem
        try:
            sums.append(method.estimate(*batch))
        except OutOfTimeError as error:
            is_over = True
            if error.sums and not sums:
                sums.append(error.sums)
            break
        num_texts += len(batch)
        seconds_per_text = (time.monotonic() - started) / len(batch)
        progress(num_texts)
    return RatedTexts(sums, num_texts, is_over, seconds_per_text, row_problem)


def _describe_time_limit(rated: RatedTexts, options: ImportanceOptions) -> list[str]:
    """Return notes on what the time limit left out; raise if no head was rated."""
    limit = f"the time limit of {options.max_seconds:g} seconds"
    is_known = not math.isnan(rated.seconds_per_text)
    pace = f", {format_seconds(rated.seconds_per_text)} for each text" if is_known else ""
    if not rated.sums:
        raise ValueError(f"cannot rate a head within {limit}{pace}; give a longer one")
    finished = f"after {pluralise(rated.num_texts, 'text')}" if rated.num_texts else "in text 1"
    notes = [f"stopped {finished} at {limit}{pace}"]
    if len(rated.sums) < 2:
        notes.append("no confidence intervals, which need two texts")
    return notes


def _resolve_objective(
    model: nn.Module, requested: str | Objective | None, example: Example, method: ImportanceMethod
) -> tuple[Objective, str]:
    """Return the objective and a note on how it was chosen; raise if the method cannot use it."""
    if method.measured_quantity:
        if requested is not None:
            fact = f"method {method.name!r} measures the {method.measured_quantity}"
            raise ValueError(f"cannot use an objective: {fact}; leave objective out")
        return choose_objective(model, "drift", example)[0], ""
    objective, note = choose_objective(model, requested, example)
    if method.needs_gradient and not objective.has_gradient:
        fact = f"{objective.name} has no useful gradient at the unedited model"
        remedy = "use leave-one-out or shapley, or a model with a head and labels"
        raise ValueError(f"cannot use method {method.name!r}: {fact}; {remedy}")
    return objective, note


def _sample_examples(
    examples: Iterable[Example], options: ImportanceOptions
) -> tuple[Iterator[Example], list[str]]:
    """Sample examples uniformly in their order (reservoir sampling), or keep all; returns a note
    too.
    """
    size = options.num_examples
    if size is None:
        return iter(examples), []
    generator = np.random.default_rng(options.seed)
    slots: list[tuple[int, Example]] = []  # a new example replaces a random one
    count = 0
    for count, example in enumerate(examples, 1):
        if len(slots) < size:
            slots.append((count, example))
            continue
        slot = int(generator.integers(count))
        if slot < size:
            slots[slot] = (count, example)
    sampled = [example for _, example in sorted(slots, key=lambda slot: slot[0])]
    note = f"{len(sampled)} of {count} texts, sampled with seed {options.seed}"
    return iter(sampled), [note]


def _common_sites(sums: Sequence[ImportanceSums]) -> set[str]:
    """Return names of the sites that every text reaches."""
    return set(sums[0]).intersection(*sums)


def rate_heads(
    sites: Sequence[SiteModule],
    sums: Sequence[ImportanceSums],
    options: ImportanceOptions,
    is_tested: bool,
) -> tuple[HeadImportance, ...]:
    """Turn the sums of all texts into the importance of every head, with intervals and p-values.

    With `is_tested`, a t test asks whether the importance is 0; else p-values are NaN. Sites that
    some text does not reach are left out.
    """

    def normalise(scores: Array) -> Array:
        if options.normalisation != "layer":
            return scores
        return scores / (np.linalg.norm(scores, axis=-1, keepdims=True) + MIN_NORM)

    common = _common_sites(sums)
    reached = [one.site for one in sites if one.site.name in common]
    means: list[Jackknife] = []
    p_values = [np.empty(0)]
    for site in reached:
        mean = Jackknife.of_ratio(*stack_texts([text[site.name] for text in sums]))
        means.append(mean)
        p_values.append(mean.p_values() if is_tested else np.full_like(mean.value, math.nan))
    p = np.concatenate(p_values)
    tests = zip(p.tolist(), correct_p_values(p).tolist(), strict=True)
    heads: list[HeadImportance] = []
    for site, mean in zip(reached, means, strict=True):
        score = mean.map(normalise)
        group = max(1, len(score.value) // max(1, site.kv))
        columns = np.stack([score.value, *score.interval()], 1).tolist()
        for head, (value, low, high) in enumerate(columns):
            place = (site.name, site.stack, site.kind, site.layer, head, head // group)
            heads.append(HeadImportance(*place, value, low, high, *next(tests)))
    return tuple(heads)
