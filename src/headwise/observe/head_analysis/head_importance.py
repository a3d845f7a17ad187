"""Importance of every attention head for a named objective, over texts, with confidence intervals
and a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np
from torch import nn

from ...util.errors import pluralise, suggest
from ..inspect.attention_sites import left_out_notes, require_ability
from ..inspect.hooks import SiteModule
from .annotated_examples import Example
from .distinct_examples import DistinctExamples
from .head_table import ImportanceResult
from .importance_methods import (
    CheckTime,
    ImportanceInput,
    ImportanceMethod,
    ImportanceOptions,
    ImportanceSums,
    TimeLimitReached,
    leave_one_out,
    make_forward,
    make_time_check,
    michel,
    michel_batch_method,
    michel_code,
    rate_heads,
    shapley_method,
    taylor,
    taylor_size,
)
from .lrp import relevance_method
from .objectives import Objective, choose_objective

IMPORTANCE_METHODS: Mapping[str, ImportanceMethod] = {
    method.name: method
    for method in (
        ImportanceMethod("leave-one-out", leave_one_out, is_tested=True),
        shapley_method(),
        ImportanceMethod("michel", michel, needs_gradient=True),
        ImportanceMethod("michel-code", michel_code, needs_gradient=True),
        ImportanceMethod(
            "michel-bert", partial(michel_code, last_over_texts=True), needs_gradient=True
        ),
        michel_batch_method(),
        ImportanceMethod("taylor", taylor, needs_gradient=True, is_tested=True),
        ImportanceMethod("taylor-size", taylor_size, needs_gradient=True),
        relevance_method("constant"),
        relevance_method("jacobian"),
    )
}
DEFAULT_OPTIONS = ImportanceOptions()


def estimate_importance(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    method: str | ImportanceMethod = "leave-one-out",
    objective: str | Objective | None = None,
    options: ImportanceOptions = DEFAULT_OPTIONS,
    progress: Callable[[int], object] = lambda _: None,
) -> ImportanceResult:
    """Estimate how much each head of a model matters, over texts.

    `method` and `objective` are names or objects with options of their own; see
    `IMPORTANCE_METHODS` and `OBJECTIVES`. If no objective is given, it is the loss of the model's
    own head, or the drift of its outputs if it has none; `notes` of the result say which. Examples
    are read one at a time, and `progress` is called with their number so far. When the time limit
    is reached, the unfinished example is dropped and a note is added.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> result = estimate_importance(net.eval(), texts, method="taylor")
    >>> result.objective, result.texts, [(head.site, head.head) for head in result.heads]
    ('next-token', 5, [('decoder.0.attention', 0), ('decoder.0.attention', 1)])
    """
    check_time = make_time_check(options.max_seconds)
    estimator = _resolve_method(method)
    sites = require_ability(model, "ablate")
    reason = estimator.unsupported_reason(model)
    if reason:
        raise ValueError(f"cannot use method {estimator.name!r}: {reason}")
    distinct = DistinctExamples(examples)
    sampled, notes = _sample_examples(distinct, options)
    first = next(sampled, None)
    if first is None:
        raise ValueError("cannot estimate importance without texts; give at least two")
    resolved, objective_note = _resolve_objective(model, objective, first, estimator)
    run = ImportanceRun(model, sites, estimator, resolved)
    run.run(chain([first], sampled), check_time, progress)
    run.check_num_units(distinct)
    heads = rate_heads(sites, run.sums_by_unit, options, estimator.is_tested)
    notes += [
        *([objective_note] if objective_note else []),
        *distinct.notes,
        *run.notes(options),
        *([estimator.note] if estimator.note else []),
    ]
    notes += left_out_notes(model, "ablate")
    quantity = estimator.measured_quantity or resolved.name
    return ImportanceResult(
        type(model).__name__, estimator.name, quantity, run.num_texts, heads, tuple(notes)
    )


class ImportanceRun:
    """Runs a method over examples and collects its sums, one unit per example or per batch."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[SiteModule],
        method: ImportanceMethod,
        objective: Objective,
    ) -> None:
        self.model = model
        self.sites = sites
        self.method = method
        self.objective = objective
        self.sums_by_unit: list[ImportanceSums] = []
        self.num_texts = self.num_without_targets = 0
        self.time_limit_reached = False
        self.uses_partial_forward = True

    def run(
        self, examples: Iterator[Example], check_time: CheckTime, progress: Callable[[int], object]
    ) -> None:
        """Read examples until they end or the time limit is reached."""
        inputs = self._prepare_inputs(examples)
        try:
            while texts := list(islice(inputs, self.method.batch_size)):
                check_time()
                self.sums_by_unit.append(self.method.estimate(texts, check_time))
                self.num_texts += len(texts)
                progress(self.num_texts)
        except TimeLimitReached:
            self.time_limit_reached = True

    def check_num_units(self, distinct: DistinctExamples) -> None:
        """Raise ValueError for fewer than 2 units, over which there is no confidence interval."""
        if len(self.sums_by_unit) < 2:
            if distinct.num_repeated:
                distinct.check_min_count()
            unit = (
                "texts"
                if self.method.batch_size == 1
                else f"batches of {self.method.batch_size} texts"
            )
            remedy = " and a longer time limit" if self.time_limit_reached else ""
            count = len(self.sums_by_unit)
            raise ValueError(
                f"cannot compute confidence intervals from {count} {unit}; give at least "
                f"two{remedy}"
            )

    def _prepare_inputs(self, examples: Iterator[Example]) -> Iterator[ImportanceInput]:
        for index, example in enumerate(examples):
            evaluation = self.objective.prepare_input(self.model, example, index)
            if not evaluation.num_targets:
                self.num_without_targets += 1
                continue
            forward = make_forward(self.model, self.sites, evaluation.inputs)
            self.uses_partial_forward = self.uses_partial_forward and forward.is_partial
            yield ImportanceInput(index, forward, evaluation, self.objective)

    def notes(self, options: ImportanceOptions) -> list[str]:
        """Limits of the result: the time limit, and skipped texts or sites."""
        notes: list[str] = []
        if self.time_limit_reached:
            notes.append(
                f"stopped after {self.num_texts} texts at the time limit of "
                f"{options.max_seconds:g} seconds"
            )
        if self.num_without_targets:
            notes.append(
                f"left out {pluralise(self.num_without_targets, 'text')} without any target"
            )
        if not self.uses_partial_forward and not self.method.needs_gradient:
            notes.append(
                f"{type(self.model).__name__} runs in full for every head: only headwise models "
                "can restart midway"
            )
        names = [module.site.name for module in self.sites]
        missing = [name for name in names if not all(name in unit for unit in self.sums_by_unit)]
        if missing:
            notes.append(f"not rated because some texts do not reach them: {', '.join(missing)}")
        return notes


