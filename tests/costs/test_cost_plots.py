"""Cost plots and CSV tables, and the comparison options of `headwise cost`."""

from __future__ import annotations

import csv
import io
import json
import os
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

import headwise as hw
from headwise import cli
from headwise.costs import cost_plots
from headwise.costs.cost_plots import (
    ChartLine,
    LineChart,
    RooflineChart,
    RooflinePoint,
    make_charts,
    shorten_label,
    spread_labels,
    to_csv,
)
from headwise.costs.cost_report import estimate_cost

LOAD = hw.Workload(batch=2, context=300)
NAMES = ("gqa", "mla", "linear")
PRICES = {name: estimate_cost(hw.design(preset=name), LOAD, name) for name in NAMES}


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *argv])
    out, err = capsys.readouterr()
    return code, out, err


# --- what is drawn --------------------------------------------------------------------------------


def test_lines_are_the_prices_at_every_length():
    _, values, flops_charts, shares = make_charts(PRICES)
    for chart in (values, flops_charts, shares):
        assert [line.name for line in chart.lines] == list(NAMES)
        assert {300, 64, 96, 2**17} <= set(chart.lines[0].xs)
    for n, name in enumerate(NAMES):
        at = values.lines[n].xs.index(300)
        assert values.lines[n].ys[at] == PRICES[name].cache_bytes
        assert flops_charts.lines[n].ys[at] == PRICES[name].prefill_flops.total / 600
        assert shares.lines[n].ys[at] == PRICES[name].seconds("decode") / PRICES["gqa"].seconds(
            "decode"
        )
    assert shares.lines[0].label == "gqa"


def test_points_stand_where_calls_do():
    roof = make_charts(PRICES, "roofline")[0]
    assert (roof.peak_flops, roof.bandwidth) == (989e12, 4.8e12)
    assert roof.ridge_point == pytest.approx(206, rel=1e-3)
    step = PRICES["mla"].operations["decode"]
    flops, moved, seconds = (
        sum(getattr(one, what) for one in step) for what in ("flops", "moved", "seconds")
    )
    assert RooflinePoint("mla", "decode", flops / moved, flops / seconds) in roof.points
    assert all(
        one.y <= min(roof.peak_flops, one.x * roof.bandwidth) * 1.0001 for one in roof.points
    )


def test_bidirectional_layers_are_named_beside_the_lines_and_not_drawn_alone():
    prices = PRICES | {"mha": estimate_cost(hw.design(preset="mha"), LOAD, "mha")}
    chart = make_charts(prices, "kv")[0]
    assert (len(chart.lines), chart.missing_names) == (3, ("mha",))
    with pytest.raises(
        hw.SpecError, match="cannot draw a KV cache: none of mha is causal; give them pattern"
    ):
        make_charts({"mha": prices["mha"]}, "kv")
    with pytest.raises(hw.SpecError, match="cannot find crossovers of gqa: it takes two specs"):
        make_charts({"gqa": PRICES["gqa"]}, "crossovers")
    assert len(make_charts({"gqa": PRICES["gqa"]})) == 3


def test_a_line_ends_where_positions_do():
    model = hw.families.read_model_spec({"model_type": "gpt2", "n_layer": 2})
    chart = make_charts({"gpt2": estimate_cost(model, LOAD, "gpt2")}, "flops")[0]
    assert chart.lines[0].xs[-1] == 1024


# --- names beside what they name ------------------------------------------------------------------

PLACES = st.lists(st.floats(0, 1), min_size=1, max_size=20)


@given(PLACES, st.floats(0.001, 0.3))
def test_names_keep_their_distance_and_their_order(expected, gap):
    found = spread_labels(expected, gap)
    gap = min(gap, 1 / max(len(expected) - 1, 1))
    ordered = sorted(found)
    assert all(b - a >= gap - 1e-6 for a, b in pairwise(ordered))
    assert -1e-6 <= ordered[0] <= ordered[-1] <= 1 + 1e-6
    assert [found[n] for n in sorted(range(len(expected)), key=lambda n: expected[n])] == ordered


@given(st.lists(st.integers(0, 20), min_size=3, max_size=3))
def test_names_move_as_little_as_they_can(expected):
    """Against every place of three names on a grid of halves."""
    found = spread_labels([one / 20 for one in expected], 0.2)
    moved = sum((20 * place - one) ** 2 for place, one in zip(found, expected, strict=True))
    order = sorted(range(3), key=lambda n: expected[n])
    grid = [n / 2 for n in range(41)]
    values = ((a, b, c) for a, b, c in combinations(grid, 3) if b - a >= 4 and c - b >= 4)
    least = min(
        sum((place - expected[n]) ** 2 for place, n in zip(way, order, strict=True))
        for way in values
    )
    assert moved <= least + 1e-6


