"""Study files: which variants are trained on which tasks, with which seeds, learning rates and
sizes.

A contrast is a further comparison that the file plans before the runs, such as of an edited and a
trained model. It has two readouts, and each is one number of every seed. Their difference is tested
over seeds, like a variant minus the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..attention.presets import PRESETS
from ..costs.size_matching import MATCH_QUANTITIES
from ..training.data import Task, make_task
from ..training.data.synthetic_task import ModelShape
from ..training.recipe import Recipe
from ..util.errors import SpecError, suggest
from ..util.size_limits import Record, parse_toml
from .run_cell import HEAD_MEASURES, ModelEdit, lists_to_tuples
from .study_overrides import merge_tables, override_tables

CHANGE = "change"
LEARNING = "learning"
OTHER_HEAD_NUMBERS = (
    "diversity",
    "support",
    "support_spread",
    "score_deviation",
    "score_rank",
    "score_change",
    "residual",
)
MEASURES = (CHANGE, LEARNING, *HEAD_MEASURES, *OTHER_HEAD_NUMBERS)
STEP = re.compile("0|[1-9][0-9]{0,8}")
PATTERN = re.compile(
    r"(?:(?P<measure>\S+) of )?(?P<variant>\S+)(?: (?P<place>after|on|at step) (?P<name>\S+))?"
)
REMEDY = "correct the file"

Tables = Mapping[str, Mapping[str, Any]]


# --- Contrasts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Readout:
    """Read one number of every cell of a variant.

    Written as `[MEASURE of] VARIANT [after EDIT | on TEST | at step N]`. Without a measure it is
    the metric of the task: of the trained model, after an edit, or on a further test. "change" is
    what the edit or the test changed in it, and "learning" its mean over the evaluations during
    training. "residual" is how different the tokens of a text are after the last layer, and all
    other measures are means over heads.
    """

    text: str
    measure: str
    variant: str
    place: str
    name: str

    @staticmethod
    def for_variant(variant: str, place: str = "", name: str = "") -> Readout:
        """Make the metric of a variant: trained, "after" an edit or "on" a further test."""
        return Readout(variant, "", variant, place, name)

    @staticmethod
    def parse(text: str) -> Readout:
        """Read a readout; raise SpecError if it is not one.

        >>> Readout.parse("change of h4 after half").name
        'half'
        """
        match = PATTERN.fullmatch(text)
        if match is None:
            raise SpecError(
                f'a contrast has {text!r}, which is not "VARIANT", "VARIANT after EDIT", "VARIANT '
                f'on TEST" or "MEASURE of VARIANT"; {REMEDY}'
            )
        readout = Readout(text, **match.groupdict(""))
        measure = readout.measure
        if measure and measure not in MEASURES:
            raise SpecError(
                f"a contrast has the unknown measure {measure!r}; {suggest(measure, MEASURES)}"
            )
        places = {"": ("", "after", "on"), CHANGE: ("after", "on"), LEARNING: ("",)}
        if readout.place not in places.get(measure, ("", "on", "at step")):
            raise SpecError(
                f"the contrast of {text!r} is not measured {readout.place or 'there'}; {REMEDY}"
            )
        if readout.place == "at step" and not STEP.fullmatch(readout.name):
            raise SpecError(
                f"the contrast of {text!r} has the step {readout.name!r}; write a number, as in "
                '"at step 0"'
            )
        return readout

    def read(self, result: Mapping[str, Any], metric: str) -> float | None:
        """Read the number of one cell; None if it was not measured, as on a test that the task
        lacks.
        """
        if self.measure == LEARNING:
            points = [point["metrics"] for point in result["curve"]]
            values = [metrics[metric] for metrics in points if metric in metrics]
            return sum(values) / len(values) if values else None
        if self.measure in ("", CHANGE):
            trained = result["metrics"].get(metric)
            metrics = result["metrics"]
            if self.place:
                metrics = result["tests"].get(self.name, {})
                if self.place == "after":
                    metrics = result["edits"].get(self.name, {}).get("metrics", {})
            value = metrics.get(metric)
            if self.measure == "" or value is None or trained is None:
                return value
            return value - trained
        summary = result["heads"]
        if self.place:
            kind = "test" if self.place == "on" else "step"
            summary = result["heads_at"].get(f"{kind} {self.name}", {})
        value = {**summary, **summary.get("measures", {})}.get(self.measure)
        return value[-1] if isinstance(value, list) else value  # the residual of all layers

    def is_chosen(self, tables: Tables) -> bool:
        """Return False if the scale sets the variant, edit or test to false.

        Raises SpecError for one that the file does not have.
        """
        names = {"variants": self.variant}
        if self.place in ("after", "on"):
            names["edits" if self.place == "after" else "tests"] = self.name
        for kind, name in names.items():
            if name not in tables[kind]:
                remedy = suggest(name, tables[kind]) if tables[kind] else f"add {name!r} to {kind}"
                raise SpecError(f"a contrast names {name!r}, which is not in {kind}; {remedy}")
        return all(tables[kind][name] is not False for kind, name in names.items())


NUMBER = r"(0?\.[0-9]*[1-9][0-9]*|[1-9][0-9]*(?:\.[0-9]+)?)"
EXPECTED_MARGIN = re.compile(f"within {NUMBER}|at most {NUMBER} worse")


@dataclass(frozen=True)
class Contrast:
    """Subtract `right` from `left`, paired over seeds.

    `expected` is what the hypothesis says of the difference: that `left` is "better" or "worse" by
    the metric of the task, or has "more" or "less" of a measure; that the two differ by at most a
    margin, as in "within 0.01"; or that `left` is better, or worse by at most a margin, as in "at
    most 0.01 worse". It is empty where the hypothesis says nothing. `tasks` are those of which it
    is expected, all if empty.
    """

    left: Readout
    right: Readout
    expected: str = ""
    tasks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Write the contrast in words."""
        return f"{self.left.text} minus {self.right.text}"

    def key(self, baseline: str) -> str:
        """Name the comparison; that of a variant with the baseline is named as the variant."""
        is_plain = (self.left.text, self.right.text) == (self.left.variant, baseline)
        return self.left.text if is_plain else self.name

    @property
    def is_one_sided(self) -> bool:
        """Return True if `left` may be better by any amount."""
        return self.expected.startswith("at most")

    @property
    def margin(self) -> float | None:
        """Return the largest difference that counts as none; None for a direction."""
        match = EXPECTED_MARGIN.fullmatch(self.expected)
        return None if match is None else float(match[1] or match[2])


