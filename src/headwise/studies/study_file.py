"""Study files: which variants are trained on which tasks, with which seeds, learning rates and
sizes.

A contrast is a further comparison that the file plans before the runs, such as of an edited and a
trained model. It has two readouts, and each is one number of every seed. Their difference is tested
over seeds, like that of a variant from the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..costs.size_matching import MATCH_QUANTITIES
from ..data import Task, make_task
from ..data.synthetic_task import ModelShape
from ..errors import SpecError, suggest
from ..presets import PRESETS
from ..size_limits import parse_toml
from ..traces.record_types import Record
from ..training.recipe import Recipe
from .cell_heads import HEAD_MEASURES
from .model_edits import ModelEdit

CHANGE, LEARNING = "change", "learning"
OTHER_HEAD_NUMBERS = ("diversity", "support", "support_spread")
OTHER_HEAD_NUMBERS += ("score_deviation", "score_rank", "score_change", "residual")
MEASURES = (CHANGE, LEARNING, *HEAD_MEASURES, *OTHER_HEAD_NUMBERS)
STEP = re.compile("0|[1-9][0-9]{0,8}")
PATTERN = re.compile(
    r"(?:(?P<measure>\S+) of )?(?P<variant>\S+)(?: (?P<place>after|on|at step) (?P<name>\S+))?"
)


@dataclass(frozen=True)
class Readout:
    """One number of every cell of a variant, written as `[MEASURE of] VARIANT [after EDIT | on TEST
    | at step N]`.

    Without a measure it is the metric of the task: of the trained model, after an edit, or on a
    further test. "change" is what the edit or the test changed in it, and "learning" its mean over
    the evaluations during training. "residual" is how different the tokens of a text are after the
    last layer, and all other measures are means over heads.
    """

    text: str
    measure: str
    variant: str
    place: str
    name: str

    @staticmethod
    def parse(text: str) -> Readout:
        """Read a readout; raises SpecError if it is none.

        >>> Readout.parse("change of h4 after half").name
        'half'
        """
        if (match := PATTERN.fullmatch(text)) is None:
            raise SpecError(
                f'a contrast has {text!r}, which is not "VARIANT", "VARIANT after EDIT", "VARIANT '
                'on TEST" or '
                '"MEASURE of VARIANT"; correct the file'
            )
        parts = {key: value or "" for key, value in match.groupdict().items()}
        readout = Readout(text, **parts)
        readout._check_measure()
        return readout

    def _check_measure(self) -> None:
        if self.measure and self.measure not in MEASURES:
            raise SpecError(
                f"a contrast has the unknown measure {self.measure!r}; "
                f"{suggest(self.measure, MEASURES)}"
            )
        places = {"": ("", "after", "on"), CHANGE: ("after", "on"), LEARNING: ("",)}
        if self.place not in places.get(self.measure, ("", "on", "at step")):
            raise SpecError(
                f"the contrast of {self.text!r} is not measured {self.place or 'there'}; correct "
                "the file"
            )
        if self.place == "at step" and not STEP.fullmatch(self.name):
            raise SpecError(
                f"the contrast of {self.text!r} has the step {self.name!r}; write a number, as in "
                '"at step 0"'
            )

    def read(self, result: Mapping[str, Any], metric: str) -> float | None:
        """The number of one cell; None if it was not measured, as on a test that the task does not
        have.
        """
        if self.measure == LEARNING:
            values = [
                point["metrics"][metric] for point in result["curve"] if metric in point["metrics"]
            ]
            return sum(values) / len(values) if values else None
        if self.measure in ("", CHANGE):
            trained = result["metrics"].get(metric)
            value = self._metrics(result).get(metric)
            if self.measure == "" or value is None or trained is None:
                return value
            return value - trained
        place = {"": "", "on": f"test {self.name}", "at step": f"step {self.name}"}[self.place]
        summary = result["heads_at"].get(place, {}) if place else result["heads"]
        value = {**summary, **summary.get("measures", {})}.get(self.measure)
        return (
            value[-1] if isinstance(value, list) else value
        )  # the residual after the last of all layers

    def _metrics(self, result: Mapping[str, Any]) -> Mapping[str, float]:
        if self.place == "after":
            return result["edits"].get(self.name, {}).get("metrics", {})
        return result["tests"].get(self.name, {}) if self.place == "on" else result["metrics"]


@dataclass(frozen=True)
class Contrast:
    """The difference `left` minus `right`, paired over seeds."""

    left: Readout
    right: Readout

    @property
    def name(self) -> str:
        """The contrast in words."""
        return f"{self.left.text} minus {self.right.text}"

    def check(self) -> None:
        """Raise SpecError unless both readouts are of one measure and differ."""
        if self.left.text == self.right.text:
            raise SpecError(
                f"a contrast compares {self.left.text!r} with itself; give two different readouts"
            )
        left, right = (one.measure or "the metric of the task" for one in (self.left, self.right))
        if left != right:
            raise SpecError(
                f"the contrast {self.name!r} takes {right} from {left}; give two readouts of one "
                "measure"
            )

    def check_baseline(self, baseline: str) -> None:
        """Raise SpecError if the report makes the comparison anyway: the metric of a variant and of
        the baseline.
        """
        texts = self.left.text, self.right.text
        if baseline in texts and texts == (self.left.variant, self.right.variant):
            raise SpecError(
                f"the contrast {self.name!r} compares a variant with the baseline {baseline!r}, "
                "as the report does for "
                'every variant; leave it out, or name a measure, as in "learning of VARIANT"'
            )


def parse_contrasts(
    values: object, tables: Mapping[str, Mapping[str, Any]]
) -> tuple[Contrast, ...]:
    """Read the contrasts of a study file.

    `tables` has the variants, edits and tests of the file by their names. A contrast with one that
    the scale sets to false is left out; raises SpecError for one that the file does not have.
    """
    if not isinstance(values, list):
        raise SpecError(
            f'contrasts = {values!r} is no list; write contrasts = [["VARIANT", "VARIANT"]]'
        )
    contrasts: list[Contrast] = []
    pairs: set[frozenset[str]] = set()
    for pair in values:
        if not (
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair)
        ):
            raise SpecError(
                f'contrasts has {pair!r}, which is no pair of texts; write ["VARIANT", "VARIANT"]'
            )
        contrast = Contrast(Readout.parse(pair[0]), Readout.parse(pair[1]))
        contrast.check()
        if frozenset(pair) in pairs:
            raise SpecError(
                f"contrasts has {contrast.name!r} twice, perhaps in another order; leave one of "
                "them out"
            )
        pairs.add(frozenset(pair))
        if _is_chosen(contrast.left, tables) & _is_chosen(contrast.right, tables):
            contrasts.append(contrast)
    return tuple(contrasts)


def _is_chosen(readout: Readout, tables: Mapping[str, Mapping[str, Any]]) -> bool:
    named: Sequence[tuple[str, str]] = [("variants", readout.variant)]
    if readout.place in ("after", "on"):
        named = [*named, ("edits" if readout.place == "after" else "tests", readout.name)]
    for kind, name in named:
        if name not in tables[kind]:
            remedy = suggest(name, tables[kind]) if tables[kind] else f"add {name!r} to {kind}"
            raise SpecError(f"a contrast names {name!r}, which is not in {kind}; {remedy}")
    return all(tables[kind][name] is not False for kind, name in named)


SCALES = ("smoke", "small", "base", "gpu")
MATCHINGS = ("none", *MATCH_QUANTITIES)
LOWER_IS_BETTER = ("loss", "nats", "excess", "perplexity")
MAX_FILE_BYTES = 2**20
MAX_CELLS = 100_000

# Recipe fields that a study sets by itself: cells run on one thread, without trial steps, and with
# their own seeds.
CELL_EXECUTION: Mapping[str, Any] = {
    "precision": "fp32",
    "compile": "off",
    "rows": "padded",
    "attention": "fused",
    "device": "cpu",
    "parallelism": "auto",
}
STUDY_KEYS = (
    "hypothesis",
    "baseline",
    "match",
    "tolerance",
    "seeds",
    "tuning_seed",
    "model",
    "recipe",
    "variants",
    "tasks",
    "scales",
    "head_texts",
    "edits",
    "contrasts",
)
VARIANT_KEYS = ("preset", "spec", "options", "model", "recipe", "lr")
TASK_KEYS = ("task", "metric", "threshold", "model", "recipe", "tests", "options")


@dataclass(frozen=True)
class Variant:
    """One arm of a study: a preset or a spec file with options, and changes of the model and the
    recipe.

    Options are arguments of `hw.design`, such as `kv = 2`, and fields of the spec, such as
    `heads.kv = 2`. Without preset, spec and options, the attention is the one of the task's own
    model.
    """

    name: str
    preset: str = ""
    spec: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class StudyTask:
    """A task of a study, the metric that compares variants on it, and further tests of the trained
    models.

    A seed whose metric reaches `threshold` counts as a success. `tests` are tasks with other
    options, such as longer sequences, on which the same models are evaluated.
    """

    name: str
    task: Task
    metric: str
    threshold: float | None = None
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tests: Mapping[str, Task] = field(default_factory=dict[str, Task])

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is the better one."""
        return self.metric not in LOWER_IS_BETTER