def _resolve_method(method: str | ImportanceMethod) -> ImportanceMethod:
    if isinstance(method, ImportanceMethod):
        return method
    if method not in IMPORTANCE_METHODS:
        raise ValueError(f"unknown method {method!r}; {suggest(str(method), IMPORTANCE_METHODS)}")
    return IMPORTANCE_METHODS[method]


def _resolve_objective(
    model: nn.Module, requested: str | Objective | None, example: Example, method: ImportanceMethod
) -> tuple[Objective, str]:
    """The objective and a note on how it was chosen; refuses one that the method cannot use."""
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
    """A uniform sample of the examples in their order (reservoir sampling), or all of them, with a
    note.
    """
    if options.num_examples is None:
        return iter(examples), []
    generator = np.random.default_rng(options.seed)
    sampled = dict[int, Example]()
    count = 0
    numbers: list[int] = []  # of the sampled examples; a new example replaces a random one
    for count, example in enumerate(examples, 1):
        slot = (
            len(numbers) if len(numbers) < options.num_examples else int(generator.integers(count))
        )
        if slot >= options.num_examples:
            continue
        if slot < len(numbers):
            del sampled[numbers[slot]]
            numbers[slot] = count
        else:
            numbers.append(count)
        sampled[count] = example
    notes = [f"{len(sampled)} of {count} texts, sampled with seed {options.seed}"]
    return iter([sampled[number] for number in sorted(sampled)]), notes
