"""`headwise circuit` on folders of both kinds: what it prints, and the same numbers from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import headwise as hw
from headwise.observe.head_analysis.attribution_patching import attribute_heads
from headwise.observe.head_analysis.circuit_metrics import TokenMetric
from headwise.observe.head_analysis.path_patching import patch_paths
from headwise.observe.head_analysis.score_attribution import attribute_score, attribute_value
from support import command_help
from support.command_help import run_json, run_ok
from support.saved_models import save_models
from support.transformers_models import ZOO

TEXTS = ("--clean", "a cat and a", "--corrupt", "a dog and a")
METRIC = ("--metric", "logit_difference:c,d")


def run_command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return command_help.run_command(capsys, "circuit", *argv)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("name", ["ours", "gpt2"])
def test_heads_have_the_effects_of_the_library(name, folders, capsys):
    data = run_json(capsys, "circuit", folders[name], *TEXTS, *METRIC)
    metric = TokenMetric("logit_difference", (ord("c"), ord("d")))
    expected = attribute_heads(folders[name], [("a cat and a", "a dog and a")], metric)
    assert data["clean"] == pytest.approx(expected.clean)
    values = {one["name"]: one["effects"]["output"]["value"] for one in data["heads"]}
    assert values == pytest.approx(
        {one.name: one.effects["output"].value for one in expected.heads}
    )
    assert data["agreement"]["count"] == len(data["heads"])
    assert data["words"] == list("a cat and a")


def test_equal_texts_have_no_agreement(folders, capsys):
    same = ("--clean", "a cat", "--corrupt", "a cat")
    out = " ".join(run_ok(capsys, "circuit", folders["gpt2"], *same, *METRIC).split())
    assert "exact patching of 8 has no agreement: all effects are equal" in out
    assert "nan" not in out


def test_paths_of_several_pairs_have_intervals(folders, tmp_path, capsys):
    lines = ["a cat\ta dog\tc,d", "two cats\ttwo dogs\tx,y", "", "no hat\tno hut\ta,u"]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    argv = ("circuit", folders["ours"], f"--pairs {tmp_path / 'pairs.tsv'}")
    data = run_json(
        capsys, *argv, "--metric", "logit_difference", "--path", "L0:0,1 -> L1H2.k+L1H2.v"
    )
    (path,) = data["paths"]
    assert data["pairs"] == 3
    assert path["senders"] == ["L0H0", "L0H1"]
    assert path["receivers"] == ["L1H2.k", "L1H2.v"]
    assert path["effect"]["low"] < path["effect"]["value"] < path["effect"]["high"]
    pairs = []
    for line in filter(None, lines):
        clean, corrupt, tokens = line.split("\t")
        metric = TokenMetric("logit_difference", tuple(tokens.split(",")))
        pairs.append((clean, corrupt, metric))
    expected = patch_paths(hw.load(folders["ours"]), pairs, "", [("L0:0,1", ["L1H2.k", "L1H2.v"])])
    assert path["effect"]["value"] == pytest.approx(expected.paths[0].effect.value)


def test_an_encoder_decoder_reads_a_target(folders, capsys):
    (code, _, err) = run_command(capsys, folders["t5"], *TEXTS, *METRIC)
    assert code == 2
    assert "is an encoder-decoder; add --target TEXT, which its decoder reads" in err
    data = run_json(capsys, "circuit", folders["t5"], *TEXTS, *METRIC, "--target", "le")
    assert {"E0H0", "D1H3", "X0H2"} <= {one["name"] for one in data["heads"]}


def test_edges_are_printed_and_drawn(folders, tmp_path, capsys):
    file = tmp_path / "curves.svg"
    argv = ("circuit", folders["ours"], *TEXTS, *METRIC, "--edges --points 3 --draws 1 --out", file)
    out = run_ok(capsys, *argv)
    assert "edges" in out
    assert "random" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "faithfulness" in file.read_text()
    (code, _, err) = run_command(capsys, *argv[1:])
    assert code == 2
    assert "--overwrite" in err
    text = run_ok(capsys, "circuit", folders["ours"], *TEXTS, *METRIC, "--out", file, "--overwrite")
    assert max(map(len, text.splitlines())) <= 80
    assert "agreement with exact patching" in text


@pytest.mark.parametrize("name", ["ours", "gpt2"])
def test_why_has_the_parts_of_the_library(name, folders, tmp_path, capsys):
    file = tmp_path / "why.svg"
    text = ("--text", "a cat and a")
    why = ("circuit", folders[name], *text, "--why L1H2 --query 6 --key 3 --baseline mean")
    data = run_json(capsys, *why, "--tokens", "c,d", "--out", file)
    model = hw.load(folders[name])
    places = [("a cat and a", 6, 3)]
    score = attribute_score(model, places, "L1H2", "mean")
    value = attribute_value(model, places, "L1H2", ("c", "d"))
    assert list(data["sides"]) == ["query", "key", "value"]
    for side, expected in {**score.sides, **value.sides}.items():
        found = data["sides"][side]
        assert found["total"]["value"] == pytest.approx(expected.total.value, rel=1e-4)
        for writer, part in expected.parts.items():
            value_of_part = found["parts"][writer]["value"]
            assert value_of_part == pytest.approx(part.value, rel=1e-3, abs=1e-6)
    assert "L0H" in file.read_text()
    out = run_ok(capsys, *why)
    assert "query 6 'a', key 3 'a'; by parts of the query" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_the_lens_ends_with_the_model(folders, tmp_path, capsys):
    file = tmp_path / "lens.svg"
    lens = ("circuit", folders["gpt2"], "--text", "a cat and a", "--lens")
    data = run_json(capsys, *lens, "--tokens", "c,d", "--position", 3, "--out", file)
    with torch.no_grad():
        logits = hw.load(folders["gpt2"]).eval()(torch.tensor([list(b"a cat and a")]))[0, 3]
    last = data["steps"][-1]
    assert last["logit"] == pytest.approx(float(logits[ord("c")]), rel=1e-4)
    difference = float(logits[ord("c")] - logits[ord("d")])
    assert last["difference"] == pytest.approx(difference, abs=1e-5)
    assert "attention 1" in file.read_text()
    out = run_ok(capsys, *lens)
    assert "block 1" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--text a --why L1H0 --key 3",), "the text has 1 token and no key 3; give one in"),
        (
            ("--text abc --why L1H0 --query 0 --key 2",),
            "may not attend to key 2; give one of its keys",
        ),
        (("--text abc --why L4H0 --key 1",), "has no layer L4; its layers are 0..1"),
        (("--text abc --why L1H7 --key 1",), "has no head 7; give heads in 0..2"),
        (("--text abc --why L1H0 --key 1 --tokens cat",), "needs 'cat' as one token"),
        (("--text abc --lens --position 3",), "the text has 3 tokens and no position 3"),
        (("--text abc --lens --tokens a,b,c",), "got 3 tokens; give one, or two"),
        (("--clean", "a cat", "--corrupt", "a horse", *METRIC), "5 tokens and the corrupt text 7"),
        ((*TEXTS, "--metric", "logit_difference:cat,d"), "needs 'cat' as one token, but the"),
        ((*TEXTS, *METRIC, "--path", "L0H9 -> L1H0.k"), "has no head 9; give heads in 0..2"),
        ((*TEXTS, *METRIC, "--path", "L0H0 -> L1H0"), "L1H0 is no receiver; give inputs"),
        ((*TEXTS, *METRIC, "--path", "L0H0.k -> L1H0.k"), "L0H0.k is no sender"),
        ((*TEXTS, *METRIC, "--path", "L0H0 -> M7"), "has no MLP M7; it has M0, M1"),
        ((*TEXTS, *METRIC, "--path", "L0H0 -> M1+logits"), "a path of its own"),
        ((*TEXTS, *METRIC, "--position", "40"), "has 11 tokens and no position 40"),
        ((*TEXTS, *METRIC, "--path", "L1H0 -> L0H0.q"), "there is no path from L1H0 to L0H0.q"),
        ((*TEXTS, *METRIC, "--edges --points 0 --out a.svg"), "give --points above 0"),
        ((*TEXTS, *METRIC, "--edges --budget 1kB"), "more than the budget of 1"),
    ],
)
def test_refused_in_one_line(argv, words, folders, capsys):
    (code, out, err) = run_command(capsys, folders["ours"], *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") <= 3
    assert "Traceback" not in err


@pytest.mark.parametrize("view", ["--why D1H0 --key 1", "--lens"])
def test_an_encoder_decoder_has_no_single_stream(view, folders, capsys):
    (code, _, err) = run_command(capsys, folders["t5"], "--text", "a cat", view)
    assert code == 2
    assert "--text needs a model with one residual stream, but" in err


def test_tokens_of_a_metric_stand_in_one_place(folders, tmp_path, capsys):
    (tmp_path / "pairs.tsv").write_text("a cat\ta dog\tc,d\n")
    (code, _, err) = run_command(
        capsys, folders["ours"], f"--pairs {tmp_path / 'pairs.tsv'}", *METRIC
    )
    assert code == 2
    assert "names tokens, and so does the pair: c,d; give tokens in one of both places" in err


def test_masked_tokens_need_a_position_and_known_words(tmp_path, capsys):
    entry = ZOO["bert"]._replace(model="BertForMaskedLM")
    model: Any = entry.build("sdpa")
    model.save_pretrained(tmp_path)
    ids = {word: n for n, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "a"])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ("--clean", "the cat a", "--corrupt", "the dog a")
    argv = (tmp_path, *texts, "--metric", "logit_difference:cat,dog")
    (code, _, err) = run_command(capsys, *argv)
    assert code == 2
    assert "predicts masked tokens and no next one; give --position INDEX" in err
    data = run_json(capsys, "circuit", *argv, "--position", 1)
    assert data["metric"] == "logit_difference:cat,dog at position 1"
    argv = (tmp_path, *texts, "--position", 1, "--metric", "logit_difference:cat,horse")
    (code, _, err) = run_command(capsys, *argv)
    assert code == 2
    assert "needs 'horse', but the tokenizer does not know it: token 0" in err
