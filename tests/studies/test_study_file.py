"""Study files: what they mean, how scales and overrides change them, and the message for each
mistake.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.studies import cells
from headwise.studies.cells import CellGrid, make_recipe, resize_model
from headwise.studies.study_file import Study, StudyTask, Variant, parse_study, read_study
from headwise.training.data import make_task
from headwise.training.data.synthetic_task import ModelShape
from headwise.training.data.task_registry import TASKS
from headwise.training.recipe import Recipe
from headwise.util.errors import SpecError
from support.refusals import refused_cases

STUDIES = Path(__file__).parents[2] / "studies"
RECALL = {"vocabulary": 32, "length": 32, "pairs": 4}
TABLE: dict[str, Any] = {
    "hypothesis": "fewer key-value heads recall as much",
    "baseline": "mha",
    "seeds": [1, 2],
    "recipe": {"steps": 8, "batch": 4, "lr": [0.001, 0.003]},
    "variants": {
        "mha": {},
        "few": {"preset": "gqa", "options": {"kv": 2}, "recipe": {"lr": 0.002}},
    },
    "tasks": {
        "recall": {**RECALL, "threshold": 0.5, "tests": {"longer": {"length": 64, "pairs": 8}}}
    },
    "scales": {"smoke": {"seeds": [1], "recipe": {"steps": 2}}},
}


def test_what_a_file_says(tmp_path: Path):
    study = parse_study(TABLE, "few", "small", {})
    assert study.seeds == (1, 2)
    mha, few = study.variants.values()
    assert study.recipe_changes(mha, study.tasks["recall"])["lr"] == (0.001, 0.003)
    assert study.recipe_changes(few, study.tasks["recall"])["lr"] == (0.002,)
    assert study.tasks["recall"].task == make_task("recall", **RECALL)
    assert study.tasks["recall"].tests["longer"] == make_task(
        "recall", vocabulary=32, length=64, pairs=8
    )
    smoke = parse_study(TABLE, "few", "smoke", {"recipe.batch": 2, "tasks.recall.pairs": 2})
    assert smoke.seeds == (1,)
    assert smoke.recipe == {"steps": 2, "batch": 2, "lr": (0.001, 0.003)}
    assert smoke.tasks["recall"].task == make_task("recall", vocabulary=32, length=32, pairs=2)
    (tmp_path / "few.toml").write_text("hypothesis = 'x'\n[variants.mha]\n[tasks.recall]\n")
    assert read_study(tmp_path / "few.toml").name == "few"


def test_cells_of_a_study():
    grid = CellGrid(parse_study(TABLE, "few", "small", {}))
    tuning = grid.tuning_cells()
    assert [(cell.variant, cell.rate, cell.seed) for cell in tuning] == [
        ("mha", 0.001, 0),
        ("mha", 0.003, 0),
    ]
    recipes = [cell.config["recipe"] for cell in tuning]
    assert [recipe["steps"] for recipe in recipes] == [4, 4]  # half of 8
    assert all((cell.config["tests"], cell.config["head_texts"]) == ({}, 0) for cell in tuning)
    report = grid.report_cells({("mha", "recall"): 0.003, ("few", "recall"): 0.002})
    assert [(cell.variant, cell.rate, cell.seed) for cell in report] == [
        *(("mha", 0.003, 1), ("mha", 0.003, 2), ("few", 0.002, 1), ("few", 0.002, 2)),
    ]
    assert len({cell.id for cell in [*tuning, *report]}) == 6
    again = CellGrid(parse_study(TABLE, "other name", "small", {}))
    assert again.report_cells({("mha", "recall"): 0.003})[0].id == report[0].id
    changed = CellGrid(parse_study(TABLE, "few", "small", {"recipe.steps": 9}))
    assert changed.report_cells({("mha", "recall"): 0.003})[0].id != report[0].id


@pytest.mark.parametrize("match", ["params", "flops", "kv"])
def test_matched_sizes_are_near_the_baseline(match: str):
    variants = {name: {} for name in ("mha", "gqa", "collaborative", "diff2")}
    if match == "kv":
        del variants[
            "collaborative"
        ]  # its keys cannot grow to the baseline's cache within the tolerance
    grid = CellGrid(parse_study({**TABLE, "match": match, "variants": variants}, "t", "small", {}))
    for variant in variants:
        own, like = (
            next(iter(grid.models[name, "recall"].spec.attention_specs()))[1]
            for name in (variant, "mha")
        )
        count = {
            "params": lambda spec: sum(one.numel() for one in hw.Attention(spec).parameters()),
            "flops": lambda spec: (
                hw.cost(spec, hw.Workload(context=32)).estimates[0].prefill_flops.total
            ),
            "kv": lambda spec: hw.cost(spec, hw.Workload(context=32)).estimates[0].cache_bytes,
        }[match]
        assert abs(count(own) / count(like) - 1) <= 0.1, variant


@pytest.mark.parametrize(("changes", "words"), refused_cases(__file__, "study files", globals()))
def test_mistakes_give_one_line(changes: Any, words: str):
    with pytest.raises(SpecError, match=words) as caught:
        parse_study({**TABLE, **changes}, "few", "small", {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variants", "words"), refused_cases(__file__, "models of studies", globals())
)
def test_models_that_cannot_be_made(variants: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words):
        CellGrid(
            parse_study({**TABLE, "variants": variants, "match": "params"}, "few", "small", {})
        )


@pytest.mark.parametrize(("changes", "words"), refused_cases(__file__, "cells", globals()))
def test_cells_that_cannot_begin(changes: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words) as caught:
        CellGrid(parse_study({**TABLE, **changes}, "few", "small", {}))
    assert "\n" not in str(caught.value)


def overridden_table() -> dict[str, Any]:
    """A study whose task and variant change the model and the recipe, and without `mqa`."""
    own = {"lr": 0.002, "steps": 20, "aux_losses": {"balance": 0.1}}
    table = copy.deepcopy(TABLE)
    table["variants"] |= {"few": {"preset": "gqa", "recipe": own}, "mqa": {}}
    table["tasks"]["recall"]["model"] = {"width": 64}
    table["scales"]["smoke"]["variants"] = {"mqa": False}
    return table


@pytest.mark.parametrize(("changes", "words"), refused_cases(__file__, "overrides", globals()))
def test_overrides_without_effect_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words) as caught:
        parse_study(overridden_table(), "few", "smoke", changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"recipe.steps": 20}, {"mha": 20, "few": 20}),
        ({"recipe": {"steps": 3}, "variants.few.recipe.steps": 4}, {"mha": 3, "few": 4}),
        ({"recipe.steps": 3, "tasks.recall.recipe.steps": 5, "variants.few": False}, {"mha": 5}),
        ({"variants": {"few": {"recipe": {"steps": 4}}}}, {"mha": 2, "few": 4}),
        ({"model.width": 64, "tasks.recall.pairs": 2}, {"mha": 2, "few": 20}),
    ],
)
def test_overrides_with_effect_are_accepted(changes: dict[str, Any], steps: dict[str, int]):
    study = parse_study(overridden_table(), "few", "smoke", changes)
    recipes = {
        variant.name: study.recipe_changes(variant, task) for variant, task in pairs_of(study)
    }
    assert {name: recipe["steps"] for name, recipe in recipes.items()} == steps


def test_learning_rates_of_a_task_and_a_variant_take_effect():
    changed = {
        "tasks.recall.recipe.lr": 0.01,
        "variants.mha.recipe.lr": [0.1, 0.2],
        "variants.few.recipe.lr": 0.002,
    }
    grid = CellGrid(parse_study(TABLE, "few", "small", changed))
    assert [(cell.variant, cell.rate) for cell in grid.tuning_cells()] == [
        ("mha", 0.1),
        ("mha", 0.2),
    ]
    del changed["variants.mha.recipe.lr"]
    of_task = parse_study(TABLE, "few", "small", changed)
    rates = {
        variant.name: CellGrid(of_task).rates(variant, task) for variant, task in pairs_of(of_task)
    }
    assert rates == {"mha": (0.01,), "few": (0.002,)}


def pairs_of(study: Study) -> list[tuple[Variant, StudyTask]]:
    return [(variant, task) for task in study.tasks.values() for variant in study.variants.values()]


def test_unknown_scale_and_unreadable_files(tmp_path: Path):
    with pytest.raises(SpecError, match="did you mean 'smoke'"):
        parse_study(TABLE, "few", "smok", {})
    for text in (b"\xff", b"hypothesis = "):
        (tmp_path / "bad.toml").write_bytes(text)
        with pytest.raises(SpecError, match="cannot be read as a study"):
            read_study(tmp_path / "bad.toml")
    with pytest.raises(SpecError, match="cannot be read as a study"):
        read_study(tmp_path / "missing.toml")


def test_a_scale_leaves_out_contrasts():
    table = {
        **TABLE,
        "contrasts": [["few on longer", "mha on longer"], ["entropy of few", "entropy of mha"]],
    }
    table["variants"] = {**TABLE["variants"], "mqa": {}}
    names = [one.name for one in parse_study(table, "few", "small", {}).contrasts]
    assert names == ["few on longer minus mha on longer", "entropy of few minus entropy of mha"]
    table["scales"] = {
        "page": {"tasks": {"recall": {"tests": {"longer": False}}}},
        "two": {"variants": {"few": False}},
    }
    assert [one.name for one in parse_study(table, "few", "page", {}).contrasts] == names[1:]
    assert parse_study(table, "few", "two", {}).contrasts == ()
    table["tasks"] = {**TABLE["tasks"], "copy": {}}
    table["scales"] = {"copy": {"tasks": {"recall": False}}}
    assert [one.name for one in parse_study(table, "few", "copy", {}).contrasts] == names[1:]


@pytest.mark.parametrize(
    ("recipe", "step", "words"), refused_cases(__file__, "contrasts at steps", globals(), 2)
)
def test_contrasts_at_steps_need_a_checkpoint(recipe: dict[str, int], step: int, words: str):
    contrast = [f"entropy of few at step {step}", "entropy of few"]
    table = {**TABLE, "contrasts": [contrast], "recipe": {"steps": 200, "lr": 0.001, **recipe}}
    study = parse_study(table, "few", "small", {})
    if words:
        with pytest.raises(SpecError, match=words):
            CellGrid(study)
    else:
        assert CellGrid(study).study.contrasts[0].left.name == str(step)


@pytest.mark.parametrize("scales", ["small", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_cell_of_every_study_can_begin_at_every_scale(path, scales, monkeypatch):
    """Models that only take more steps at another scale begin once."""
    for file in re.findall(r'"(\.\./shared/data/\S+)"', path.read_text()):
        if not Path(file).exists():
            pytest.skip(f"{file} is absent")
    begun: set[object] = set()
    check_training = cells.check_training

    def check_once(
        study: Study,
        variant: Variant,
        task: StudyTask,
        spec: hw.model_spec.ModelSpec,
        recipe: Recipe,
    ) -> None:
        edits = tuple((name, str(edit)) for name, edit in study.edits.items())
        tests = tuple((name, str(test)) for name, test in task.tests.items())
        begins = replace(
            recipe,
            steps=1,
            **dict.fromkeys(("evaluate_every", "checkpoint_every", "keep", "batch"), 1),
        )
        key = str(task.task), spec, begins, edits, tests
        if key not in begun:
            check_training(study, variant, task, spec, recipe)
        begun.add(key)

    monkeypatch.setattr(cells, "check_training", check_once)
    others = tomllib.loads(path.read_text())["scales"] if scales == "all" else ()
    for scale in dict.fromkeys(("small", *others)):
        grid = CellGrid(read_study(path, scale))
        assert len(grid.models) == len(grid.study.variants) * len(grid.study.tasks)
        assert len({cell.id for cell in grid.tuning_cells()}) == len(grid.tuning_cells())
    assert begun


def test_a_variant_from_a_file_and_a_resized_model(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(
        hw.to_toml(hw.design(model=32, heads=2, pattern="window(5)"))
    )
    table = {
        **TABLE,
        "model": {"width": 32, "layers": 3, "feed": 48},
        "variants": {
            "mha": {"model": {"heads": 8}},
            "mine": {"spec": "mine.toml", "options": {"kv": 1}},
        },
    }
    grid = CellGrid(parse_study(table, "t", "small", {}, tmp_path))
    specs = [spec for _, spec in grid.models["mine", "recall"].spec.attention_specs()]
    assert len(specs) == 3
    assert specs[0].heads == hw.design(model=32, heads=2, kv=1).heads
    assert "window(5)" in specs[0].pattern.text
    assert next(iter(grid.models["mha", "recall"].spec.attention_specs()))[1].heads.q == 8


# --- Values of other types ------------------------------------------------------------------------

WRONG = [
    "x",
    "",
    {"a": 1},
    {},
    [],
    [0],
    ["x"],
    [[0]],
    [["x", 1]],
    [{"a": 1}],
    *(1.5, -1, True, 10**30, math.nan),
]


def paths_of(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside tables and lists."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield (key,)
        yield from ((key, *path) for path in paths_of(item))


def change_at(table: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(table)
    place = functools.reduce(lambda outer, key: outer[key], path[:-1], changed)
    place[path[-1]] = value
    return changed


def list_wrong_studies() -> Iterator[dict[str, Any]]:
    """Studies with a wrong value in each place of a table, a recipe, a model and a task."""
    table = {
        **TABLE,
        "edits": {"half": {"change": "prune", "share": 0.5}},
        "scales": {"smoke": {"seeds": [2]}},
    }
    paths = list(paths_of(table)) + [("recipe", field.name) for field in fields(Recipe)]
    paths += [("model", field.name) for field in fields(ModelShape)]
    table |= {name: table.get(name, {}) for name in ("recipe", "model")}
    for path, value in itertools.product(paths, WRONG):
        yield change_at(table, path, value)
    for name, task in TASKS.items():
        for field, value in itertools.product(fields(task), WRONG):
            yield table | {"tasks": {name: {"path": __file__, field.name: value}}}
            yield table | {"tasks": {name: {field.name: value}}}


def test_values_of_other_types_are_refused():
    """Every exception but those that commands print in one line fails this test."""
    num_refused = 0
    for table in list_wrong_studies():
        try:
            study = parse_study(table, "few", "small", {})
            for variant, task in itertools.product(study.variants.values(), study.tasks.values()):
                make_recipe(study, variant, task)
                resize_model(task.task, study.model)
        except (ValueError, OSError):
            num_refused += 1
    assert num_refused > 2000