def test_long_names_lose_their_middle():
    assert shorten_label("gqa", 3) == "gqa"
    assert shorten_label("abcdefghij", 5) == "ab…ij"


def fan(count: int) -> tuple[dict, list]:
    """As many names as that, most of them at one place, some long."""
    names = [f"{'a-model-with-a-long-name-' if n % 5 == 3 else 'spec'}{n}" for n in range(count)]
    ends = [10.0 ** (6 + (n % 3 == 0) + n / 400) for n in range(count)]
    lines = tuple(
        ChartLine(name, f"{name} from {n:,}", (64, 4096, 2**17), (1e3, end / 7, end))
        for n, (name, end) in enumerate(zip(names, ends, strict=True))
    )
    roof = RooflineChart("Roofline, FLOP/s", 1e15, 5e12, tuple(
        point for n, name in enumerate(names)
        for point in (RooflinePoint(name, "prefill", 900.0 + n, 1e15), RooflinePoint(name, "decode", 1 + n / 30, 5e12 + n * 1e10))  # noqa: E501 - one case a line
    ))  # fmt: skip
    chart = LineChart("Cache of 16 rows, bytes", 4096, lines, tuple(names))
    return dict.fromkeys(names, PRICES["gqa"]), [
        roof,
        chart,
        chart,
        LineChart("Time of a step, spec0 = 1", 4096, lines),
    ]


