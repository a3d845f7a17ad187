"""`headwise run --requests`: a file of requests answered together, and the message for each bad
line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

import headwise as hw
from headwise.cli import main
from headwise.costs import roofline
from headwise.costs.roofline import Device
from headwise.models import model_spec as bp

LETTERS = "<>abcdefghijk"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, as if it had been measured."""
    rates = {"fp32": 1e11, "bf16": 1e11, "fp16": 1e11}
    monkeypatch.setattr(
        roofline,
        "get_this_machine",
        lambda: Device("here", "this machine", rates, 1e10, 1e10, "cpu"),
    )


@pytest.fixture(scope="module")
def net() -> hw.Transformer:
    spec = hw.design(model=16, heads=4, kv=2, pattern="causal()", modifiers=(hw.Rotary(),))
    blocks = [bp.BlockSpec(spec, feed=bp.FeedForwardSpec(18), norm=bp.NormSpec("rms"))] * 2
    stack = bp.StackSpec.from_blocks(
        "decoder", 16, blocks, embedding=bp.EmbeddingSpec(13), norm=bp.NormSpec("rms")
    )
    net = hw.build(
        bp.ModelSpec("tiny", "decoder", (stack,), heads=(bp.OutputHeadSpec("tokens", 13),)), seed=1
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    tokenizer = Tokenizer(WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="<"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Split("", "isolated"),
        decoders.Fuse(),
    )
    net.usage = hw.ProcessorSpec(tokenizer=tokenizer.to_str())
    return net.eval()


@pytest.fixture(scope="module")
def folder(net: hw.Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tiny")
    hw.save(net, where)
    return where


def write_requests(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "requests.jsonl"
    values = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"\n".join(values) + b"\n")
    return str(path)


def test_lines_are_answered_as_alone(
    net, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_requests(
        tmp_path,
        {"prompt": "cab", "max_new_tokens": 9},
        {"prompt": [4, 2]},
        {"prompt": "fed", "temperature": 0.9, "seed": 7, "top_k": 4},
        {"prompt": "fed", "temperature": 0.9, "stop": None},
        b"",
        {"prompt": "fed", "temperature": 0.9},
    )
    assert (
        main(["run", str(folder), "--requests", file, "--max-new-tokens", "5", "--seed", "3"]) == 0
    )
    out, err = capsys.readouterr()
    values = {line["line"]: line for line in map(json.loads, out.splitlines())}
    assert values[1]["text"] == hw.generate(net, "cab", max_new_tokens=9)
    assert values[2]["ids"] == hw.generate(net, [4, 2], max_new_tokens=5)
    assert "text" not in values[2]
    generated = hw.generate(
        net, "fed", max_new_tokens=5, temperature=0.9, seed=7, config=hw.DecodingConfig(top_k=4)
    )
    assert values[3]["text"] == generated
    lines = hw.generate(net, ["fed"] * 6, max_new_tokens=5, temperature=0.9, seed=3)
    assert (values[4]["text"], values[6]["text"]) == (
        lines[3],
        lines[5],
    )  # line n draws from stream n of the seed
    assert values[1]["ended"] == "length"
    assert "5 requests, 29 tokens in" in err
    assert [line["line"] for line in map(json.loads, out.splitlines())][
        -1
    ] == 1  # as they are done, the longest last


BAD = [
    (b'{"prompt": "cab"', "the line is not JSON: "),
    (b"[1, 2]", "the line has no prompt; write "),
    ({"text": "cab"}, "the line has no prompt; write "),
    (
        {"prompt": "cab", "max_tokens": 3},
        "a request has no 'max_tokens'; did you mean 'max_new_tokens'?",
    ),
    ({"prompt": "cab", "beams": 3}, "a request has no 'beams'; "),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": None}, "the prompt is of type NoneType"),
    ({"prompt": [1, 99]}, "the prompt holds the id 99"),
    ({"prompt": ["a", 1]}, "is not an id"),
    ({"prompt": "cab", "max_new_tokens": 10**6}, "1,000,002 tokens needs 62,501 pages"),
    ({"prompt": "cab", "max_new_tokens": "5"}, "max_new_tokens='5' is not a token count"),
    (
        {"prompt": "cab", "temperature": "hot"},
        "temperature must be a finite number >= 0, got 'hot'",
    ),
    ({"prompt": "cab", "temperature": -1}, "temperature must be a finite number >= 0, got -1"),
    ({"prompt": "cab", "top_p": 0.5}, "top_p=0.5 has no effect"),
    ({"prompt": "cab", "stop": 0.5}, "is not a decoding configuration"),
    ({"prompt": "cab", "seed": "x"}, "cannot seed 1 row with seed='x'"),
    ({"prompt": "xyz"}, "cannot tokenize 'x' at character 0"),
    (b'{"prompt": "\xff"}', "the line is not JSON: "),
    (b'{"prompt": "' + b"a" * 2**20 + b'"}', "the line is longer than 1,048,576 bytes"),
    (b"[" * 100_000, "the line is not JSON: RecursionError"),
]


def test_a_bad_line_is_reported_and_the_others_go_on(
    net, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_requests(tmp_path, *(line for line, _ in BAD), {"prompt": "cab"})
    assert (
        main(
            [
                "run",
                str(folder),
                "--requests",
                file,
                "--budget",
                "9 MB",
                "--max-new-tokens",
                "4",
                "--json",
            ]
        )
        == 2
    )
    data = json.loads(capsys.readouterr().out)
    assert [answer["line"] for answer in data["answers"]] == list(range(1, len(BAD) + 2))
    for (line, fact), answer in zip(BAD, data["answers"], strict=False):
        assert fact in answer.get("error", ""), line
        assert "\n" not in answer["error"]
    assert data["answers"][-1]["text"] == hw.generate(net, "cab", max_new_tokens=4)
    summary = data["summary"]
    assert (summary["requests"], summary["tokens"], summary["budget"]) == (1, 4, 9_000_000)
    assert 0 < summary["peak_bytes"] <= summary["budget"]


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (["--requests", "FILE", "--beams", "2"], "--requests does not support --beams 2"),
        (["--requests", "FILE", "--budget", "9 B"], "a budget of 9 bytes holds no request"),
        (["--requests", "FILE", "--budget", "some"], "cannot read 'some' as bytes"),
    ],
)
def test_invalid_arguments_are_refused(
    value, fact: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_requests(tmp_path, {"prompt": "cab"})
    assert main(["run", str(folder), *(file if word == "FILE" else word for word in value)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert fact in err
    assert err.count("\n") == 1


def test_a_file_without_requests_gives_no_answers(folder: Path, tmp_path: Path, capsys):
    assert main(["run", str(folder), "--requests", write_requests(tmp_path, b"")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "0 requests, 0 tokens" in err


# --- what is reported -----------------------------------------------------------------------------
