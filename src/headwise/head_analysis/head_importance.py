"""How much every head matters for a named objective, over texts, with intervals, in a time that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np
from torch import nn

from ..errors import suggest
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import SiteModule
from .annotated_examples import Example
from .importance_methods import (
    SIGNIFICANCE_LEVEL,
    CheckTime,
    GradientTimesActivation,
    ImportanceInput,
    ImportanceMethod,
    ImportanceOptions,
    ImportanceResult,
    ImportanceSums,
    LeaveOneOut,
    ShapleyValue,
    TaylorExpansion,
    TimeLimitReached,
    make_time_check,
    rate_heads,
)
from .lrp import LayerwiseRelevance
from .objectives import Objective, choose_objective
from .partial_forward import make_forward
from .resampling import min_p_value

IMPORTANCE_METHODS: Mapping[str, ImportanceMethod] = {
    one.name: one
    for one in (
        LeaveOneOut(),
        ShapleyValue(),
        GradientTimesActivation(),
        GradientTimesActivation("code"),
        GradientTimesActivation("bertology", batch_size=8),
        TaylorExpansion(),
        TaylorExpansion("size"),
        LayerwiseRelevance(),
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
    """How much each head of a model matters over texts: for the loss of the model's own head, or how far it drifts.

    `method` and `objective` are names, or objects with fields of their own; the objective is chosen by the model's head
    where none is named, and `notes` say which. Texts are read one at a time; `tell` hears how many there were. When the
    budget is used up, what was begun is left out, and said.

    >>> import headwise as hw, torch
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> found = estimate_importance(net.eval(), texts, method="taylor")
    >>> found.objective, found.texts, [(one.site, one.head) for one in found.heads]
    ('next-token', 5, [('decoder.0.attention', 0), ('decoder.0.attention', 1)])
    """
    check, way, those = make_time_check(options.max_seconds), _resolve_method(method), require_ability(model, "silence")
    if why := way.unsupported_reason(model):
        raise ValueError(f"{way.name} cannot be used: {why}")
    drawn, notes = _sample_examples(examples, options)
    if (first := next(drawn, None)) is None:
        raise ValueError("no text was given; give at least two")
    chosen, said = _resolve_objective(model, objective, first, way)
    units = ImportanceRun(model, those, way, chosen)
    units.run(chain([first], drawn), check, progress)
    heads = rate_heads(those, units.sums_by_unit, options, way.significance_test)
    notes += [*([said] if said else []), *units.notes(options, len(heads)), *way.notes]
    return ImportanceResult(
        type(model).__name__, way.name, way.measured_quantity or chosen.name, units.num_texts, heads, tuple(notes)
    )


class ImportanceRun:
    """What was found text by text, or batch by batch."""

    def __init__(
        self, model: nn.Module, sites: Sequence[SiteModule], method: ImportanceMethod, objective: Objective
    ) -> None:
        self.model, self.sites, self.method, self.objective = model, sites, method, objective
        self.sums_by_unit: list[ImportanceSums] = []
        self.num_texts = self.num_without_targets = 0
        self.time_limit_reached, self.uses_partial_forward = False, True

    def run(self, examples: Iterator[Example], check_time: CheckTime, progress: Callable[[int], object]) -> None:
        """Read texts to the end, or as long as there is time."""
        asking = self._prepare_inputs(examples)
        try:
            while texts := list(islice(asking, self.method.batch_size)):
                check_time()
                self.sums_by_unit.append(self.method.estimate(texts, check_time))
                self.num_texts += len(texts)
                progress(self.num_texts)
        except TimeLimitReached:
            self.time_limit_reached = True
        if len(self.sums_by_unit) < 2:
            what = "texts" if self.method.batch_size == 1 else f"batches of {self.method.batch_size} texts"
            more = "; give a larger budget" if self.time_limit_reached else ""
            raise ValueError(f"{len(self.sums_by_unit)} {what} leave no interval; give at least two{more}")

    def _prepare_inputs(self, scenes: Iterator[Example]) -> Iterator[ImportanceInput]:
        for number, scene in enumerate(scenes):
            question = self.objective.prepare_input(self.model, scene, number)
            if not question.num_targets:
                self.num_without_targets += 1
                continue
            way = make_forward(self.model, self.sites, question.inputs)
            self.uses_partial_forward = self.uses_partial_forward and way.is_partial
            yield ImportanceInput(number, way, question, self.objective)

    def notes(self, options: ImportanceOptions, num_heads: int) -> list[str]:
        """What must be known beside the numbers."""
        told, least = [], min_p_value(len(self.sums_by_unit))
        if (
            self.method.significance_test == "signs"
            and options.correction != "none"
            and least * num_heads > SIGNIFICANCE_LEVEL
        ):
            told.append(
                f"{len(self.sums_by_unit)} texts tell no head from chance: no p is below {least:g}, of "
                f"{num_heads} heads"
            )
        if self.time_limit_reached:
            told.append(f"stopped after {self.num_texts} texts, when {options.max_seconds:g} seconds were used up")
        if self.num_without_targets:
            told.append(f"{self.num_without_targets} texts in which nothing is asked were left out")
        if not self.uses_partial_forward and not self.method.needs_gradient:
            told.append(f"{type(self.model).__name__} is run whole for every head, for its layers are not known here")
        missing = [one.site.name for one in self.sites if not all(one.site.name in unit for unit in self.sums_by_unit)]
        if missing:
            told.append(f"not rated, for not every text reaches them: {', '.join(missing)}")
        return told


def _resolve_method(asked: str | ImportanceMethod) -> ImportanceMethod:
    if isinstance(asked, ImportanceMethod):
        return asked
    if asked not in IMPORTANCE_METHODS:
        raise ValueError(f"there is no method {asked!r}; {suggest(str(asked), IMPORTANCE_METHODS)}")
    return IMPORTANCE_METHODS[asked]


def _resolve_objective(
    model: nn.Module, asked: str | Objective | None, scene: Example, method: ImportanceMethod
) -> tuple[Objective, str]:
    """What is measured, if this method can measure it."""
    if method.measured_quantity:
        if asked is not None:
            raise ValueError(f"{method.name} measures the {method.measured_quantity}; leave objective out")
        return choose_objective(model, "drift", scene)[0], ""
    chosen, said = choose_objective(model, asked, scene)
    if method.needs_gradient and not chosen.has_gradient:
        fact = f"{chosen.name} has no slope at the model itself, which {method.name} asks for"
        raise ValueError(f"{fact}; use leave-one-out or shapley, or a model with a head and labels")
    return chosen, said


def _sample_examples(scenes: Iterable[Example], how: ImportanceOptions) -> tuple[Iterator[Example], list[str]]:
    """The texts, or as many of them as are asked for, each alike likely, in their order."""
    if how.num_examples is None:
        return iter(scenes), []
    draw, kept, count = np.random.default_rng(how.seed), dict[int, Example](), 0
    places: list[int] = []
    for count, scene in enumerate(scenes, 1):
        place = len(places) if len(places) < how.num_examples else int(draw.integers(count))
        if place >= how.num_examples:
            continue
        if place < len(places):
            del kept[places[place]]
            places[place] = count
        else:
            places.append(count)
        kept[count] = scene
    notes = [f"{len(kept)} of {count} texts, drawn with seed {how.seed}"]
    return iter([kept[number] for number in sorted(kept)]), notes
