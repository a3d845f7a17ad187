"""stories260K: its golden story, its tokenizer, the way to transformers and back,
and on to training.

Its weights, its tokenizer and what they say lie in the folder `shared`; the numbers are those of the
published run.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer

import headwise as hw
from headwise.cli import main
from headwise.training.data.language_modelling import TextTask
from support.llama2c_tokenizer import reference_tokenize
from support.stories_model import read_pieces, write_stories_folder

PROMPT = 16  # the golden logits are those after so many ids


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    found = shared / "data"
    if not (found / "model_stories260k").is_dir():
        pytest.skip("there is no model_stories260k in the folder `shared`")
    return found


@pytest.fixture(scope="module")
def golden(data: Path) -> dict[str, Any]:
    return json.loads((data / "model_stories260k" / "golden.json").read_text())


@pytest.fixture
def story(data: Path, tmp_path: Path) -> hw.Transformer:
    return hw.load(write_stories_folder(data / "model_stories260k", tmp_path / "stories260K"))


@pytest.fixture(scope="module")
def text(data: Path) -> str:
    """Tiny Shakespeare, which this tokenizer has never seen."""
    found = sorted((data / "tinyshakespeare").rglob("*.txt"))
    if not found:
        pytest.skip("there is no tinyshakespeare in the folder `shared`")
    return found[0].read_text()


def check_story(net: hw.Transformer, golden: dict[str, Any]) -> None:
    """Ids, text, and the five likeliest ids with their logits."""
    ids = golden["greedy_ids"]
    first = torch.tensor([ids[:1]])
    assert hw.greedy_decode(net, first, max_new_tokens=len(ids) - 1) == [ids[1:]]
    with torch.no_grad():
        top = net(torch.tensor([ids[:PROMPT]]))[0, -1].topk(5)
    expected, values = zip(*golden["logits_after_first_16_ids_last_row_top5"], strict=True)
    assert top.indices.tolist() == list(expected)
    assert (top.values - torch.tensor(values)).abs().max() < 1e-4
    tokenizer = Tokenizer.from_str(net.usage.tokenizer or "")
    assert (
        " " + tokenizer.decode(ids) == golden["greedy_text"]
    )  # llama2.c too drops the space before the first word


def test_the_golden_story_from_its_own_weights(story: hw.Transformer, golden: dict[str, Any]):
    assert sum(p.numel() for p in story.parameters()) == 512 * 64 + 5 * 45_440 + 64
    assert (story.usage.before, story.usage.end) == ((1,), (1,))
    check_story(story, golden)


def test_saved_as_our_folder_it_is_the_same(
    story: hw.Transformer, golden: dict[str, Any], tmp_path: Path
):
    hw.save(story, tmp_path / "ours")
    check_story(hw.load(tmp_path / "ours"), golden)


def test_transformers_generates_the_same_text_from_our_folder(
    story: hw.Transformer, golden: dict[str, Any], tmp_path: Path
):
    """Neighbouring channels turn together in the file, halves in a Llama: rows of q and k change
    their places.
    """
    hw.export(story, tmp_path / "llama", max_length=512)
    theirs, tokenizer = (
        kind.from_pretrained(tmp_path / "llama")
        for kind in (tf.AutoModelForCausalLM, tf.AutoTokenizer)
    )
    ids = golden["greedy_ids"]
    prompt = tokenizer("", return_tensors="pt").input_ids
    generated = theirs.generate(
        prompt, max_new_tokens=len(ids) - 1, do_sample=False, pad_token_id=0
    )
    assert generated.tolist() == [ids]
    assert " " + tokenizer.decode(generated[0], skip_special_tokens=True) == golden["greedy_text"]
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    again = hw.load(tmp_path / "theirs")
    check_story(again, golden)
    assert all(
        torch.equal(again.state_dict()[name], tensor) for name, tensor in story.state_dict().items()
    )


def test_text_is_cut_and_joined_as_llama2c_does(story: hw.Transformer, data: Path, text: str):
    pieces = read_pieces(data / "model_stories260k" / "tok512.bin")
    tokenizer = Tokenizer.from_str(story.usage.tokenizer or "")
    rng = random.Random(0)
    for _ in range(150):
        at = rng.randrange(len(text))
        some = text[at : at + rng.randrange(1, 120)]
        if rng.random() < 0.3:
            some = some.replace("e", rng.choice(["\u00e9", "\u4e2d", "  ", "\u2581", "\0"]))
        ids = tokenizer.encode(some, add_special_tokens=False).ids
        assert ids == reference_tokenize(pieces, some), repr(some)
        assert tokenizer.decode(ids) == some


@pytest.mark.slow
def test_training_goes_on_from_it(data: Path, story: hw.Transformer, text: str, tmp_path: Path):
    """On Shakespeare, in its own tokens: the loss begins below that of a guess, and falls."""
    hw.save(story, tmp_path / "story")
    (tmp_path / "text.txt").write_text(text[:200_000])
    task = TextTask(
        str(tmp_path / "text.txt"), tokens=str(tmp_path / "story" / "tokenizer.json"), length=128
    )
    before = loss(story, task)
    assert before < task.chance["nats"] - 0.5
    result = [
        "--steps",
        "30",
        "--batch",
        "16",
        "--lr",
        "0.001",
        "--precision",
        "fp32",
        "--compile",
        "off",
    ]
    result += ["--set", "task.length=128", "--set", "recipe.evaluate_every=30", "--device", "cpu"]
    out = tmp_path / "out"
    assert (
        main(
            [
                "train",
                str(tmp_path / "text.txt"),
                "--model",
                str(tmp_path / "story"),
                "--out",
                str(out),
                *result,
            ]
        )
        == 0
    )
    after = hw.load(out)
    assert (after.usage.before, after.usage.end) == ((1,), (1,))
    assert (
        Tokenizer.from_str(after.usage.tokenizer or "").get_vocab()
        == Tokenizer.from_str(story.usage.tokenizer or "").get_vocab()
    )
    assert loss(after, task) < before - 0.2


def loss(net: hw.Transformer, task: TextTask) -> float:
    """Nats a token on the first held-out batch."""
    batch = task.batch(0, 16, "valid")
    with torch.no_grad():
        nats, count = task.measure(net(batch.x), batch)["nats"]
    return nats / count