def parse_contrasts(values: Any, tables: Tables, baseline: str) -> tuple[Contrast, ...]:
    """Read the contrasts of a study file.

    `tables` has the variants, edits and tests of the file by their names. A contrast with one that
    the scale sets to false is left out; raises SpecError for one that the file does not have, and
    for a comparison that the report makes anyway, the metric of a variant and of the baseline,
    unless it says what is expected.
    """
    contrasts: list[Contrast] = []
    pairs: set[frozenset[str]] = set()
    for texts in values if isinstance(values, list) else (values,):
        is_pair = isinstance(texts, list) and len(texts) >= 2
        if not is_pair or not all(isinstance(text, str) for text in texts):
            raise SpecError(
                f"contrasts has {texts!r}, which is not a pair of texts; write "
                '[["VARIANT", "VARIANT"]], or [["VARIANT", "VARIANT", "better"]]'
            )
        pair = texts[:2]
        expected = "".join(texts[2:3])
        sides = [Readout.parse(text) for text in pair]
        contrast = Contrast(sides[0], sides[1], expected, tuple(texts[3:]))
        measure = contrast.left.measure
        words = ("more", "less") if measure else ("better", "worse")
        is_margin = contrast.margin is not None and not (measure and contrast.is_one_sided)
        if contrast.expected not in ("", *words) and not is_margin:
            raise SpecError(
                f"the contrast {contrast.name!r} expects {contrast.expected!r}; write "
                f"{words[0]!r}, {words[1]!r}, 'within 0.01', or for metrics 'at most 0.01 worse'"
            )
        left = contrast.left
        right = contrast.right
        if left.text == right.text:
            raise SpecError(
                f"a contrast compares {left.text!r} with itself; give two different readouts"
            )
        if left.measure != right.measure:
            measures = [one.measure or "the metric of the task" for one in (left, right)]
            raise SpecError(
                f"the contrast {contrast.name!r} takes {measures[1]} from {measures[0]}; give two "
                "readouts of one measure"
            )
        is_expected = pair[1] == baseline and contrast.expected
        if baseline in pair and pair == [left.variant, right.variant] and not is_expected:
            raise SpecError(
                f"the contrast {contrast.name!r} compares a variant with the baseline "
                f"{baseline!r}, as the report does for every variant; leave it out, or say what "
                f'is expected, as in ["VARIANT", "{baseline}", "better"]'
            )
        if frozenset(pair) in pairs:
            raise SpecError(
                f"contrasts has {contrast.name!r} twice, perhaps in another order; leave one out"
            )
        pairs.add(frozenset(pair))
        is_chosen = [readout.is_chosen(tables) for readout in (left, right)]
        if all(is_chosen):
            contrasts.append(contrast)
    return tuple(contrasts)


