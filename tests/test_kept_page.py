"""What `headwise cost` says of training: the page, the document, and what it refuses in one line."""

from __future__ import annotations

import json

import pytest

import headwise as hw
from headwise import cli
from headwise.costs.training_memory import recompute_flops

SIZES = ["--model", "64", "--heads", "4", "--context", "32", "--batch", "2"]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_nothing_is_said_unless_asked(capsys):
    code, out, _ = run(capsys, "gqa", *SIZES, "--json")
    assert (code, "training" in json.loads(out)) == (0, False)


def test_the_page_says_every_step_with_its_formula(capsys):
    code, out, err = run(capsys, "mha", "dcmha", *SIZES, "--activations")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "mha: in training, flash-cuda, nothing recomputed" in out
    assert "logsumexp = 4 b s q = 1,024" in out
    assert "dcmha: in training, chunked, nothing recomputed" in out


@pytest.mark.parametrize("checkpoint", ["none", "block", "core"])
def test_the_document_has_the_same_numbers(capsys, checkpoint):
    code, out, _ = run(capsys, "gqa", *SIZES, "--json", "--profile", "dense", "--checkpoint", checkpoint)
    told = json.loads(out)["training"]["gqa"]
    spec, load = hw.design(preset="gqa", model=64, heads=4), hw.Workload(2, 32)
    way = hw.ActivationSettings("dense", checkpoint)
    assert code == 0
    assert (told["profile"], told["checkpoint"], told["dropout"]) == ("dense", checkpoint, 0.0)
    assert (
        told["kept_bytes"]
        == hw.activation_memory(spec, load, way).total
        == sum(term["value"] for term in told["terms"])
    )
    assert told["peak_bytes"] == hw.activation_memory(spec, load, hw.ActivationSettings("dense")).total
    assert told["recomputed_flops"] == recompute_flops(spec, load, way).total
    assert (told["recomputed_flops"] > 0) == (checkpoint != "none")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--profile", "spda"), "did you mean 'sdpa'"),
        (("--profile", ""), "--profile is empty"),
        (("--checkpoint", "blok"), "did you mean 'block'"),
        (("--checkpoint", ""), "checkpoint='' is unknown"),
        (("--checkpoint", "core"), "use checkpoint='none' or 'block'"),
        (("--dropout", "1.5"), "dropout must be at least 0 and less than 1, got 1.5"),
        (("--dropout", "nan"), "less than 1, got nan"),
        (("--dropout", "0.1"), "a layer alone has none"),
        (("--profile", "paper-2022"), "plain multi-head attention"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(capsys, argv, said):
    code, out, err = run(capsys, "gqa", *SIZES, *argv)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
