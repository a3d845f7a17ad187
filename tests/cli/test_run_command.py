"""`headwise run`: the outputs of the library, line by line and in order, and
one line for an error.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

import headwise as hw
from headwise.cli import main
from headwise.models import model_spec as bp
from headwise.models.generation.generate import classify
from headwise.models.vocabulary import ByteVocabulary
from headwise.training.data import make_task, synthetic_task
from support.refusals import refused_cases
from support.saved_models import save_byte_model
from support.tiny_configs import model_config

LINES = [
    "<zh>20 November 2026",
    "<iso>3 May 1999",
    "<en>1999-05-03",
    "<en>2026-11-20",
    "<iso>7 June 1985",
]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """One command; `stdin` are bytes or lines."""

    def ran(*argv: Any, stdin: bytes | list[str] = b"") -> tuple[int, str, str]:
        data = stdin if isinstance(stdin, bytes) else "\n".join([*stdin, ""]).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main(["run", *map(str, argv)])
        return (code, *capsys.readouterr())

    return ran


def jittered(net: hw.Transformer) -> hw.Transformer:
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm." not in name:
                p.add_(torch.randn(p.shape) * 0.1)
    return net


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `headwise train dates` leaves it, with less learnt."""
    torch.manual_seed(0)
    described = synthetic_task.make_small_translator(
        "dates",
        make_task("dates").model().heads[0].outputs,
        synthetic_task.ModelShape(16, 2, 1, 32),
    )
    net, folder = jittered(hw.build(described, seed=0)), tmp_path_factory.mktemp("dates")
    net.usage = make_task("dates").usage
    hw.save(net, folder)
    return folder


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads and writes bytes, at most 40 of them; its folder has no tokenizer."""
    torch.manual_seed(0)
    config = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=256, n_positions=40)
    net, folder = (
        jittered(hw.build(hw.families.read_model_spec(config), seed=0)),
        tmp_path_factory.mktemp("bytes"),
    )
    hw.save(net, folder)
    return folder


def generate(folder: Path, inputs: Any, **more: Any) -> Any:
    return hw.generate(hw.load(folder), inputs, **({"max_new_tokens": 9} | more))


# --- texts ----------------------------------------------------------------------------------------


def test_a_text_is_answered_as_the_library_answers(run: Run, translator: Path):
    short = ["--max-new-tokens", 9]
    assert run(translator, LINES[0], *short) == (0, generate(translator, LINES[0]) + "\n", "")
    sample = generate(
        translator,
        LINES[0],
        temperature=0.9,
        seed=7,
        config=hw.DecodingConfig(top_p=0.9, top_k=20, repetition=1.3),
    )
    options = [
        "--temperature",
        0.9,
        "--seed",
        7,
        "--top-p",
        0.9,
        "--top-k",
        20,
        "--repetition",
        1.3,
    ]
    assert run(translator, LINES[0], *short, *options)[1] == sample + "\n"
    best = generate(
        translator, LINES[0], config=hw.DecodingConfig(beams=4, best=3, length_penalty=0.5)
    )
    code, out, _ = run(
        translator, LINES[0], *short, "--beams", 4, "--best", 3, "--length-penalty", 0.5
    )
    scores, texts = zip(
        *((float(score), text) for _, score, text in map(cells, out.splitlines())), strict=True
    )
    assert (code, list(texts)) == (0, best)
    assert list(scores) == sorted(scores, reverse=True)


def cells(line: str) -> list[str]:
    return line.split("\t")


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_lines_are_answered_in_order_whatever_stands_beside_them(run, translator, batch):
    lines = [LINES[0], "", *LINES[1:3], "   ", *LINES[3:]]
    expected = {line: generate(translator, line) for line in LINES}
    code, out, err = run(translator, "--max-new-tokens", 9, "--batch", batch, stdin=lines)
    assert (code, err) == (0, "")
    assert out.splitlines() == [expected.get(line, "") for line in lines]
    options = ["--temperature", 1, "--seed", 3, "--max-new-tokens", 9]
    entry = run(translator, *options, "--batch", batch, stdin=lines)[1]
    assert entry == run(translator, *options, "--batch", 3, stdin=lines)[1]
    assert entry.splitlines()[0] == generate(translator, LINES[0], temperature=1.0, seed=3)


def test_a_line_that_cannot_be_read_does_not_stop_the_others(run: Run, translator: Path):
    data = "\n".join([LINES[0], "<zh>3 Mai", LINES[1]]).encode() + b"\n\xff\r\n" + LINES[2].encode()
    code, out, err = run(translator, "--max-new-tokens", 9, stdin=data)
    answers = [generate(translator, line) for line in LINES[:3]]
    assert (code, out.splitlines()) == (2, [answers[0], "", answers[1], "", answers[2]])
    assert err.splitlines() == [
        (
            "headwise: line 2: cannot tokenize 'Mai' at character 6: it is not in the vocabulary; "
            "write it differently"
        ),
        "headwise: line 4: byte 0 is not UTF-8: invalid start byte; give UTF-8 text",
    ]


def test_lines_are_read_as_they_are_answered(translator: Path, monkeypatch: pytest.MonkeyPatch):
    """Two at a time: of what comes later nothing is held."""
    read, written = [], []

    class Source(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            read.append(len(written))
            return super().readline(size)

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            written.extend(text.count("\n") * [text])
            return super().write(text)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Source("\n".join(LINES).encode())))
    monkeypatch.setattr(sys, "stdout", Sink())
    assert main(["run", str(translator), "--batch", "2", "--max-new-tokens", "3"]) == 0
    assert read == [0, 0, 2, 2, 4, 4]


def test_a_json_document_holds_all_outputs(run: Run, translator: Path):
    code, out, err = run(translator, LINES[0], "--json", "--max-new-tokens", 9)
    data = json.loads(out)
    net = hw.load(translator)
    ids = hw.generate(net, hw.generation.parse_prompts(net, LINES[0]).rows[0], max_new_tokens=9)
    answer = {"line": 1, "prompt": LINES[0], "ids": ids, "text": generate(translator, LINES[0])}
    assert (code, err, data) == (0, "", {"model": "dates", "answers": [answer]})
    options = ["--json", "--beams", 3, "--best", 2, "--max-new-tokens", 9]
    code, out, err = run(translator, *options, stdin=[LINES[1], "", "€", LINES[2]])
    rows = json.loads(out)["answers"]
    assert (code, err.count("\n")) == (2, 1)
    assert [row["line"] for row in rows] == [1, 2, 3, 4]
    how = hw.DecodingConfig(beams=3, best=2)
    assert [one["text"] for one in rows[0]["best"]] == generate(translator, LINES[1], config=how)
    assert rows[0]["text"] == rows[0]["best"][0]["text"]
    assert rows[0]["score"] == rows[0]["best"][0]["score"] >= rows[0]["best"][1]["score"]
    assert rows[1] == {"line": 2, "prompt": ""}
    assert "'€' at character 0" in rows[2]["error"]
    sample = [LINES[0], "--json", "--temperature", 1]
    data = [json.loads(run(translator, *sample)[1]) for _ in range(2)]
    assert data[0]["seed"] != data[1]["seed"]
    assert json.loads(run(translator, *sample, "--seed", data[0]["seed"])[1]) == data[0]


def test_a_model_without_a_tokenizer_is_given_one(run: Run, speaker: Path, tmp_path: Path):
    options = ["--max-new-tokens", 20, "--temperature", 1, "--seed", 2]
    ids = hw.generate(hw.load(speaker), list(b"low"), max_new_tokens=20, temperature=1.0, seed=2)
    expected = bytes(ids).decode(errors="replace") + "\n"
    assert run(speaker, "low", "--tokenizer", "bytes", *options) == (0, expected, "")
    (tmp_path / "bytes.json").write_text(ByteVocabulary().document)
    assert run(speaker, "low", "--tokenizer", tmp_path / "bytes.json", *options) == (
        0,
        expected,
        "",
    )


# --- classes --------------------------------------------------------------------------------------


def shallow(described: bp.ModelSpec) -> bp.ModelSpec:
    """One layer of it."""
    [stack] = described.stacks
    return replace(described, stacks=(replace(stack, runs=(bp.LayerRun(1, stack.layers[:1]),)),))


@pytest.fixture
def painter(tmp_path: Path) -> tuple[Path, Path]:
    """A folder as training on pictures leaves it, and the pictures, in folders of their classes."""
    pictures = tmp_path / "pictures"
    for n in range(24):
        path = pictures / ("cat", "dog")[n % 2] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (10, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    recipe = hw.Recipe(
        steps=1, batch=8, precision="fp32", compile="off", device="cpu", evaluate_batches=1
    )
    out = tmp_path / "run"
    task = make_task("images", path=str(pictures), size=(9, 11), valid=0.25, test=0.25)
    hw.train(task, shallow(task.model()), recipe, out)
    return out, pictures


def test_images_are_classified_as_in_training(run: Run, painter: tuple[Path, Path], tmp_path: Path):
    folder, pictures = painter
    task = make_task("images", path=str(pictures), size=(9, 11), valid=0.25, test=0.25)
    inputs = task.data.inputs  # pyright: ignore[reportAttributeAccessIssue] - of images
    at = [path.name for path in inputs.store.paths].index("3.png")
    with torch.no_grad():
        shares = hw.load(folder)(inputs.take(np.array([at]))[0])[0].softmax(-1).tolist()
    picture = str(pictures / "dog" / "3.png")
    data = json.loads(run(folder, picture, "--json")[1])
    found = {one["name"]: one["share"] for one in data["answers"][0]["classes"]}
    assert [found["cat"], found["dog"]] == pytest.approx(shares, rel=1e-5)
    np.save(
        tmp_path / "a.npy", (inputs.store.take(np.array([at]))[0] * 255).round().astype(np.uint8)
    )
    code, out, err = run(
        folder, stdin=[picture, str(tmp_path / "a.npy"), str(tmp_path / "none.png"), __file__]
    )
    best = max(found, key=lambda name: found[name])
    assert out.splitlines() == [f"{best}\t{found[best]:.4f}"] * 2 + ["", ""]
    assert (code, err.count("\n")) == (2, 2)
    assert "line 3: there is no file" in err
    assert "is not an image file; give one of .png" in err
    code, out, err = run(folder, picture)
    assert out.startswith(f"{best}  {found[best]:6.1%}  █")
    np.save(tmp_path / "a.npy", np.zeros((9, 10, 3), np.uint8))
    assert "is 9 x 10 x 3, but the model needs 9 x 11 x 3" in run(folder, tmp_path / "a.npy")[2]
    net = hw.load(folder)
    for usage, words in (
        (hw.ProcessorSpec(labels=("a", "b")), "the size and normalisation of its inputs"),
        (hw.ProcessorSpec(), "0 names"),
    ):
        net.usage = usage
        hw.save(net, tmp_path / "bare")
        code, out, err = run(tmp_path / "bare", picture)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_frames_are_classified_as_in_training(run: Run, tmp_path: Path):
    rng = np.random.default_rng(0)
    frames, labels = rng.normal(3, 2, (20, 6, 5)), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", frames=frames, labels=labels)
    task = make_task("frames", path=str(tmp_path / "a.npz"), valid=0.25, test=0.25)
    recipe = hw.Recipe(
        steps=1, batch=8, precision="fp32", compile="off", device="cpu", evaluate_batches=1
    )
    hw.train(task, shallow(task.model()), recipe, tmp_path / "run")
    inputs = task.data.inputs  # pyright: ignore[reportAttributeAccessIssue] - of frames
    with torch.no_grad():
        shares = hw.load(tmp_path / "run")(inputs.take(np.array([4]))[0])[0].softmax(-1).tolist()
    np.save(tmp_path / "4.npy", frames[4])
    data = json.loads(run(tmp_path / "run", tmp_path / "4.npy", "--json")[1])
    found = {one["name"]: one["share"] for one in data["answers"][0]["classes"]}
    assert [found["0"], found["1"]] == pytest.approx(shares, rel=1e-5)


def words() -> str:
    vocabulary = ["[UNK]", "[MASK]", "the", "cat", "dog", "sat", "."]
    tokenizer = Tokenizer(
        WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(vocabulary[:2])
    return tokenizer.to_str()


def reader(folder: Path, head: bp.OutputHeadSpec, **usage: Any) -> Path:
    block = bp.BlockSpec(hw.design(model=12, heads=3), feed=bp.FeedForwardSpec(17))
    stack = bp.StackSpec.from_blocks(
        "encoder",
        12,
        [block],
        embedding=bp.EmbeddingSpec(7, positions=bp.PositionSpec("learned", 9)),
    )
    net = jittered(hw.build(bp.ModelSpec("reader", "encoder", (stack,), (head,)), seed=0))
    net.usage = hw.ProcessorSpec(tokenizer=words(), **usage)
    hw.save(net, folder)
    return folder


def test_an_output_for_each_token_is_not_printed(run: Run, tmp_path: Path):
    code, out, err = run(reader(tmp_path, bp.OutputHeadSpec("tokens", 7)), "the cat")
    assert (code, out) == (2, "")
    assert "reader has an output for each token of a text, and neither generates nor" in err


def test_texts_are_classified(run: Run, tmp_path: Path):
    folder = reader(tmp_path, bp.OutputHeadSpec("classes", 3, "mean"), labels=("x", "y", "z"))
    expected = classify(hw.load(folder), ["the cat", "sat ."])
    code, out, _ = run(folder, stdin=["the cat", "sat ."])
    assert out.splitlines() == [f"{best.name}\t{best.share:.4f}" for best, *_ in expected]
    code, out, err = run(folder, "the cat", "--beams", 3)
    assert (code, out) == (2, "")
    assert err == "headwise: --beams is for text generation, but reader classifies; leave it out\n"
    assert (
        "is not between 1 and the 3 classes; give 1..3" in run(folder, "the cat", "--top-k", 4)[2]
    )
    code, out, err = run(folder, "the cat " * 5)
    assert "a prompt of 10 tokens is 1 longer than the 9 positions of reader" in err


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "words"), refused_cases(__file__, "run", globals()))
def test_bad_input_is_one_line(run: Run, translator: Path, speaker: Path, argv: Any, words: str):
    code, out, err = run(*({"T": translator, "S": speaker}.get(one, one) for one in argv))
    assert (code, out) == (2, "")
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    assert words in err


def test_an_encoder_without_labels_is_no_classifier(run, tmp_path):
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 16,
        "num_attention_heads": 2,
    }
    sizes = {
        "num_hidden_layers": 1,
        "intermediate_size": 24,
        "vocab_size": 256,
        "max_position_embeddings": 32,
    }
    save_byte_model(config | sizes, tmp_path / "encoder")
    code, out, err = run(tmp_path / "encoder", "the cat sat")
    assert (code, out) == (2, "")
    assert "bert has no classes: it gives one vector for each text" in err
    assert "headwise heads" in err
