"""Quality against the number of heads: order of removal, and the claims made from the curves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise import cli
from headwise.models import Transformer
from headwise.observe.head_analysis.annotated_examples import Example, examples_from_task
from headwise.surgery import HeadRanking
from headwise.surgery.head_selection import score_heads
from headwise.surgery.l0_gates import GateTrainingOptions, train_gates
from headwise.surgery.pruning_curves import (
    ALL_PARTS,
    THEMES,
    CurvePoint,
    PruningCurve,
    PruningCurves,
    SweepOptions,
    find_smallest_harmless,
    make_figures,
    make_tables,
    run_sweep,
)
from headwise.surgery.verification import quality_metrics
from headwise.surgery.verification.quality_metrics import (
    TextCounts,
    build_metric_row,
    compare_task_scores,
)
from headwise.training.data import make_task
from support.importance_examples import make_examples, translator
from support.number_examples import make_examples as told_scenes, small_gpt2
from support.refusals import refused_cases
from support.saved_models import save_byte_model
from support.tiny_configs import model_config

pytestmark = pytest.mark.usefixtures("unrendered_figures")

PLACES = (5, 7, 6, 4)


@pytest.fixture(scope="module")
def net() -> Transformer:
    return translator()


@pytest.fixture(scope="module")
def found(net: Transformer) -> PruningCurves:
    how = SweepOptions(orders=("random", "leave-one-out"), shares=(0.2, 0.5), seed=4, seeds=2)
    return run_sweep(net, make_examples(net)[:3], make_examples(net)[3:], how)


def silenced_loss(
    net: Transformer, texts: list[Example], keep: dict[str, tuple[int, ...]]
) -> float:
    """The loss of the next token in all texts together, of the model itself with the other heads
    silent.
    """
    head_counts = {
        site: len(spec.score_head_of_output) for site, spec in net.spec.attention_specs()
    }
    values = [
        (site, n)
        for site, heads in keep.items()
        for n in range(head_counts[site])
        if n not in heads
    ]
    total, count = 0.0, 0
    for text in texts:
        with torch.no_grad(), hw.ablate(net, values):
            logits = net(text.inputs["x"], source=text.inputs["source"])[0]
        expected = text.inputs["x"][0, 1:]
        total += float(F.cross_entropy(logits[:-1], expected, reduction="sum"))
        count += len(expected)
    return total / count


def test_every_point_is_the_model_with_those_heads_ablated(net: Transformer, found: PruningCurves):
    whole = silenced_loss(net, make_examples(net)[3:], {})
    for line in found.curves:
        for point in line.points:
            row = point.get_row("loss")
            assert row is not None
            assert row.change is not None
            expected = silenced_loss(net, make_examples(net)[3:], dict(point.keep))
            assert row.after.value == pytest.approx(expected, abs=1e-9)
            assert row.change.value == pytest.approx(expected - whole, abs=1e-9)


def test_a_part_loses_its_own_heads_by_importance(net: Transformer, found: PruningCurves):
    assert {part: found.count_part_heads(part) for part in found.parts} == {
        "all": 16,
        "encoder": 6,
        "decoder": 6,
        "cross": 4,
    }
    assert [p.num_heads for p in found.select_curves(ALL_PARTS, "leave-one-out")[0].points] == [
        16,
        8,
        3,
    ]
    for line in found.curves:
        by = HeadRanking(line.order, seed=4 + line.seed)
        of = score_heads(net, make_examples(net)[:3], by).scores
        for point in line.points:
            own = {(site, n) for site, heads in point.keep.items() for n in heads}
            every = sorted(
                ((site, n) for site, count in found.parts[line.part].items() for n in range(count)),
                key=lambda head: -of[head],
            )
            assert own == set(every[: point.num_heads])
            assert set(point.keep) == set(found.parts[line.part])


def test_chance_is_drawn_so_often_and_its_band_is_the_range(found: PruningCurves):
    own = found.select_curves(ALL_PARTS, "random")
    assert len(own) == 2
    assert own[0].points[-1].keep != own[1].points[-1].keep
    values = [
        point.loss_change.value for line in own for point in line.points if point.num_heads == 8
    ]
    mark = found.list_values(ALL_PARTS, "random", "loss")[8]
    assert mark == (pytest.approx(np.mean(values)), min(values), max(values))
    assert len(found.select_curves(ALL_PARTS, "leave-one-out")) == 1


def test_heads_that_must_stay_in_every_attention_stay(net: Transformer):
    chance = {"orders": ("random",), "seeds": 1}
    how = SweepOptions(**chance, shares=(0.3,), parts=(ALL_PARTS, "cross"), least=1)
    for line in run_sweep(net, make_examples(net)[:2], make_examples(net)[:2], how).curves:
        assert min(map(len, line.points[-1].keep.values())) >= 1
        assert line.points[-1].num_heads == {ALL_PARTS: 6, "cross": 2}[line.part]
    one = run_sweep(
        net,
        make_examples(net)[:2],
        make_examples(net)[:2],
        SweepOptions(**chance, shares=(0.01,), parts=("cross",)),
    )
    assert one.curves[0].points[-1].num_heads == 1


def test_gates_order_heads_by_the_chance_that_they_are_open(net: Transformer):
    gating = GateTrainingOptions(heads=0.5, steps=3, batch=2, freeze="model", seed=2)
    how = SweepOptions(orders=("gates",), shares=(0.25,), parts=(ALL_PARTS,), gate_options=gating)
    point = run_sweep(net, make_examples(net), make_examples(net)[:2], how).curves[0].points[-1]
    chances = train_gates(net, make_examples(net), gating).open_probabilities
    every = sorted(((site, n) for site, own in chances.items() for n in range(len(own))),
                   key=lambda head: -chances[head[0]][head[1]])  # fmt: skip
    assert {(site, n) for site, heads in point.keep.items() for n in heads} == set(every[:4])


def test_drift_is_measured_where_there_is_no_loss():
    net, texts = small_gpt2(layers=1), told_scenes(6)
    how = SweepOptions(objective="drift", orders=("random",), shares=(0.5,), seeds=1)
    curves = run_sweep(net, texts, texts, how)
    assert curves.metric_names[0] == "drift"
    assert curves.curves[0].points[0].loss_change.value == pytest.approx(0, abs=1e-6)
    assert curves.curves[0].points[1].loss_change.value > 0.001


# --- claims ---------------------------------------------------------------------------------------


def point(
    left: int,
    losses: list[float],
    share: float = 0.5,
    keep: dict[str, tuple[int, ...]] | None = None,
) -> CurvePoint:
    """A point with these losses of four texts and four more, beside a whole model that says
    everything.
    """
    counts = tuple(
        TextCounts({"loss": loss * n}, n) for loss, n in zip(losses * 2, PLACES * 2, strict=True)
    )
    row = build_metric_row(
        "loss", "loss", (counts, tuple(TextCounts({"loss": 0.0}, n) for n in PLACES * 2))
    )
    return CurvePoint(share, left, keep or {}, (row,))


def test_heads_can_go_until_an_interval_no_longer_stays_below():
    whole, fine, bad = (point(n, [loss] * 4) for n, loss in ((9, 0.0), (7, 0.05), (5, 0.3)))
    wide, again = point(6, [0.0, 0.0, 0.4, 0.0]), point(3, [0.0] * 4)
    assert (
        find_smallest_harmless(PruningCurve(ALL_PARTS, "ours", 0, (whole, fine, bad, again)), 0.1)
        is fine
    )
    assert wide.loss_change.value < 0.11 < wide.loss_change.high
    assert (
        find_smallest_harmless(PruningCurve(ALL_PARTS, "ours", 0, (whole, fine, wide, again)), 0.11)
        is fine
    )
    assert find_smallest_harmless(PruningCurve(ALL_PARTS, "ours", 0, (whole, bad)), 0.1) is whole
    assert (
        find_smallest_harmless(PruningCurve(ALL_PARTS, "ours", 0, (whole, fine, again)), 0.1)
        is again
    )


def make_curves(costs: dict[str, list[float]]) -> PruningCurves:
    """Curves of a translator with 3 x 12 heads, which lose so much at half of each part; heads go
    from the end.
    """
    parts = {"encoder": {"e": 12}, "decoder": {"d": 12}, "cross": {"c": 12}}
    lines = []
    for part, sites in ({ALL_PARTS: {"e": 12, "d": 12, "c": 12}} | parts).items():
        heads = sum(sites.values())
        whole = point(heads, [0.0] * 4, 1.0, {site: tuple(range(12)) for site in sites})
        half = (
            {"e": (), "d": tuple(range(6)), "c": tuple(range(12))}
            if part == ALL_PARTS
            else dict.fromkeys(sites, (0,) * 6)
        )
        lines.append(
            PruningCurve(
                part, "ours", 0, (whole, point(heads // 2, costs.get(part, [1.0] * 4), 0.5, half))
            )
        )
        lines += [
            PruningCurve(
                part, "random", n, (whole, point(heads // 2, [1.5 + n / 9] * 4, 0.5, half))
            )
            for n in range(2)
        ]
    every = {ALL_PARTS: {"e": 12, "d": 12, "c": 12}} | parts
    return PruningCurves("small", "translation", 4, sum(PLACES), every, tuple(lines), 0.1)


def table_rows(curves: PruningCurves, title: str) -> list[tuple[object, ...]]:
    """The rows of the table with this title; an estimate by its value, rounded."""
    (table,) = (one for one in make_tables(curves) if title in one.title)
    return [tuple(round(v[0], 3) if isinstance(v, tuple) else v for v in row) for row in table.rows]


def test_the_tables_hold_what_can_be_removed():
    curves = make_curves({"encoder": [0.01] * 4, "decoder": [0.4] * 4, "cross": [2.0] * 4})
    harmless = table_rows(curves, "Heads removed with an increase of translation loss below 0.1")
    assert ("encoder", 12, "ours", 6, 0.01) in harmless
    assert ("encoder", 12, "random 0", 0, 0.0) in harmless
    assert ("cross", 12, "ours", 0, 0.0) in harmless
    assert table_rows(curves, "Change of translation loss, encoder heads") == [(6, 0.01, 1.556)]


def test_generated_answers_of_the_original_model_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    dates = make_task("dates")
    before, after = (hw.build(dates.model(), seed=seed).eval() for seed in (0, 1))
    monkeypatch.setattr(quality_metrics, "DEFAULT_NUM_EXAMPLES", 3)
    judge = quality_metrics.ModelEvaluator(
        before, examples_from_task(before, dates, 2).examples_with_frequencies()
    )
    judge.prepare_generation(dates)
    expected = {
        row.name: row for row in compare_task_scores(before, after, dates, 3) if "/" not in row.name
    }
    assert repr({row.name: row for row in judge.score_generation(after)}) == repr(expected)
    assert all(repr(row.after) == repr(row.before) for row in judge.score_generation(before))


# --- figures and files ----------------------------------------------------------------------------


def test_figures_have_a_panel_for_each_part_and_a_line_for_each_order(found: PruningCurves):
    figures = make_figures(found)
    assert list(figures) == ["curves", "curves-accuracy"]
    panels = figures["curves"].panels
    assert [panel.title.split(":")[0] for panel in panels] == list(found.parts)
    for part, panel in zip(found.parts, panels, strict=True):
        for line in panel.series:
            values = found.list_values(part, line.name, "loss")
            assert list(
                zip(line.xs, zip(line.ys, line.lows, line.highs, strict=True), strict=True)
            ) == [(count, tuple(value)) for count, value in values.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sweep")
    config = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=300, n_positions=32)
    save_byte_model(config, base / "ours")
    (base / "texts").write_text("".join(f"text {n} of {n * n} words\n" for n in range(10)))
    return base


def test_one_command_sweeps_and_reports(folder, tmp_path, capsys):
    out = tmp_path / "out"
    argv = [
        "prune",
        str(folder / "ours"),
        "--sweep",
        "--data",
        str(folder / "texts"),
        "--out",
        str(out),
    ]
    code = cli.main(
        [*argv, "--by", "michel", "random", "--points", "0.5,0.2", "--random-orders", "2", "--json"]
    )
    result, err = capsys.readouterr()
    assert code == 0, err
    data = json.loads(result)
    assert data == json.loads((out / "curves.json").read_text())
    assert [[point["left"] for point in line["points"]] for line in data["lines"]] == [
        [6, 3, 1]
    ] * 3
    assert data["texts"] == 5
    assert data["tables"][0]["rows"]
    assert data["command"].startswith("headwise prune")
    names = {f"{name}-{theme}.svg" for name in ("curves", "curves-accuracy") for theme in THEMES}
    assert {path.name for path in out.iterdir()} == {"curves.json", "CURVES.md"} | names
    page = (out / "CURVES.md").read_text()
    assert all(f"]({name})" in page for name in names if "light" in name)


@pytest.mark.parametrize(("more", "wrong"), refused_cases(__file__, "sweeps", globals()))
def test_invalid_arguments_are_refused(more, wrong, folder, tmp_path, capsys):
    argv = [
        "prune",
        str(folder / "ours"),
        "--sweep",
        "--data",
        str(folder / "texts"),
        "--out",
        str(tmp_path / "o"),
    ]
    code = cli.main([*argv, "--by", "random", "--points", "0.5", "--random-orders", "1", *more])
    err = capsys.readouterr().err
    assert (code, wrong in err, err.count("\n")) == (2, True, 1), err
    assert not (tmp_path / "o").exists()
