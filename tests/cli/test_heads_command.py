"""`headwise heads` on folders of both kinds: output and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headwise as hw
from headwise.observe import bundled_sample
from headwise.observe.head_analysis.annotated_examples import GENERAL_TEXTS
from headwise.observe.head_analysis.head_table import HeadClass, HeadMeasures, HeadTable, Measure
from headwise.observe.head_analysis.retrieval_heads import StreamingHeads
from headwise.report.render import to_text
from support import command_help
from support.command_help import run_json, run_ok
from support.conllu_examples import ROWS, build_encoder, conllu_lines
from support.refusals import refused_cases
from support.saved_models import GPT, save_byte_model, save_models


def run_command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return command_help.run_command(capsys, "heads", *argv)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def parsed(tmp_path: Path) -> dict[str, str]:
    """A folder of a model that reads words, and parsed sentences."""
    net = build_encoder()
    hw.save(net, tmp_path / "net")
    text = ROWS.replace("The", "the").replace("# sent_id = two\n", "").replace("2 du", "2 b")
    (tmp_path / "a.conllu").write_text(
        "\n".join([*conllu_lines(text), "", *conllu_lines(text), ""])
    )
    return {"net": str(tmp_path / "net"), "conllu": str(tmp_path / "a.conllu")}


def test_without_texts_general_ones_are_measured(folders, capsys):
    data = run_json(capsys, "heads", folders["gpt2"], "--limit 3")
    assert data["data"].endswith("texts")
    assert any("general ones in English" in note for note in data["notes"])
    named = hw.heads(folders["gpt2"], GENERAL_TEXTS.read_text(encoding="utf-8").splitlines()[:3])
    by_name = [head["measures"]["entropy"]["value"] for head in data["heads"]]
    assert by_name == [head.measures["entropy"].value for head in named.heads]


def test_a_model_that_cannot_read_the_general_texts_needs_others(capsys):
    (code, out, err) = run_command(capsys, bundled_sample.MODEL)
    assert (code, out) == (2, "")
    assert err.startswith(
        "headwise: only 0 of the general texts that come with headwise can be read"
    )
    assert err.endswith("; name yours with --data FILE or --task NAME\n")


@pytest.mark.parametrize("name", ["ours", "gpt2", "t5"])
def test_one_command_reports_the_heads_of_a_model(name, folders, tmp_path, capsys):
    (tmp_path / "lines").write_text("a longer one\n\nshort\nthird one\n")
    data = run_json(capsys, "heads", folders[name], f"--data {tmp_path / 'lines'}")
    sites = hw.sites(hw.load(folders[name]))
    assert len(data["heads"]) == sum(site.q for site in sites)
    assert data["data"] == "3 texts"
    assert data["notes"][-1] == "empty lines: 1"
    assert all("first token" in note for note in data["notes"][:-1])
    for head in data["heads"]:
        names = {"stack", "kind", "layer", "head", "kv", "measures", "classes"}
        assert set(head) == names | {"class", "class_with_sinks"}
        for one in head["measures"].values():
            assert set(one) == {"value", "low", "high", "chance", "rows", "p"}
        entropy = head["measures"]["entropy"]
        assert 0 <= entropy["low"] <= entropy["value"] <= entropy["high"]
        assert entropy["value"] <= entropy["chance"] + 1e-6
        assert head["classes"][0]["evidence"]


def test_a_table_fits_a_terminal(parsed: dict[str, str], capsys: pytest.CaptureFixture[str]):
    for more in ([], ["--sort", "sink"], ["--criteria", "clark"], ["--criteria", "voita"]):
        out = run_ok(capsys, "heads", parsed["net"], f"--conllu {parsed['conllu']}", *more)
        assert max(map(len, out.splitlines())) <= 80


def test_the_output_folder_holds_the_reports(parsed, tmp_path, capsys):
    out = tmp_path / "out"
    run_ok(capsys, "heads", parsed["net"], f"--conllu {parsed['conllu']} --out {out} --draw L0H1")
    assert (out / "head-encoder.0.attention-1-dark.png").exists()
    for name in ("grid", "entropy"):  # the sentences are too short for a class to be drawn
        for paper in ("light", "dark"):
            assert (out / f"{name}-{paper}.svg").read_text().startswith("<?xml")
            assert (out / f"{name}-{paper}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "heads.json").read_text())["heads"]
    (code, _, stderr) = run_command(
        capsys,
        parsed["net"],
        f"--conllu {parsed['conllu']} --out {tmp_path / 'no'} --draw encoder.0.attention:77",
    )
    assert (code, "encoder.0.attention has no head 77" in stderr) == (2, True)


@pytest.mark.parametrize(("argv", "wrong"), refused_cases(__file__, "heads", globals()))
def test_wrong_arguments(argv, wrong, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("one", "a b c\n"), ("two", "a b c\nd e f\n"), ("empty", "\n \n")):
        (tmp_path / name).write_text(text)
    (code, out, err) = run_command(capsys, folders["ours"], *argv)
    assert (code, out) == (2, "")
    assert wrong in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "one", "two"]


def small() -> HeadTable:
    one = Measure(0.8, 0.7, 0.9, 0.1)
    names = ("previous", "syntactic det to governor", "unclear", "sink")
    heads = tuple(
        HeadMeasures(
            *("decoder", "attention", n // 2, n % 2, 0, f"decoder.{n // 2}.attention"),
            {"entropy": one, "sink": one},
            (HeadClass(name, 0.3 + 0.2 * n, "it does"),),
        )
        for n, name in enumerate(names)
    )
    return HeadTable("small", "9 texts", heads)


def test_letters_are_of_classes():
    lines = str(small()).splitlines()
    legend = "K sink, P positional, S syntactic, · unclear; in lower case if the score is below 0.5"
    assert " ".join(lines[2:4]) == legend
    assert lines[6].split() == ["decoder.0.attention", "p", "S"]
    assert lines[7].split() == ["decoder.1.attention", "·", "K"]
    assert "\x1b[48;2;86;180;233;38;5;16mp\x1b[0m" in small().to_text(colour=True)
    row = to_text(small().ranking("sink")).splitlines()[3].split()
    assert row[:5] == ["L0H0", "0.80", "0.70", "0.90", "0.10"]


@pytest.mark.usefixtures("unrendered_figure")
def test_the_report_includes_importance_redundancy_and_baseline(folders, tmp_path, capsys):
    (tmp_path / "lines").write_text("a longer one\nshort\nthird one\nand a last\n")
    base = [
        str(folders["ours"]),
        "--data",
        str(tmp_path / "lines"),
        *("--importance", "taylor", "--redundancy", "--random-baseline"),
    ]
    data = run_json(capsys, "heads", *base, f"--out {tmp_path / 'out'}")
    worth = {(one["site"], one["head"]): one["value"] for one in data["importance"]["heads"]}
    assert len(worth) == 6
    assert sorted(worth.values()) == sorted(
        one["measures"]["importance"]["value"] for one in data["heads"]
    )
    assert len(data["redundancy"]["readers"][0]["distances"]) == 6
    assert len(data["random_baseline"]["heads"]) == 6
    for name in ("importance", "map"):
        assert (tmp_path / "out" / f"{name}-dark.svg").exists()
    out = run_ok(capsys, "heads", *base, "--sort importance")
    assert max(map(len, out.splitlines())) <= 80
    assert "4 texts: importance by taylor for next-token" in " ".join(out.split())
    assert "random baseline, 4 texts: similarity of heads" in " ".join(out.split())
    assert "randomly initialised" in out
    (code, _, err) = run_command(capsys, *base[:3], "--importance mine")
    assert (code, err.count("\n")) == (2, 1)


def test_needles_add_a_measure_or_say_that_none_was_found(tmp_path, capsys):
    config = {**GPT, "n_positions": 400}
    save_byte_model(config, tmp_path / "net")
    needles = [("the key of the door is a red one.", "what is the key of the door?")]
    needles.append(("the cat of the mayor is called Bo.", "how is the cat of the mayor called?"))
    (tmp_path / "needles").write_text("\n".join(map("\t".join, needles)))
    more = f"--limit 3 --needles {tmp_path / 'needles'}"
    data = run_json(capsys, "heads", tmp_path / "net", more)
    assert data["retrieval"]["notes"] == ["the model found 0 of 10 hidden needles: no score"]
    assert data["heads"][0]["measures"]["retrieval"]["value"] is None
    out = run_ok(capsys, "heads", tmp_path / "net", more)
    assert "the model found 0 of 10 hidden needles: no score" in out
    assert max(map(len, out.splitlines())) <= 80


def test_streaming_writes_a_list_that_models_run(folders, tmp_path, capsys):
    (tmp_path / "lines").write_text("one of the texts\nanother text\na third one\n")
    out = tmp_path / "list"
    more = f"--data {tmp_path / 'lines'} --streaming {out} --sinks 1 --window 3"
    shown = run_ok(capsys, "heads", folders["gpt2"], more)
    assert "streaming_change" in shown
    assert max(map(len, shown.splitlines())) <= 80
    heads = StreamingHeads.read(out)
    assert heads[1:] == (1, 3)
    data = run_json(capsys, "heads", folders["gpt2"], more, "--overwrite")
    scores = heads.scores.ravel().tolist()
    for head, score in zip(data["heads"], scores, strict=True):
        assert head["measures"]["streaming_change"]["value"] == pytest.approx(score) or score == 1
        assert 0 <= head["measures"]["outside"]["value"] <= 1
    alone = f"--data {tmp_path / 'lines'} --streaming {tmp_path / 'alone'} --sinks 0 --window 3"
    run_ok(capsys, "heads", folders["gpt2"], alone)
    assert StreamingHeads.read(tmp_path / "alone")[1:] == (0, 3)
    again = f"--data {tmp_path / 'lines'} --streaming {tmp_path / 'new'} --window 400"
    (code, _, err) = run_command(capsys, folders["gpt2"], again)
    assert (code, err.count("\n")) == (2, 1)
    assert "streaming heads with 64 sinks and a window of 400 need passages of 928" in err
