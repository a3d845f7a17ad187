"""stories260K, trained and published by others: its golden story in one pass, from caches and in
chunks, its tokenizer, the way to transformers and back, and on to training.

Its weights, its tokenizer and what they say lie in the folder `shared`; the numbers are those of the
published run.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer
from torch import Tensor

import headwise as hw
from headwise.cli import main
from headwise.hub.pretrained_models import load_original
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


@pytest.fixture(scope="module")
def story(data: Path, tmp_path_factory: pytest.TempPathFactory) -> hw.Transformer:
    folder = tmp_path_factory.mktemp("stories") / "stories260K"
    return hw.load(write_stories_folder(data / "model_stories260k", folder))


@pytest.fixture(scope="module")
def text(data: Path) -> str:
    """Tiny Shakespeare, which this tokenizer has never seen."""
    found = sorted((data / "tinyshakespeare").rglob("*.txt"))
    if not found:
        pytest.skip("there is no tinyshakespeare in the folder `shared`")
    return found[0].read_text()


@pytest.fixture(autouse=True)
def without_gradients(request: pytest.FixtureRequest):
    with torch.set_grad_enabled(request.node.get_closest_marker("slow") is not None):
        yield


# --- the story ------------------------------------------------------------------------------------


def check_top_five(logits: Tensor, golden: dict[str, Any]) -> None:
    """The five likeliest ids and their logits, as published by the reference run."""
    ids, values = zip(*golden["logits_after_first_16_ids_last_row_top5"], strict=True)
    top = logits.topk(5)
    assert top.indices.tolist() == list(ids)
    assert (top.values - torch.tensor(values)).abs().max() < 1e-4


def test_the_model_is_the_one_described(story: hw.Transformer, data: Path, golden: dict[str, Any]):
    """512 x 64 embeddings, 5 layers of 45,440 numbers of which 12,288 are attention, and the last
    norm; its frequencies are those in the checkpoint.
    """
    assert sum(p.numel() for p in story.parameters()) == 512 * 64 + 5 * 45_440 + 64
    layers = [block.attention for block in story.decoder.blocks]
    assert [sum(p.numel() for p in layer.parameters()) for layer in layers] == [12_288] * 5
    assert (story.usage.prefix_ids, story.usage.eos) == ((1,), (1,))
    rate = torch.tensor(layers[0].spec.modifiers[0].frequencies(8), dtype=torch.float64)
    with np.load(data / "model_stories260k" / "weights.npz") as stored:
        angle = torch.arange(len(stored["freqs_cos"]), dtype=torch.float64)[:, None] * rate
        assert np.abs(angle.cos().numpy() - stored["freqs_cos"]).max() < 1e-5  # taken in float32
        assert np.abs(angle.sin().numpy() - stored["freqs_sin"]).max() < 1e-5


def test_one_pass_predicts_every_next_id(story: hw.Transformer, golden: dict[str, Any]):
    ids = golden["greedy_ids"]
    logits = story(torch.tensor([ids]))[0]
    assert logits.argmax(-1)[:-1].tolist() == ids[1:]
    check_top_five(logits[PROMPT - 1], golden)


@pytest.mark.parametrize("chunks", [(1,) * 60, (PROMPT,), (1, 2, 13, 1, 37), (3, 5, 7, 11)])
def test_a_prefill_in_chunks_changes_nothing(
    story: hw.Transformer, golden: dict[str, Any], chunks: tuple[int, ...]
):
    ids = torch.tensor([golden["greedy_ids"]])
    cache, parts = story.cache(batch=1, capacity=512), [*chunks, ids.shape[1] - sum(chunks)]
    logits = torch.cat([story(part, cache=cache) for part in ids.split(parts, 1)], 1)[0]
    check_top_five(logits[PROMPT - 1], golden)
    assert (logits - story(ids)[0]).abs().max() < 1e-4
    assert logits.argmax(-1)[:-1].tolist() == golden["greedy_ids"][1:]


def test_rows_of_different_lengths_do_not_disturb_each_other(
    story: hw.Transformer, golden: dict[str, Any]
):
    """The same story cut at three places and padded on the left."""
    ids, lengths = torch.tensor(golden["greedy_ids"][:29]), [29, 17, 5]
    rows = torch.zeros(3, 29, dtype=torch.int64)
    for row, length in zip(rows, lengths, strict=True):
        row[29 - length :] = ids[:length]
    got = story(rows, sequence=hw.SequenceInfo.from_batch(rows, lengths=lengths, pad="left"))
    whole = story(ids[None])[0]
    for row, length in zip(got, lengths, strict=True):
        assert (row[29 - length :] - whole[:length]).abs().max() < 1e-4


def check_story(net: hw.Transformer, golden: dict[str, Any]) -> None:
    """Ids, text, and the five likeliest ids with their logits."""
    ids = golden["greedy_ids"]
    first = torch.tensor([ids[:1]])
    assert hw.generation.greedy_decode(net, first, max_new_tokens=len(ids) - 1) == [ids[1:]]
    check_top_five(net(torch.tensor([ids[:PROMPT]]))[0, -1], golden)
    tokenizer = Tokenizer.from_str(net.usage.tokenizer or "")
    # llama2.c too drops the space before the first word
    assert " " + tokenizer.decode(ids) == golden["greedy_text"]


def test_the_golden_story_from_its_own_weights(story: hw.Transformer, golden: dict[str, Any]):
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


def test_traced_weights_are_those_of_transformers(story: hw.Transformer, tmp_path: Path):
    hw.export(story, tmp_path / "llama")
    other = load_original(tmp_path / "llama")
    other.set_attn_implementation("eager")
    trace = hw.trace(story, "Once upon a time there was a little dog.", max_new_tokens=8)
    ids = torch.tensor([trace.streams["text"][0].ids])
    outputs = other(input_ids=ids, output_attentions=True)
    for layer, weights in enumerate(outputs.attentions):
        num_queries = trace.get_layer(layer).num_queries
        assert num_queries == ids.shape[1] - 1
        for head in range(8):
            own = weights[0, head, :num_queries, :num_queries].numpy()
            np.testing.assert_allclose(trace.head_weights(layer, head), own, atol=1e-5)
    assert {len(one.calls) for one in trace.layers} == {8}


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
    assert (after.usage.prefix_ids, after.usage.eos) == ((1,), (1,))
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
