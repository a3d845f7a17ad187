"""The page about induction during training: its measures and tests on a model that trains in seconds."""

from __future__ import annotations

import doctest
import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.head_analysis.head_measurement import MeasureOptions, measure_heads

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("measures", "curves", "page")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the script."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    own: dict[str, ModuleType] = {name: importlib.import_module(f"induction_{name}") for name in NAMES}
    return SimpleNamespace(**own, script=importlib.import_module("induction_study"))


@pytest.fixture
def tiny(parts: Any, tmp_path: Path) -> Any:
    """The same in the smallest size, on a text of its own."""
    text = tmp_path / "text.txt"
    draw = np.random.default_rng(0)
    words = ["def", "return", "self", "value", "(x)", ":\n", "other"]
    text.write_text(" ".join(words[n] for n in draw.integers(0, len(words), 3000)))
    usual = parts.measures.Setting()
    recipe = replace(usual.recipe, steps=4, batch=4, evaluate_every=2, checkpoint_every=2)
    return replace(usual, path=str(text), vocab=270, length=16, width=12, heads=3, recipe=recipe, kept=(0, 2, 4),
                   texts=5, rows=7, seeds=(0,))  # fmt: skip


def test_examples_are_true(parts: Any):
    for module in vars(parts).values():
        assert doctest.testmod(module).failed == 0


def test_the_second_half_of_repeated_rows_is_in_the_first(parts: Any):
    rows = torch.cat([one.inputs["x"] for one in parts.measures.repeated_scenes(31, 14, 6, 1)])
    assert torch.equal(rows[:, :7], rows[:, 7:])
    assert all(len(set(row)) == 7 for row in rows[:, :7].tolist())
    other = torch.cat([one.inputs["x"] for one in parts.measures.repeated_scenes(31, 14, 6, 2)])
    assert not torch.equal(rows, other)


def net_of(tiny: Any) -> Any:
    return hw.build(tiny.model(tiny.task(0)), seed=3).eval()


def test_text_by_text_is_the_measure_of_each_text(parts: Any, tiny: Any):
    net, examples = net_of(tiny), parts.measures.repeated_scenes(270, 16, 4, 0)
    by_text = parts.measures.ByText(parts.measures.TESTED)
    table = measure_heads(net, examples, options=MeasureOptions(parts.measures.TESTED), collectors=[by_text])
    for name in parts.measures.TESTED:
        values = [one.measures[name].value for one in table.heads]
        np.testing.assert_allclose(by_text.values(name).mean(0), values, rtol=1e-6)  # all texts have as many rows
        alone = measure_heads(net, [examples[2]], options=MeasureOptions((name,), min_texts=1))
        np.testing.assert_allclose(
            by_text.values(name)[2], [one.measures[name].value for one in alone.heads], rtol=1e-6
        )


def test_induction_of_repeated_rows_by_hand(parts: Any, tiny: Any):
    """A row of the second half may read one token behind its like; a head that reads all alike has 1 of t."""
    net, examples = net_of(tiny), parts.measures.repeated_scenes(270, 16, 3, 0)
    table = measure_heads(net, examples, options=MeasureOptions(("induction",)))
    by_hand = sum(1 / (at + 1) for at in range(8, 16)) / 8  # at 8..15, of the keys 0..at: no head has a sink
    assert math.isclose(table.heads[0].measures["induction"].chance, by_hand, rel_tol=1e-6)


def test_losses_are_of_the_next_token(parts: Any, tiny: Any):
    net, examples = net_of(tiny), parts.measures.repeated_scenes(270, 16, 2, 0)
    ids = examples[1].inputs["x"]
    logits = net(ids)[0].detach().double()
    by_hand = [float(logits[at].logsumexp(0) - logits[at, ids[0, at + 1]]) for at in range(15)]
    np.testing.assert_allclose(parts.measures.losses(net, parts.measures.ids_of(examples))[1], by_hand, rtol=1e-5)