@dataclass(frozen=True)
class Study:
    """A study as read from its file, at one scale; `folder` is where paths in the file start."""

    name: str
    hypothesis: str
    baseline: str
    variants: Mapping[str, Variant]
    tasks: Mapping[str, StudyTask]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    match: str = "none"
    tolerance: float = 0.1
    tuning_seed: int = 0
    head_texts: int = 16
    edits: Mapping[str, ModelEdit] = field(default_factory=dict[str, ModelEdit])
    contrasts: tuple[Contrast, ...] = ()
    scale: str = "small"
    folder: Path = Path()


def read_study(
    path: Path | str, scale: str = "small", overrides: Mapping[str, Any] | None = None
) -> Study:
    """Read a study file at a scale; `overrides` sets keys such as "recipe.steps" after the scale's
    own changes.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise SpecError(
                f"{path} has {len(data):,} bytes; a study file has at most {MAX_FILE_BYTES:,}"
            )
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read as a study: {error}; give a .toml file") from None
    table = parse_toml(f"{path} cannot be read as a study: it", text, "give a .toml file")
    if "heads" in table and not {"variants", "stacks"} & set(table):
        fact = f"{path} describes one attention layer, not a study"
        raise SpecError(
            f'{fact}; write a study with a variant of it, [variants.mine] with spec = "{path.name}"'
        )
    return parse_study(table, path.stem, scale, overrides or {}, path.parent)


def parse_study(
    table: Mapping[str, Any],
    name: str,
    scale: str,
    overrides: Mapping[str, Any],
    folder: Path = Path(),
) -> Study:
    """Make a study from the tables of its file; raises SpecError for unknown keys, variants, tasks
    and values.
    """
    _check_keys(table, STUDY_KEYS, "the study")
    scales = _table(table, "scales")
    if scale not in (*scales, "small"):
        raise SpecError(
            f"the study {name!r} has no scale {scale!r}; {suggest(scale, [*scales, 'small'])}"
        )
    merged = _merge(table, _table(scales, scale))
    for key, value in overrides.items():
        merged = _merge(merged, _nest(key, value))
    _check_keys(merged, STUDY_KEYS, "the study")
    variants = {
        key: _parse_variant(key, values) for key, values in _chosen(merged, "variants").items()
    }
    tasks = {key: _parse_task(key, values) for key, values in _chosen(merged, "tasks").items()}
    if not variants or not tasks:
        raise SpecError(
            f"the study {name!r} has {len(variants)} variants and {len(tasks)} tasks; give one of "
            "each"
        )
    recipe = dict(_table(merged, "recipe"))
    rates = _parse_rates(recipe.pop("lr", Recipe().lr), "recipe.lr")
    record = Record("the study", merged, "correct the file")
    study = Study(
        name=name,
        hypothesis=record.read_text("hypothesis", "").strip(),
        baseline=record.read_text("baseline", next(iter(variants))),
        variants=variants,
        tasks=tasks,
        seeds=_parse_seeds(merged.get("seeds", (1, 2, 3))),
        rates=rates,
        recipe=recipe,
        model=_table(merged, "model"),
        match=record.read_text("match", "none"),
        tolerance=record.read_number("tolerance", 0.1),
        tuning_seed=record.read_int("tuning_seed", default=0),
        head_texts=record.read_int("head_texts", default=16),
        edits={key: _parse_edit(key, values) for key, values in _chosen(merged, "edits").items()},
        contrasts=parse_contrasts(merged.get("contrasts", []), _contrast_tables(table, merged)),
        scale=scale,
        folder=folder,
    )
    _check_study(study)
    for contrast in study.contrasts:
        contrast.check_baseline(study.baseline)
    return study


def _check_study(study: Study) -> None:
    if not study.hypothesis:
        raise SpecError(
            f'the study {study.name!r} states no hypothesis; add hypothesis = "..." before it is '
            "run"
        )
    if study.baseline not in study.variants:
        raise SpecError(
            f"there is no variant {study.baseline!r}; {suggest(study.baseline, study.variants)}"
        )
    if study.match not in MATCHINGS:
        raise SpecError(
            f"match = {study.match!r} is unknown; {suggest(str(study.match), MATCHINGS)}"
        )
    if study.tuning_seed in study.seeds:
        raise SpecError(
            f"tuning_seed = {study.tuning_seed} is one of the seeds, so that the learning rate "
            "would be chosen on "
            "what is reported; use another tuning_seed"
        )
    if not 0 < study.tolerance < 1:
        raise SpecError(
            f"tolerance = {study.tolerance!r} must be between 0 and 1; use 0.1 for 10 %"
        )
    rates = [len(variant.rates or study.rates) for variant in study.variants.values()]
    count = len(study.tasks) * sum(num + len(study.seeds) for num in rates)
    if count > MAX_CELLS:
        raise SpecError(
            f"the study has {count:,} cells; give fewer variants, rates or seeds (at most "
            f"{MAX_CELLS:,})"
        )
    for changes in (study.model, *(variant.model for variant in study.variants.values())):
        _check_keys(changes, [one.name for one in fields(ModelShape)], "model")
    for changes in (study.recipe, *(variant.recipe for variant in study.variants.values())):
        _check_recipe(changes)


def _check_recipe(changes: Mapping[str, Any]) -> None:
    field_names = [one.name for one in fields(Recipe) if one.name not in (*CELL_EXECUTION, "seed")]
    _check_keys(changes, field_names, "recipe")


def _parse_variant(name: str, values: Any) -> Variant:
    _check_table(values, f"variants.{name}")
    _check_keys(values, VARIANT_KEYS, f"variants.{name}")
    record = Record(f"variants.{name}", values, "correct the file")
    preset, spec = record.read_text("preset", ""), record.read_text("spec", "")
    if preset and spec:
        raise SpecError(f"variants.{name} has preset and spec; give one of them")
    if not preset and not spec and name in PRESETS:
        preset = name
    if preset and preset not in PRESETS:
        raise SpecError(
            f"variants.{name}: there is no preset {preset!r}; {suggest(preset, PRESETS)}"
        )
    if not (preset or spec or set(values) & {"options", "model", "recipe"}):
        raise SpecError(
            f"there is no preset {name!r}; {suggest(name, PRESETS)}, or give variants.{name} a spec"
        )
    rates = _parse_rates(values["lr"], f"variants.{name}.lr") if "lr" in values else ()
    changes = {key: _table(values, key) for key in ("options", "model", "recipe")}
    return Variant(
        name, preset, spec, changes["options"], changes["model"], changes["recipe"], rates
    )


def _parse_task(name: str, values: Any) -> StudyTask:
    _check_table(values, f"tasks.{name}")
    settings = {key: value for key, value in values.items() if key in TASK_KEYS}
    options = {key: value for key, value in values.items() if key not in TASK_KEYS} | dict(
        _table(settings, "options")
    )
    record = Record(f"tasks.{name}", settings, "correct the file")
    kind = record.read_text("task", name)
    task = make_task(kind, **_tuples(options))
    tests_table = _chosen(settings, "tests")
    tests = {
        key: make_task(kind, **_tuples({**options, **_table(tests_table, key)}))
        for key in tests_table
    }
    metric = record.read_text("metric", next(iter(task.chance), "loss"))
    if metric not in (*task.chance, "loss"):
        raise SpecError(
            f"tasks.{name} has no metric {metric!r}; {suggest(metric, [*task.chance, 'loss'])}"
        )
    _check_recipe(_table(settings, "recipe"))
    return StudyTask(
        name,
        task,
        metric,
        record.read_optional_number("threshold"),
        _table(settings, "model"),
        _table(settings, "recipe"),
        tests,
    )


def _parse_edit(name: str, values: Any) -> ModelEdit:
    _check_table(values, f"edits.{name}")
    return ModelEdit.parse(name, values)


def _contrast_tables(
    table: Mapping[str, Any], merged: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Names that contrasts may have, with those that the scale sets to false; tests are those of
    any task.

    Tests of a task that the scale leaves out are only in the unmerged table.
    """
    tasks = [task for task in _table(table, "tasks").values() if isinstance(task, Mapping)]
    tests = {name: False for task in tasks for name in _table(task, "tests")}
    for task in _chosen(merged, "tasks").values():
        tests |= dict.fromkeys(_chosen(task, "tests"), True)
    return {
        "variants": _table(merged, "variants"),
        "edits": _table(merged, "edits"),
        "tests": tests,
    }


