"""`headwise circuit` on folders of both kinds: what it prints, and the same numbers from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import headwise as hw
from headwise.observe.head_analysis.attribution_patching import attribute_heads
from headwise.observe.head_analysis.circuit_metrics import TokenMetric
from headwise.observe.head_analysis.path_patching import patch_paths
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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
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