def test_composition_by_whole_matrices(parts: Any, tiny: Any):
    """|W_QK W_OV^T| / |W_QK| |W_OV| of weights taken from the state by hand."""
    net = net_of(tiny)
    found, state = parts.measures.composition(net), {name: one.double() for name, one in net.state_dict().items()}
    assert np.isnan(found[3:]).all()
    assert np.isnan(found[:3, :3]).all()
    q, k = (state[f"decoder.1.attention.project.{side}"].view(3, 4, 12) for side in "qk")
    v = state["decoder.0.attention.project.v"].view(3, 4, 12)
    o = state["decoder.0.attention.output.o"]
    for first in range(3):
        own = o[:, 4 * first : 4 * first + 4] @ v[first]  # what is written, of what is read
        for second in range(3):
            scores = q[second].T @ k[second]
            result = (
                torch.linalg.matrix_norm(scores @ own)
                / torch.linalg.matrix_norm(scores)
                / torch.linalg.matrix_norm(own)
            )
            assert math.isclose(found[first, 3 + second], float(result), rel_tol=1e-5)


def test_training_measuring_and_reporting(parts: Any, tiny: Any, tmp_path: Path):
    recorded: list[str] = []
    found = parts.script.found(tiny, tmp_path / "runs", recorded.append)
    assert recorded == ["seed 0, step 0", "seed 0, step 2", "seed 0, step 4"]
    story = found.stories[0]
    assert [one.losses["source"].shape for one in story.steps] == [(7, 15)] * 3
    assert story.steps[0].losses["source"].mean() > story.steps[-1].losses["source"].mean()
    text = parts.page.page(found)
    first_cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert first_cells[0] == "column"  # the table that explains the columns comes first
    assert first_cells[first_cells.index("step") :] == ["step", "---", "0", "2", "4", "baseline"]
    assert "Induction does not appear within 4 steps" in text
    assert max(map(len, (line for line in text.splitlines() if not line.startswith("|")))) <= 120


def make_findings(parts: Any, shift: float) -> Any:
    """A story made up: noise, and a head whose induction rises by `shift` at the second of three steps."""
    draw = np.random.default_rng(0)
    Seen = parts.measures.Seen

    def one(rise: float) -> Any:
        scores = {(data, name): draw.normal(0, 0.01, (40, 6)) for data in ("source", "repeated")
                  for name in parts.measures.TESTED}  # fmt: skip
        scores["repeated", "induction"][:, 4] += rise
        return Seen({}, scores, {name: draw.normal(0, 0.1, (40, 15)) for name in ("source", "repeated")}, np.empty(0))

    heads = {"previous": 1, "induction": 4}
    story = parts.measures.Story(0, (one(0), one(shift), one(shift)), heads, ((), ()), ({}, {}))
    return parts.measures.Found(parts.measures.Setting(kept=(0, 10, 20), seeds=(0,)), None, 0, (story,), one(0))


def test_tests_find_what_is_there_and_nothing_else(parts: Any):
    found = parts.curves.tests(make_findings(parts, 0.3))
    rise = {("head", 0, 10, "repeated", "induction", 4), ("head", 0, 20, "repeated", "induction", 4)}
    assert {key for key, one in found.items() if one.is_above_chance} == rise | {("change", 0, 10, "induction")}
    assert len(found) == 2 * 2 * 2 * 6 + 2 * 4
    assert 0 < found["head", 0, 10, "repeated", "induction", 4].p < 1e-20  # 0.3 is 134 standard errors of a difference
    nothing = parts.curves.tests(make_findings(parts, 0.0))
    assert not any(one.is_above_chance for one in nothing.values())


def test_halfway_has_an_interval_around_it(parts: Any):
    draw = np.random.default_rng(1)
    curve = np.array([0.0, 0.0, 0.2, 1.0, 1.0])[:, None] + draw.normal(0, 0.1, (5, 50))
    middle, low, high = parts.curves.when((0, 100, 200, 300, 400), curve)
    assert low < middle < high
    assert 200 < low < 237.5 < high < 275  # 0.5 is 3 / 8 of the way from 0.2 to 1


def test_a_head_is_compared_with_the_strongest_head_of_the_baseline(parts: Any):
    built = make_findings(parts, 0.3)
    built.twin.scores["repeated", "induction"][:, 2] += 0.5
    found = parts.curves.tests(built)
    assert found["head", 0, 20, "repeated", "induction", 4].mean == pytest.approx(-0.2, abs=0.01)
    assert found["head", 0, 20, "repeated", "induction", 1].mean == pytest.approx(-0.5, abs=0.01)
    assert not any(one.is_above_chance for key, one in found.items() if key[0] == "head")
