"""The loss over the tokens of an answer alone, against plain torch, and on the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise import cli
from headwise.hub.tokenizer_files import attach_tokenizer
from headwise.models import Transformer
from headwise.observe.head_analysis.annotated_examples import examples_from_lines, label_answer
from headwise.observe.head_analysis.head_importance import estimate_importance
from headwise.observe.head_analysis.objectives import OBJECTIVES
from headwise.observe.traces import TokenRow
from headwise.util.errors import SpecError

LINES = ["Q: one A: two", "Q: three A: four A: five", "no answer here", "Q: six A: seven eight"]
ANSWERS = [" two", " five", " seven eight"]


def decoder() -> Transformer:
    spec = hw.families.read_model_spec(
        {
            "model_type": "gpt2",
            "n_embd": 12,
            "n_head": 3,
            "n_layer": 2,
            "vocab_size": 256,
            "n_positions": 40,
        }
    )
    net = hw.build(spec, seed=0).double().eval()
    attach_tokenizer(net, "bytes")
    return net


def answer_loss(net: Transformer, line: str, answer: str) -> float:
    """Mean cross-entropy of the last tokens of a line, which are its answer."""
    ids = torch.tensor([list(line.encode())])
    logits, count = net(ids)[0], len(answer)
    return F.cross_entropy(logits[-count - 1 : -1], ids[0, -count:]).item()


def test_only_tokens_of_the_answer_are_scored():
    net = decoder()
    reader = examples_from_lines(net, LINES, answer_after="A:")
    assert reader.notes == ("texts without an answer after 'A:': 1",)
    examples, objective = reader.examples_with_frequencies(), OBJECTIVES["next-token"]
    lines = [line for line in LINES if "A:" in line]
    for example, line, answer in zip(examples, lines, ANSWERS, strict=True):
        evaluation = objective.prepare_input(net, example, 0)
        assert evaluation.num_targets == len(answer)
        with torch.no_grad():
            loss = objective.value(net(**example.model_inputs), None, evaluation).item()
            assert loss == pytest.approx(answer_loss(net, line, answer), rel=1e-12)
    result = estimate_importance(net, examples, method="leave-one-out")
    for head in result.heads:
        with hw.ablate(net, [(head.site, head.head)]), torch.no_grad():
            without = [answer_loss(net, *pair) for pair in zip(lines, ANSWERS, strict=True)]
        with torch.no_grad():
            whole = [answer_loss(net, *pair) for pair in zip(lines, ANSWERS, strict=True)]
        assert head.value == pytest.approx((sum(without) - sum(whole)) / 3, rel=1e-6, abs=1e-12)


def test_a_token_across_the_marker_and_special_tokens():
    row = TokenRow(
        (5, 6, 7, 8, 9),
        ("a", ":b", "c", "d", "</s>"),
        ((0, 1), (1, 3), (3, 4), (4, 5), (0, 0)),
        "a:bcd",
    )
    assert label_answer(row, ":").tolist() == [6, 7, 8, -100, -100]
    assert label_answer(row, "c").tolist() == [-100, -100, 8, -100, -100]
    assert (label_answer(row, "x") == -100).all()


def test_models_with_an_encoder_have_targets_of_their_own():
    spec = hw.families.read_model_spec(
        {
            "model_type": "t5",
            "d_model": 8,
            "d_kv": 4,
            "num_heads": 2,
            "num_layers": 1,
            "d_ff": 8,
            "vocab_size": 256,
            "decoder_start_token_id": 0,
        }
    )
    net = hw.build(spec, seed=0).eval()
    attach_tokenizer(net, "bytes")
    net.usage = dataclasses.replace(net.usage, begin=(1,), end=(2,))
    with pytest.raises(SpecError, match=r"cannot score answers after 'A:': .* has an encoder"):
        examples_from_lines(net, ["Q: a\tA: b"], answer_after="A:")


def test_commands_score_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    net = decoder().float()
    hw.save(net, tmp_path / "net")
    (tmp_path / "lines").write_text("\n".join(LINES * 2) + "\n")
    texts = ["--data", str(tmp_path / "lines"), "--answer-after", "A:"]
    assert (
        cli.main(
            ["heads", str(tmp_path / "net"), *texts, "--importance", "leave-one-out", "--json"]
        )
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    examples = examples_from_lines(net, LINES * 2, answer_after="A:").examples_with_frequencies()
    expected = estimate_importance(net, examples, method="leave-one-out")
    assert [head["value"] for head in data["importance"]["heads"]] == pytest.approx(
        [head.value for head in expected.heads], rel=1e-4, abs=1e-6
    )
    assert "texts without an answer after 'A:': 2" in data["notes"]
    out = tmp_path / "pruned"
    assert (
        cli.main(["prune", str(tmp_path / "net"), "--keep", "0.5", "--out", str(out), *texts]) == 0
    )
    assert (out / "model.safetensors").is_file()
    capsys.readouterr()
    assert cli.main(["heads", str(tmp_path / "net"), *texts]) == 2
    assert "--answer-after needs --importance" in capsys.readouterr().err
    assert (
        cli.main(
            [
                "prune",
                str(tmp_path / "net"),
                "--keep",
                "0.5",
                "--task",
                "dates",
                "--answer-after",
                "A:",
                "--out",
                "x",
            ]
        )
        == 2
    )
    assert "--answer-after needs --data; add --data FILE" in capsys.readouterr().err