def beyond(axis) -> list:
    """Ticks that matplotlib keeps without drawing them."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]


@pytest.mark.parametrize("count", [1, 3, 8, 18])
@pytest.mark.parametrize("panels", [4, 1], ids=["all", "one"])
def test_no_text_covers_another_or_leaves_the_drawing(count, panels):
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    prices, shown = fan(count)
    with matplotlib.rc_context():
        matplotlib.rcParams.update(cost_plots.MATPLOTLIB_STYLE)
        figure = cost_plots.make_figure(prices, shown[:panels])
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        ticks = [
            tick
            for axes in figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for tick in beyond(axis)
        ]
        recorded = [
            text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
        ]
        texts = [
            text
            for text in recorded
            if not any(text in (tick.label1, tick.label2) for tick in ticks)
        ]
        boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts]
    whole = figure.bbox
    outside = [
        options
        for options, box in boxes
        if not (
            whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
        )
    ]
    assert outside == []
    flat = [
        (options, box.padded(-1.5)) for options, box in boxes if not options.endswith("B/s")
    ]  # which leans
    assert [(one, other) for (one, a), (other, b) in combinations(flat, 2) if a.overlaps(b)] == []
    assert len(texts) > 2 * count


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_same_costs_are_the_same_file(tmp_path, suffix, monkeypatch):
    prices = {"gqa": PRICES["gqa"], "a_$x$": PRICES["mla"]}
    cost_plots.save_plot(prices, tmp_path / f"one.{suffix}", "kv")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "red", "xtick.major.size": 9}):
        cost_plots.save_plot(prices, tmp_path / f"two.{suffix}", "kv")
    one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert sorted(os.listdir(tmp_path)) == [f"one.{suffix}", f"two.{suffix}"]
    if suffix == "svg":
        assert ElementTree.fromstring(one).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_failed_drawing_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "costs.svg"
    cost_plots.save_plot(PRICES, path, "kv")
    old = path.read_bytes()
    monkeypatch.setattr(cost_plots, "make_figure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cost_plots.save_plot(PRICES, path, "kv", overwrite=True)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (old, ["costs.svg"])


# --- the sheet ------------------------------------------------------------------------------------


def test_the_sheet_is_the_document_again(capsys):
    argv = ["gqa", "linear", "mha", "--batch", str(2**40), "--context", str(2**35)]
    _, document, _ = run(capsys, *argv, "--json")
    code, out, _ = run(capsys, *argv, "--csv")
    rows = list(csv.DictReader(io.StringIO(out, newline=""), strict=True))
    assert (code, len(rows), out.count("\r\n"), out.count("\n")) == (0, 3, 4, 4)
    for row, options in zip(rows, json.loads(document)["rows"], strict=True):
        flat = options | {
            f"{key}.{inner}": one
            for key, each in options.items()
            if isinstance(each, dict)
            for inner, one in each.items()
        }
        single = {key: one for key, one in flat.items() if not isinstance(one, dict | list)}
        assert {key: one for key, one in row.items() if one} == {
            key: str(one) for key, one in single.items() if one is not None
        }
    assert int(rows[0]["flops.prefill"]) > 2**63


def test_names_in_a_sheet_are_quoted():
    result = list(csv.reader(io.StringIO(to_csv([{"name": 'a,"b"\nc'}]), newline=""), strict=True))
    assert result == [["name"], ['a,"b"\nc']]


# --- the command ----------------------------------------------------------------------------------


def test_matching_on_the_command_line(capsys):
    argv = [
        "mha",
        "gqa",
        "mla",
        "--set",
        "pattern=causal()",
        "--match",
        "params",
        "--resize",
        "mla=vdim",
    ]
    code, out, err = run(capsys, *argv, "--model", "1024", "--heads", "8")
    assert (code, err) == (0, "")
    assert "resized to match mha" in out
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = run(capsys, *argv, "--model", "1024", "--heads", "8", "--json")
    data = json.loads(out)
    assert [(row["name"], row["free"]) for row in data["matched"]["rows"]] == [
        ("gqa", "dim"),
        ("mla", "vdim"),
    ]
    assert [row["reached"] for row in data["matched"]["rows"]] == [
        row["params"] for row in data["rows"][1:]
    ]


def test_all_comparisons_fit_the_screen_and_the_document(capsys, tmp_path):
    argv = [
        "gqa",
        "gqa",
        "mqa",
        "--crossovers",
        "--complexity",
        "--kernel",
        "5",
        "--plot",
        str(tmp_path / "a.svg"),
    ]
    code, out, err = run(capsys, *argv, "--plot-kind", "roofline")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "gqa (2)" in out
    data = json.loads(run(capsys, *argv, "--plot-kind", "roofline", "--json", "--overwrite")[1])
    assert {"crossovers", "complexity", "plot"} <= set(data)
    assert data["complexity"]["sizes"] == {
        "tokens": 2048,
        "model": 512,
        "heads": 8,
        "kernel": 5,
        "window": 64,
    }
    assert data["plot"] == {"file": str(tmp_path / "a.svg"), "kind": "roofline"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("gqa", "--match", "params"), "there is only gqa; name one more"),
        (("gqa", "mqa", "--match", "width"), "--match 'width' is unknown; give one of"),
        (("gqa", "mqa", "--resize", "dim"), "--resize dim changes nothing without --match"),
        (
            ("gqa", "mqa", "--match", "params", "--resize", "dimm"),
            "cannot resize mqa to match gqa: the spec has no size",
        ),
        (
            ("gqa", "mqa", "--match", "params", "--resize", "gqa=dim"),
            "there is no resized spec 'gqa'",
        ),
        (("gqa", "mqa", "--match", "kv", "--resize", "q"), "cannot resize mqa to match gqa: no q"),
        (("gqa", "mha", "--match", "kv"), "is not causal, so that there is no KV cache"),
        (("gqa", "--crossovers"), "cannot find crossovers of gqa: it takes two specs"),
        (("gqa", "--complexity", "guessed"), "--complexity 'guessed' is unknown; give one of"),
        (("gqa", "--complexity", "--kernel", "1"), "kernel must be a whole number from 2"),
        (("gqa", "--window", "5"), "--kernel and --window are sizes of --complexity"),
        (("gqa", "--plot", "a.jpg"), "'.jpg' is not supported"),
        (("gqa", "--plot", "nowhere/a.svg"), "nowhere does not exist; give the path of a new file"),
        (("gqa", "--plot-kind", "kv"), "draws nothing without a file"),
        (("gqa", "--plot", "a.svg", "--plot-kind", "pie"), "there is no kind of plot 'pie'"),
        (("gqa", "--csv", "--json"), "two forms of one document"),
        (("gqa", "--csv", "--terms"), "no room for --terms"),
        (("gqa", "--csv", "--complexity"), "no room for complexity"),
    ],
)
def test_invalid_arguments_give_one_line(capsys, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_models_are_matched_by_none_of_their_sizes(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    code, _, err = run(capsys, "gqa", str(tmp_path), "--match", "params")
    assert code == 2
    assert "--match changes single layers" in err