# --- Studies --------------------------------------------------------------------------------------

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
    "parallelism": "auto",
}
RECIPE_KEYS = {one.name for one in fields(Recipe)} - {*CELL_EXECUTION, "device", "seed"}
MODEL_KEYS = [one.name for one in fields(ModelShape)]
VARIANT_KEYS = ("preset", "spec", "options", "model", "recipe")
TASK_KEYS = ("task", "metric", "threshold", "model", "recipe", "tests", "options")


@dataclass(frozen=True)
class Variant:
    """Describe one arm of a study: a preset or a spec file with options, and changes of model and
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


@dataclass(frozen=True)
class StudyTask:
    """Describe a task of a study, the metric that compares variants on it, and further tests.

    A seed succeeds if its metric reaches `threshold`. `tests` are tasks with other options, such as
    longer sequences, on which the same models are evaluated.
    """

    name: str
    task: Task
    metric: str
    threshold: float | None = None
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tests: Mapping[str, Task] = field(default_factory=dict[str, Task])

    @property
    def sign(self) -> int:
        """Return 1 if a larger metric is better, otherwise -1."""
        return -1 if self.metric in LOWER_IS_BETTER else 1


@dataclass(frozen=True)
class Study:
    """Hold a study as read from its file, at one scale; paths in the file start at `folder`."""

    name: str
    hypothesis: str
    baseline: str
    variants: Mapping[str, Variant]
    tasks: Mapping[str, StudyTask]
    seeds: tuple[int, ...]
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
    device: str = "cpu"

    def edits_of(self, variant: str) -> Iterator[tuple[str, ModelEdit]]:
        """Yield the edits of the trained models of a variant, with their names."""
        for name, edit in self.edits.items():
            if edit.of in ("", variant):
                yield name, edit

    def recipe_changes(self, variant: Variant, task: StudyTask) -> dict[str, Any]:
        """Return the fields of the recipe: the study's, changed by the task, then by the variant.

        `lr` holds all learning rates that are tried.
        """
        return {"lr": (Recipe().lr,), **self.recipe, **task.recipe, **variant.recipe}


# Fields of a study that its file does not have: its name, and what the command chooses.
CHOSEN_FIELDS = {"name", "scale", "folder", "device"}
STUDY_KEYS = {one.name for one in fields(Study)} - CHOSEN_FIELDS | {"scales"}


def read_study(
    path: Path | str, scale: str = "small", overrides: Mapping[str, Any] | None = None
) -> Study:
    """Read a study file at a scale.

    `overrides` sets keys such as "recipe.steps" after the scale's own changes.
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
        raise SpecError(
            f"{path} describes one attention layer, not a study; write a study with a variant of "
            f'it, [variants.mine] with spec = "{path.name}"'
        )
    return parse_study(table, path.stem, scale, overrides or {}, path.parent)


