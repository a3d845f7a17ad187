"""What the page measures, opens and shows of a model in a folder: the open text and general texts,
other models beside it, and the texts that show a head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary, byte_alphabet
from headwise.observe.head_analysis.annotated_examples import GENERAL_TEXTS, read_lines
from headwise.observe.inspect.model_tokenizer import _encode, make_token_decoder
from headwise.observe.traces import save_trace
from headwise.viewer.answers import ask
from headwise.viewer.model_actions import capture_text, measure
from headwise.viewer.open_model import OpenModel, list_openable
from headwise.viewer.targets import Target, open_other, open_target
from viewer.binary_messages import decode_arrays
from viewer.page_browser import served, wait_until
from viewer.page_models import progress

CONFIG = {
    "model_type": "gpt2",
    "n_embd": 12,
    "n_head": 3,
    "n_layer": 2,
    "vocab_size": 257,
    "n_positions": 600,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, a trace, a link that leads elsewhere and other files."""
    parent = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        net: Any = hw.build(hw.families.read_model_spec(CONFIG), seed=seed)
        net.usage = replace(net.usage, tokenizer=ByteVocabulary().document)
        hw.save(net, parent / name)
    save_trace(hw.trace(net.eval(), torch.arange(7)[None]), parent / "run.trace")
    (parent / "link").symlink_to(parent / "one")
    (parent / "notes.txt").write_text("no model")
    return parent


@pytest.fixture
def model(folder: Path) -> OpenModel:
    return open_target(Target(str(folder / "one"), "a short text"))


def test_models_and_traces_beside_the_open_one_are_listed(model: OpenModel, folder: Path):
    names = [f"{folder.name}/{name}" for name in ("one", "run.trace", "two")]
    assert model.describe()["openable"] == names
    assert list_openable((folder / "one",)) == {}


def test_another_model_takes_the_place_of_the_open_one_and_gives_it_back(
    model: OpenModel, folder: Path
):
    first, revision = model.get_model(), model.revision
    open_other(model, {"name": f"{folder.name}/two"}, progress())
    assert model.get_model() is not first
    assert model.describe()["opened"] == f"{folder.name}/two"
    open_other(model, {"name": f"{folder.name}/run.trace"}, progress())
    assert not model.has_model
    assert model.get_trace().layers[0].num_queries == 7
    open_other(model, {"name": ""}, progress())
    assert model.get_model() is first
    assert model.revision == revision + 3


@pytest.mark.parametrize("name", ["one", "../one", "/etc", "link", "notes.txt"])
def test_only_listed_names_are_opened(model: OpenModel, folder: Path, name: str):
    with pytest.raises(ValueError, match="cannot open"):
        open_other(model, {"name": name if name == "one" else f"{folder.name}/{name}"}, progress())


def test_the_first_text_is_opened_again(model: OpenModel):
    trace = model.get_trace()
    assert model.describe()["isFirstText"]
    capture_text(model, {"text": "another one"}, progress())
    assert not model.describe()["isFirstText"]
    open_other(model, {"name": ""}, progress())
    assert model.get_trace().streams is trace.streams
    assert model.describe()["isFirstText"]


def test_classes_come_from_general_texts_and_stay_when_the_text_changes(model: OpenModel):
    assert list(model.texts) == read_lines(GENERAL_TEXTS)
    measure(model, {}, progress())
    alone = decode_arrays(ask(model, "/api/measures"))[0]
    assert not alone["severalTexts"]
    measure(model, {"texts": [*model.texts]}, progress())
    expected = hw.heads(model.get_model())
    assert model.table is not None
    assert [head.classes for head in model.table.heads] == [head.classes for head in expected.heads]
    fields, arrays = decode_arrays(ask(model, "/api/measures"))
    assert (fields["severalTexts"], fields["texts"]) == (True, "32 general texts")
    place = fields["ownNames"].index("entropy")
    weights = model.get_trace().head_weights(model.heads[4][0], model.heads[4][1])
    entropy = -np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1)), 0).sum(-1)
    assert arrays["own"][4, place, 0] == pytest.approx(entropy.mean(), rel=1e-4)
    capture_text(model, {"text": "another one"}, progress())
    assert model.table is not None
    assert model.own_table is None


def test_the_texts_that_show_a_head_have_its_weights(model: OpenModel):
    model.texts = ("abcabcabc", "xyz zyx", "hello there")
    measure(model, {"texts": [*model.texts]}, progress())
    site, head = model.heads[1]
    fields, arrays = decode_arrays(ask(model, "/api/examples?site=0&head=1"))
    words, keys = fields["texts"][0]
    net = model.get_model()
    weights = hw.trace(net, ["".join(keys)]).head_weights(site, head)
    assert words == keys
    assert len(arrays["0.weights"]) == len(keys)
    assert arrays["0.weights"].max() <= weights.max() + 1e-6
    rows = arrays["0.queries"]
    shown = arrays["0.weights"] > 0
    columns = np.flatnonzero(shown)
    np.testing.assert_allclose(weights[rows[shown], columns], arrays["0.weights"][shown], atol=1e-6)


def test_parts_of_a_character_are_shown_as_bytes():
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.models.BPE(byte_alphabet(), [])
    tokenizer = tokenizers.Tokenizer(inner)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    row = _encode(tokenizer, "a\u5929b")
    assert row.words == ("a", *(f"<0x{byte:02X}>" for byte in "\u5929".encode()), "b")
    assert make_token_decoder(tokenizer)(row.ids[1]) == "<0xE5>"


def test_a_text_in_the_address_is_opened_and_the_printed_address_shows_the_first(
    page: Any, model: OpenModel
):
    with served(model) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.get_by_label("Text that the model reads").fill("hello")
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelectorAll('.toks .tok').length === 5")
        wait_until(page, "location.hash.includes('text=hello')")
        page.goto("about:blank")
        page.goto(url)
        wait_until(page, "document.querySelectorAll('.toks .tok').length === 12")
        page.goto("about:blank")
        page.goto(url.partition("#")[0] + "#/head?text=hi")
        wait_until(page, "document.querySelectorAll('.toks .tok').length === 2")
        assert model.get_trace().streams["text"][0].text == "hi"