def _parse_rates(value: Any, key: str) -> tuple[float, ...]:
    rates = tuple(value) if isinstance(value, list) else (value,)
    if not rates or not all(type(rate) in (int, float) and 0 < rate <= 1 for rate in rates):
        raise SpecError(
            f"{key} = {value!r} must be learning rates above 0 and at most 1; write [0.001, 0.003]"
        )
    return tuple(float(rate) for rate in rates)


def _parse_seeds(value: Any) -> tuple[int, ...]:
    seeds = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if (
        not seeds
        or not all(type(seed) is int and seed >= 0 for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise SpecError(f"seeds = {value!r} must be different integers >= 0; write [1, 2, 3]")
    return seeds


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = values.get(key, {})
    _check_table(table, key)
    return table


def _chosen(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The tables below a key, without those that a scale leaves out by setting them to false."""
    return {name: table for name, table in _table(values, key).items() if table is not False}


def _check_table(value: Any, key: str) -> None:
    if not isinstance(value, Mapping):
        raise SpecError(f"{key} = {value!r} is no table; write [{key}] and its fields below it")


def _check_keys(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for key in values:
        if key not in names:
            raise SpecError(f"{where} has no field {key!r}; {suggest(key, names)}")


def _merge(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the changes: tables are merged key by key, everything else is replaced."""
    merged = dict(table)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = (
            _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _nest(path: str, value: Any) -> dict[str, Any]:
    """The table that sets one dotted key.

    >>> _nest("recipe.steps", 3)
    {'recipe': {'steps': 3}}
    """
    first, _, rest = path.partition(".")
    return {first: _nest(rest, value) if rest else value}