def parse_study(
    table: Mapping[str, Any],
    name: str,
    scale: str,
    overrides: Mapping[str, Any],
    folder: Path = Path(),
) -> Study:
    """Make a study from tables; raise SpecError for unknown keys, variants, tasks and values."""
    scales = _read_table(table.get("scales", {}), "scales").values
    if scale not in (*scales, "small"):
        raise SpecError(
            f"the study {name!r} has no scale {scale!r}; {suggest(scale, [*scales, 'small'])}"
        )
    merged = merge_tables(table, _read_table(scales.get(scale, {}), f"scales.{scale}").values)
    names = {kind: [*_chosen(merged, kind)] for kind in ("variants", "tasks", "edits")}
    merged = override_tables(merged, overrides, names)
    record = _read_table(merged, "the study", STUDY_KEYS)
    variants = {key: _parse_variant(one) for key, one in _chosen(merged, "variants").items()}
    tasks = {key: _parse_task(key, one) for key, one in _chosen(merged, "tasks").items()}
    edits = _chosen(merged, "edits")
    if not variants or not tasks:
        raise SpecError(
            f"the study {name!r} has {len(variants)} variants and {len(tasks)} tasks; give one of "
            "each"
        )
    baseline = record.read_text("baseline", next(iter(variants)))
    given_seeds = merged.get("seeds", (1, 2, 3))
    seeds = given_seeds if isinstance(given_seeds, (list, tuple)) else (given_seeds,)
    are_whole = all(type(seed) is int and seed >= 0 for seed in seeds)
    if not seeds or not are_whole or len(set(seeds)) < len(seeds):
        raise SpecError(f"seeds = {given_seeds!r} must be different integers >= 0; write [1, 2, 3]")
    study = Study(
        name=name,
        hypothesis=record.read_text("hypothesis", "").strip(),
        baseline=baseline,
        variants=variants,
        tasks=tasks,
        seeds=tuple(seeds),
        recipe=_read_recipe(merged.get("recipe", {}), "recipe"),
        model=_read_table(merged.get("model", {}), "model", MODEL_KEYS).values,
        match=record.read_text("match", "none"),
        tolerance=record.read_number("tolerance", 0.1),
        tuning_seed=record.read_int("tuning_seed", default=0),
        head_texts=record.read_int("head_texts", default=16),
        edits={key: ModelEdit.parse(key, one.values) for key, one in edits.items()},
        contrasts=parse_contrasts(
            merged.get("contrasts", []), _contrast_tables(table, merged), baseline
        ),
        scale=scale,
        folder=folder,
    )
    _check_study(study)
    return study


def _check_study(study: Study) -> None:
    """Raise SpecError for values that do not fit together, and for too many cells."""
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
        raise SpecError(f"match = {study.match!r} is unknown; {suggest(study.match, MATCHINGS)}")
    if study.tuning_seed in study.seeds:
        raise SpecError(
            f"tuning_seed = {study.tuning_seed} is one of the seeds, so that the learning rate "
            "would be chosen on what is reported; use another tuning_seed"
        )
    for name, edit in study.edits.items():
        if edit.of and edit.of not in study.variants:
            raise SpecError(
                f"edits.{name}.of = {edit.of!r} is not a variant; "
                f"{suggest(edit.of, study.variants)}"
            )
    for contrast in study.contrasts:
        for task in contrast.tasks:
            if task not in study.tasks:
                raise SpecError(
                    f"the contrast {contrast.name!r} is expected on {task!r}, which is not a task; "
                    f"{suggest(task, study.tasks)}"
                )
        for readout in (contrast.left, contrast.right):
            of = study.edits[readout.name].of if readout.place == "after" else ""
            if of not in ("", readout.variant):
                raise SpecError(
                    f"a contrast has {readout.text!r}, but edits.{readout.name}.of = {of!r}; name "
                    f"{of!r}, or leave `of` out"
                )
    if not 0 < study.tolerance < 1:
        raise SpecError(
            f"tolerance = {study.tolerance!r} must be between 0 and 1; use 0.1 for 10 %"
        )
    count = 0
    for task in study.tasks.values():
        for variant in study.variants.values():
            count += len(study.recipe_changes(variant, task)["lr"]) + len(study.seeds)
    if count > MAX_CELLS:
        raise SpecError(
            f"the study has {count:,} cells; give fewer variants, rates or seeds (at most "
            f"{MAX_CELLS:,})"
        )


