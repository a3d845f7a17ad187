"""Quality against the number of heads: order of removal, and the claims made from the curves."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
import torch.nn.functional as F

import headwise as hw
from headwise import cli
from headwise.data import make_task
from headwise.data.vocabulary import ByteVocabulary
from headwise.head_analysis.annotated_examples import Example, examples_from_task
from headwise.head_analysis.head_classes import classify_heads
from headwise.head_analysis.head_figures import FIGURE_THEMES, class_group, get_theme
from headwise.head_analysis.head_measurement import measure_heads
from headwise.models import Transformer
from headwise.surgery import HeadRanking, pruning_curves
from headwise.surgery.curve_figures import list_figures, plot_by_order, plot_columns, spread_labels
from headwise.surgery.curve_report import (
    assess_group_survival,
    compare_losses,
    find_smallest_harmless,
    list_findings,
    render_report,
)
from headwise.surgery.head_selection import score_heads
from headwise.surgery.l0_gates import GateTrainingOptions, train_gates
from headwise.surgery.pruning_curves import (
    ALL_PARTS,
    CurvePoint,
    OrderingOptions,
    PruningCurve,
    PruningCurves,
    SweepOptions,
    run_sweep,
)
from headwise.surgery.verification.quality_metrics import (
    IntervalEstimate,
    MetricRow,
    TextCounts,
    build_metric_row,
    compare_task_scores,
)
from support.importance_examples import make_examples, translator
from support.number_examples import make_examples as told_scenes, small_gpt2

PLACES = (5, 7, 6, 4)


@pytest.fixture(scope="module")
def net() -> Transformer:
    return translator()


@pytest.fixture(scope="module")
def found(net: Transformer) -> PruningCurves:
    how = SweepOptions(OrderingOptions(seed=4), ("random", "leave-one-out"), (0.2, 0.5), seeds=2)
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
    mark = next(
        mark for mark in found.list_values(ALL_PARTS, "random", "loss") if mark.num_heads == 8
    )
    assert (mark.value, mark.low, mark.high) == (
        pytest.approx(np.mean(values)),
        min(values),
        max(values),
    )
    assert len(found.select_curves(ALL_PARTS, "leave-one-out")) == 1


def test_heads_that_must_stay_in_every_attention_stay(net: Transformer):
    how = SweepOptions(
        OrderingOptions(), ("random",), (0.3,), (ALL_PARTS, "cross"), seeds=1, least=1
    )
    for line in run_sweep(net, make_examples(net)[:2], make_examples(net)[:2], how).curves:
        assert min(map(len, line.points[-1].keep.values())) >= 1
        assert line.points[-1].num_heads == {ALL_PARTS: 6, "cross": 2}[line.part]
    one = run_sweep(
        net,
        make_examples(net)[:2],
        make_examples(net)[:2],
        SweepOptions(OrderingOptions(), ("random",), (0.01,), ("cross",), seeds=1),
    )
    assert one.curves[0].points[-1].num_heads == 1


def test_gates_order_heads_by_the_chance_that_they_are_open(net: Transformer):
    gating = GateTrainingOptions(heads=0.5, steps=3, batch=2, freeze="model", seed=2)
    how = SweepOptions(OrderingOptions(gate_options=gating), ("gates",), (0.25,), (ALL_PARTS,))
    point = run_sweep(net, make_examples(net), make_examples(net)[:2], how).curves[0].points[-1]
    chances = train_gates(net, make_examples(net), gating).open_probabilities
    every = sorted(((site, n) for site, own in chances.items() for n in range(len(own))),
                   key=lambda head: -chances[head[0]][head[1]])  # fmt: skip
    assert {(site, n) for site, heads in point.keep.items() for n in heads} == set(every[:4])


def test_classes_are_the_first_of_every_head_and_drift_is_measured_where_there_is_no_loss():
    net, texts = small_gpt2(layers=1), told_scenes(6)
    how = SweepOptions(OrderingOptions("drift"), ("random",), (0.5,), seeds=1)
    curves = run_sweep(net, texts, texts, how)
    table = classify_heads(measure_heads(net, texts))
    assert curves.classes == {
        (one.site, one.head): class_group(one.classes[0].name) for one in table.heads
    }
    assert curves.metric_names[0] == "drift"
    assert curves.curves[0].points[0].loss_change.value == pytest.approx(0, abs=1e-6)
    assert curves.curves[0].points[1].loss_change.value > 0.001
    assert any("need parsed texts" in note for note in curves.notes)


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
    return CurvePoint(share, left, keep or {}, (row,), counts)


def test_a_difference_between_points_is_drawn_by_texts_and_corrected():
    one, other = point(3, [1.0, 2.0, 0.5, 1.5]), point(3, [0.5, 1.0, 1.0, 1.0])
    differs = np.array([0.5, 1.0, -0.5, 0.5]) * PLACES
    losses = compare_losses([one], [other])
    assert losses.value == pytest.approx(differs.sum() / sum(PLACES))
    without = [
        (2 * differs.sum() - gap) / (2 * sum(PLACES) - n)
        for gap, n in zip(differs, PLACES, strict=True)
    ] * 2
    for tests in (1, 5):
        reach = scipy.stats.t.ppf(1 - 0.025 / tests, 7) * np.std(without) * math.sqrt(7)
        ends = losses.value - reach, losses.value + reach
        np.testing.assert_allclose(compare_losses([one], [other], tests)[1:], ends)
    assert compare_losses([one, one], [other, one]).value == pytest.approx(losses.value / 2)
    assert compare_losses([one], [point(1, [0.5, 1.5, 0.0, 1.0])]) == IntervalEstimate(
        *[pytest.approx(0.5)] * 3
    )


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


def test_comparison_with_chance_by_exhaustive_permutation():
    groups = {("a", n): "seldom" if n < 3 else "often" for n in range(9)}
    keep = [[("a", n) for n in heads] for heads in ((0, 1, 2, 3), (4, 5, 6, 7, 8), (0, 1, 2))]
    found = {
        (one.group, one.num_heads, one.num_in_group): one
        for one in assess_group_survival(groups, keep)
    }
    raw = {}
    for heads in keep:
        for group in ("seldom", "often"):
            own = sum(groups[head] == group for head in heads)
            draws = [
                sum(groups[head] == group for head in value)
                for value in combinations(groups, len(heads))
            ]
            tails = np.mean([n >= own for n in draws]), np.mean([n <= own for n in draws])
            raw[group, len(heads), own] = min(1.0, 2 * min(tails))
    order, level = sorted(raw, key=lambda key: raw[key]), 0.0
    for place, key in enumerate(order):
        level = max(level, min(1.0, raw[key] * (len(raw) - place)))
        assert found[key].p_value == pytest.approx(level)
        assert found[key].expected_in_group == pytest.approx(
            key[1] * (3 if key[0] == "seldom" else 6) / 9
        )
    many = {("a", n): "x" if n < 10 else "y" for n in range(40)}
    more, fewer = assess_group_survival(many, [[("a", n) for n in range(10)]])
    assert (more.verdict, fewer.verdict) == ("more", "fewer")


def make_curves(
    costs: dict[str, list[float]], classes: dict[tuple[str, int], str] | None = None
) -> PruningCurves:
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
    return PruningCurves(
        "small", "translation", 4, sum(PLACES), every, tuple(lines), classes or {}, 0.1
    )


def test_the_report_separates_supported_and_unsupported_claims():
    sure = make_curves({"encoder": [0.01] * 4, "decoder": [0.4] * 4, "cross": [2.0] * 4})
    text = "\n".join(list_findings(sure))
    assert (
        "Claim that encoder heads can be removed first and cross-attention heads last: supported."
        in text
    )
    start = (
        "heads alone: heads removed with an increase of translation loss below 0.1 (95% "
        "confidence), "
        "of the counts tested"
    )
    assert f"The 12 encoder {start}: 6 by ours (no spread), 0 by random (2 draws)." in text
    assert f"The 12 cross-attention {start}: none by ours, 0 by random" in text
    assert (
        "ours against random, a mean of 2 draws: over all counts translation loss is lower, -0.556"
        in text
    )
    assert (
        "Heads kept by ours, part by part: encoder fewer than by chance with 18 heads kept (most "
        "significant: 0 of 18"
    ) in text
    assert (
        "no significant difference from chance for decoder; no heads left of encoder with 18 "
        "heads kept."
    ) in text
    vague = make_curves({"encoder": [0.3] * 4, "decoder": [0.1, 0.9, 0.1, 0.6], "cross": [2.0] * 4})
    assert (
        "cross-attention heads last: order observed, but not significant (an interval contains 0)."
        in "\n".join(list_findings(vague))
    )
    other = make_curves({"encoder": [0.9] * 4, "decoder": [0.2] * 4, "cross": [2.0] * 4})
    assert (
        "cross-attention heads last: not supported; cheapest first: decoder, encoder, cross."
        in "\n".join(list_findings(other))
    )


def test_generated_answers_are_reported_with_their_scores():
    curves = make_curves({})
    falls = {
        6: IntervalEstimate(-0.2, -0.5, 0.1),
        18: IntervalEstimate(-0.4, -0.6, -0.2),
        12: IntervalEstimate(0, 0, 0),
        36: IntervalEstimate(0, 0, 0),
    }
    lines = [
        line._replace(
            points=tuple(
                p._replace(rows=(*p.rows, MetricRow("BLEU", "higher", falls[p.num_heads])))
                for p in line.points
            )
        )
        if line.order == "ours" and line.part in (ALL_PARTS, "cross")
        else line
        for line in curves.curves
    ]
    values = [
        finding
        for finding in list_findings(replace(curves, curves=tuple(lines)))
        if "BLEU" in finding
    ]
    assert values == [
        "All 36 heads, by ours: BLEU of generated answers is lower with 18 heads kept.",
        "The 12 cross-attention heads alone, by ours: BLEU of generated answers is not "
        "significantly different "
        "with 6 heads kept.",
    ]


def test_generated_answers_of_the_original_model_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    dates = make_task("dates")
    before, after = (hw.build(dates.model(), seed=seed).eval() for seed in (0, 1))
    monkeypatch.setattr(pruning_curves, "DEFAULT_NUM_EXAMPLES", 3)
    judge = pruning_curves.ModelEvaluator.of(
        before, examples_from_task(before, dates, 2).examples_with_frequencies()
    ).with_generation(dates)
    expected = {
        row.name: row for row in compare_task_scores(before, after, dates, 3) if "/" not in row.name
    }
    assert repr({row.name: row for row in judge.score_generation(after)}) == repr(expected)
    assert all(repr(row.after) == repr(row.before) for row in judge.score_generation(before))


# --- figures and files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [[0.5, 0.5, 0.5, 0.5], [0.0, 0.01, 1.0], [0.99, 1.0, 0.2, 0.21], [0.4]]
)
def test_labels_stand_apart_in_their_order_and_inside(values: list[float]):
    places = spread_labels(values, 0.0, 1.0)
    order = sorted(range(len(values)), key=lambda n: values[n])
    assert all(places[b] - places[a] >= 0.075 - 1e-9 for a, b in pairwise(order))
    assert min(places) >= -1e-9
    assert max(places) <= 1 + 1e-9


def test_no_label_at_the_end_of_a_line_lies_upon_another():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    curves = make_curves({"encoder": [1.5] * 4, "decoder": [1.55] * 4})
    figure = plot_by_order(curves, "loss", get_theme("light"))
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        boxes = [
            Text.get_window_extent(text) for text in axes.texts if text.get_text() in curves.orders
        ]
        assert len(boxes) == 2
        assert not boxes[0].overlaps(boxes[1])
        assert all(box.x1 <= figure.bbox.x1 and box.x0 > axes.bbox.x1 for box in boxes)


def test_columns_hold_every_head_and_mark_where_a_group_is_gone():
    kinds = {("e", n): "positional" for n in range(12)} | {("d", n): "broad" for n in range(12)}
    curves = make_curves({}, kinds | {("c", n): "unclear" for n in range(12)})
    inks = {"positional": ("P", "#56B4E9"), "broad": ("B", "#F0E442"), "unclear": ("U", "#F2F2F2")}
    (axes,) = plot_columns(curves, "ours", curves.classes, inks, get_theme("light")).axes
    heights = Counter[int]()
    for bar in axes.patches:
        heights[round(bar.get_x() + bar.get_width() / 2)] += round(bar.get_height())
    assert heights == {0: 36, 1: 18}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["36", "18"]
    values = [text for text in axes.texts if "×" in text.get_text()]
    assert [(text.get_text(), round(text.get_position()[0])) for text in values] == [("× P", 1)]
    assert "U 12 ▲" in [text.get_text() for text in axes.texts]


def test_figures_and_the_page(found: PruningCurves):
    names = [name for name, _ in list_figures(found)]
    assert names == ["curves", "curves-accuracy", "parts", "parts-left"]
    report = render_report(found, names)
    assert max(len(row) for row in report.splitlines() if not row.startswith("![")) <= 80
    mark = found.list_values("cross", "leave-one-out", "loss")[-1]
    rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in report.splitlines()]
    assert [str(mark.num_heads), f"{mark.value:+.3f} ({mark.low:+.3f}, {mark.high:+.3f})"] in rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sweep")
    config = {
        "model_type": "gpt2",
        "n_embd": 12,
        "n_head": 3,
        "n_layer": 2,
        "vocab_size": 300,
        "n_positions": 32,
    }
    net = hw.build(hw.families.read_model_spec(config), seed=0)
    net.usage = hw.ProcessorSpec(tokenizer=ByteVocabulary().document)
    hw.save(net, base / "ours")
    (base / "texts").write_text("".join(f"text {n} of {n * n} words\n" for n in range(10)))
    return base


def test_one_command_sweeps_and_reports(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
    assert data["answers"]
    assert data["command"].startswith("headwise prune")
    names = {"curves", "curves-accuracy", "classes-left"}
    values = {
        f"{name}-{paper}{suffix}"
        for name in names
        for paper in FIGURE_THEMES
        for suffix in (".svg", ".png")
    }
    assert {path.name for path in out.iterdir()} == {"curves.json", "CURVES.md"} | values
    assert all(f"![{name}]({name}-light.svg)" in (out / "CURVES.md").read_text() for name in names)


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        (["--parts", "cross"], "gpt2 has no part 'cross'; use one of all"),
        (["--by", "michell"], "did you mean 'michel'?"),
        (
            ["--by", "gates"],
            "--by gates needs the steps that gates are trained for; add --gates STEPS",
        ),
        (["--points", "half"], "--points half are not shares"),
        (["--points", "0.5,1.5"], "--points 1.5"),
        (["--random-orders", "0"], "--random-orders 0 is too small; give 1 or more"),
        (["--max-loss-rise", "-1"], "--max-loss-rise"),
        (["--answers", "random"], "cannot score generated answers of gpt2. Give a task"),
        (["--limit", "1"], "--limit 1 is too few for a confidence interval"),
    ],
)
def test_invalid_arguments_are_refused(
    more: list[str], wrong: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
