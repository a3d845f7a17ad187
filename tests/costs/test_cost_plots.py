"""Cost plots and CSV tables, and the comparison options of `headwise cost`."""

from __future__ import annotations

import json

import pytest

import headwise as hw
from headwise import cli
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.cost_report import make_figure, save_plot

LOAD = hw.Workload(batch=2, context=300)
NAMES = ("gqa", "mla", "linear")
PRICES = {name: estimate_cost(hw.design(preset=name), LOAD, name) for name in NAMES}


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *argv])
    out, err = capsys.readouterr()
    return code, out, err


# --- what is drawn --------------------------------------------------------------------------------


def test_lines_are_the_costs_at_every_length():
    _, cache, flops = make_figure(PRICES).panels
    for plot in (cache, flops):
        assert [line.name for line in plot.series] == list(NAMES)
        assert {300, 64, 128, 2**17} <= set(plot.series[0].xs)
    for n, name in enumerate(NAMES):
        at = cache.series[n].xs.index(300)
        assert cache.series[n].ys[at] == PRICES[name].cache_bytes
        assert flops.series[n].ys[at] == PRICES[name].prefill_flops.total / 600


def test_points_lie_below_the_roof():
    (plot,) = make_figure(PRICES, "roofline").panels
    *points, roof = plot.series
    assert roof.xs[1] == pytest.approx(206, rel=1e-3)
    assert roof.ys[1:] == [989e12, 989e12]
    step = PRICES["mla"].operations["decode"]
    flops, moved, seconds = (
        sum(getattr(one, what) for one in step) for what in ("flops", "moved", "seconds")
    )
    found = {point.name: (point.xs[0], point.ys[0]) for point in points}
    assert found["mla, decode"] == (flops / moved, flops / seconds)
    assert all(y <= min(989e12, x * 4.8e12) * 1.0001 for x, y in found.values())


def test_bidirectional_layers_have_no_line_of_a_cache():
    prices = PRICES | {"mha": estimate_cost(hw.design(preset="mha"), LOAD, "mha")}
    figure = make_figure(prices, "kv")
    assert [line.name for line in figure.panels[0].series] == list(NAMES)
    assert figure.note == "no cache, because not causal: mha"
    with pytest.raises(
        hw.SpecError, match="cannot draw a KV cache: none of mha is causal; give them pattern"
    ):
        make_figure({"mha": prices["mha"]}, "kv")


def test_a_line_ends_where_positions_do():
    model = hw.families.read_model_spec({"model_type": "gpt2", "n_layer": 2})
    (plot,) = make_figure({"gpt2": estimate_cost(model, LOAD, "gpt2")}, "flops").panels
    assert plot.series[0].xs[-1] == 1024


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_equal_costs_are_equal_files(tmp_path, suffix):
    prices = {"gqa": PRICES["gqa"], "a_$x$": PRICES["mla"]}
    for name in ("one", "two"):
        save_plot(prices, tmp_path / f"{name}.{suffix}", "kv")
    one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
    assert one == two


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
        "--complexity",
        "--plot",
        str(tmp_path / "a.svg"),
    ]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    data = json.loads(run(capsys, *argv, "--json", "--overwrite")[1])
    assert {"complexity", "plot"} <= set(data)
    assert data["complexity"]["sizes"] == {
        "tokens": 2048,
        "model": 512,
        "heads": 8,
        "kernel": 3,
        "window": 64,
    }
    assert data["plot"] == {"file": str(tmp_path / "a.svg")}


def test_models_are_matched_by_none_of_their_sizes(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    code, _, err = run(capsys, "gqa", str(tmp_path), "--match", "params")
    assert code == 2
    assert "--match changes single layers" in err