def _parse_variant(record: Record) -> Variant:
    record.check_fields(VARIANT_KEYS)
    name = record.where.removeprefix("variants.")
    preset = record.read_text("preset", "")
    spec = record.read_text("spec", "")
    if preset and spec:
        raise SpecError(f"{record.where} has preset and spec; give one of them")
    if not preset and not spec and name in PRESETS:
        preset = name
    if preset and preset not in PRESETS:
        raise SpecError(
            f"{record.where}: there is no preset {preset!r}; {suggest(preset, PRESETS)}"
        )
    if not (preset or spec or set(record.values) & {"options", "model", "recipe"}):
        raise SpecError(
            f"there is no preset {name!r}; {suggest(name, PRESETS)}, or give {record.where} a spec"
        )
    options = record.read_record("options", {}).values
    return Variant(name, preset, spec, options, *_read_changes(record))


def _parse_task(name: str, record: Record) -> StudyTask:
    options = {key: one for key, one in record.values.items() if key not in TASK_KEYS}
    options |= record.read_record("options", {}).values
    kind = record.read_text("task", name)
    task = make_task(kind, **lists_to_tuples(options))
    tests: dict[str, Task] = {}
    for key, test in _chosen(record.values, "tests").items():
        tests[key] = make_task(kind, **lists_to_tuples({**options, **test.values}))
    metrics = [*task.chance, "loss"]
    metric = record.read_text("metric", metrics[0])
    if metric not in metrics:
        raise SpecError(f"{record.where} has no metric {metric!r}; {suggest(metric, metrics)}")
    threshold = record.read_optional_number("threshold")
    return StudyTask(name, task, metric, threshold, *_read_changes(record), tests)


def _read_changes(record: Record) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Read the changes of model and recipe in a table of a variant or a task."""
    model = _read_table(record.values.get("model", {}), f"{record.where}.model", MODEL_KEYS)
    return model.values, _read_recipe(record.values.get("recipe", {}), f"{record.where}.recipe")


def _read_recipe(value: object, where: str) -> Mapping[str, Any]:
    """Read fields of a recipe; `lr` is one learning rate or several."""
    recipe = dict(_read_table(value, where, RECIPE_KEYS).values)
    if "lr" in recipe:
        recipe["lr"] = _parse_rates(recipe["lr"], f"{where}.lr")
    return recipe


def _contrast_tables(table: Mapping[str, Any], merged: Mapping[str, Any]) -> Tables:
    """Return the names that contrasts may use, including names that the scale sets to false.

    Tests may belong to any task. Tests of a task that the scale leaves out are only in the unmerged
    table.
    """
    tests: dict[str, bool] = {}
    for task in table.get("tasks", {}).values():
        if isinstance(task, Mapping):
            tests |= dict.fromkeys(task.get("tests", {}), False)
    for task in _chosen(merged, "tasks").values():
        tests |= dict.fromkeys(_chosen(task.values, "tests"), True)
    return {"variants": merged["variants"], "edits": merged.get("edits", {}), "tests": tests}


def _parse_rates(value: Any, key: str) -> tuple[float, ...]:
    rates = tuple(value) if isinstance(value, list) else (value,)
    if not rates or not all(type(rate) in (int, float) and 0 < rate <= 1 for rate in rates):
        raise SpecError(
            f"{key} = {value!r} must be learning rates above 0 and at most 1; write [0.001, 0.003]"
        )
    return tuple(float(rate) for rate in rates)


def _read_table(value: object, where: str, names: Sequence[str] | set[str] = ()) -> Record:
    """Read a table of the file; raise SpecError for anything else, and for keys not in `names`."""
    record = Record(where, value, REMEDY)
    if names:
        record.check_fields(names)
    return record


def _chosen(values: Mapping[str, Any], key: str) -> dict[str, Record]:
    """Return the tables below a key, without those that a scale sets to false."""
    tables = _read_table(values.get(key, {}), key).values
    return {
        name: _read_table(table, f"{key}.{name}")
        for name, table in tables.items()
        if table is not False
    }
