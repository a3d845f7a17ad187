"""`headwise trace` on folders of both kinds, and on trace files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import headwise as hw
from support import command_help
from support.command_help import run_ok
from support.refusals import refused_cases
from support.saved_models import save_models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("folders"))


def run_command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return command_help.run_command(capsys, "trace", *argv)


@pytest.mark.parametrize("name", ["ours", "gpt2", "t5"])
def test_one_command_traces_a_model(name, folders, tmp_path, capsys):
    out = str(tmp_path / "a.trace")
    table = run_ok(capsys, "trace", folders[name], "--text", "a b", f"--new-tokens 4 --out {out}")
    trace = hw.load_trace(out)
    assert table.strip() == str(trace)
    stream = "source" if name == "t5" else "text"
    assert trace.streams[stream][0].words[:3] == ("a", " ", "b")
    assert trace.streams[stream][0].offsets[:3] == ((0, 1), (1, 2), (2, 3))
    assert len(trace.streams["text"][0].ids) == (5 if name == "t5" else 7)
    assert {len(one.calls) for one in trace.layers if one.stack == "decoder"} == {4}
    for one in trace.layers:
        np.testing.assert_allclose(trace.head_weights(one.name, 1).sum(1), 1, atol=1e-5)
        np.testing.assert_array_equal(trace.thumbnail(one.name, 1), trace.weight_tile(one.name, 1))


@pytest.mark.parametrize("name", ["ours", "gpt2"])
def test_lines_of_a_file(name, folders, tmp_path, capsys):
    (tmp_path / "lines").write_text("a longer one\n\nshort\nthird\n")
    out = str(tmp_path / "a.trace")
    run_ok(capsys, "trace", folders[name], f"--data {tmp_path / 'lines'} --limit 2 --out {out}")
    trace = hw.load_trace(out)
    alone = []
    for text in ("a longer one", "short"):
        assert (
            run_command(
                capsys, str(folders[name]), "--text", text, "--out", str(tmp_path / f"{text}.trace")
            )[0]
            == 0
        )
        alone.append(hw.load_trace(tmp_path / f"{text}.trace"))
    for row, one in enumerate(alone):
        real_positions = [n for n, word in enumerate(trace.streams["text"][row].ids) if word >= 0]
        found = trace.head_weights(1, 2, row=row)[np.ix_(real_positions, real_positions)]
        np.testing.assert_allclose(found, one.head_weights(1, 2), atol=1e-5)


def test_a_trace_file_is_described(folders, tmp_path, capsys):
    out, table = str(tmp_path / "a.trace"), str(tmp_path / "a.csv")
    assert (
        run_command(capsys, str(folders["ours"]), "--text abc --record v,z --sites 1 --out", out)[0]
        == 0
    )
    text = run_ok(capsys, "trace", out, f"--json --export {table} --min-weight 0.5")
    assert json.loads(text)["sites"] == [
        {
            "name": "decoder.1.attention",
            "heads": 3,
            "queries": 3,
            "keys": 3,
            "calls": 1,
            "kept": ["k", "q", "v", "z"],
        }
    ]
    assert (
        Path(table).read_text().startswith("site,head,row,query,key,query_token,key_token,weight")
    )


def test_a_source_and_its_target(folders, tmp_path, capsys):
    out = str(tmp_path / "a.trace")
    run_ok(capsys, "trace", folders["t5"], f"--text abcd --target xy --out {out}")
    trace = hw.load_trace(out)
    assert [
        trace.get_layer("decoder.0.cross").num_queries,
        trace.get_layer("decoder.0.cross").num_keys,
    ] == [3, 4]
    assert trace.streams["text"][0].words[1:] == ("x", "y")


@pytest.mark.parametrize(("argv", "wrong"), refused_cases(__file__, "trace", globals()))
def test_wrong_arguments(argv, wrong, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code, out, err) = run_command(capsys, folders.get(argv[0], argv[0]), *argv[1:])
    assert (code, out) == (2, "")
    assert err.count("\n") <= 2
    assert wrong in err
    assert list(tmp_path.iterdir()) == []
