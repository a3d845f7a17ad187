"""Evidence of classes and dependency relations: the numbers are those of the library, and the page
shows them.
"""

from __future__ import annotations

import tempfile
from itertools import product
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import headwise as hw
from headwise.hub.tokenizer_files import attach_tokenizer
from headwise.observe import bundled_sample
from headwise.viewer.binary_answers import decode_arrays
from headwise.viewer.head_actions import find_evidence, measure_syntax
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view import Target, open_model
from support.page_browser import sample_model, served
from support.page_models import progress

WORDS = ["[UNK]", "dogs", "cats", "birds", "bark", "sleep", "sing", "loudly", "often", "the"]
BERT = {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2,
        "vocab_size": len(WORDS), "intermediate_size": 20, "max_position_embeddings": 64,
        "architectures": ["BertModel"]}  # fmt: skip


def test_a_text_is_scored_by_the_weights_on_the_pairs_of_the_class():
    """The class "previous" by hand: the mean weight on the token before, over all rows that have
    one.
    """
    model = sample_model()
    text = bundled_sample.TEXTS[0]
    found = find_evidence(
        model,
        {"site": 2, "head": 1, "class": "previous", "texts": [text, bundled_sample.TEXTS[1]]},
        progress(),
    )
    header, arrays = decode_arrays(found)
    source, _, target = text.partition("\t")
    own = hw.trace(model.get_model(), {"source": source, "text": target}, log=lambda _: None)
    weights = own.head_weights("encoder.2.attention", 1)
    assert arrays["scores"].shape == (2,)
    assert arrays["scores"][0] == pytest.approx(np.diagonal(weights, -1).mean(), rel=1e-4)
    pair = header["texts"][0]["pairs"][0]
    rest = weights.copy()
    np.fill_diagonal(rest, 0)
    rest[:, 0] = 0
    assert pair["weight"] == pytest.approx(rest.max(), abs=1e-4)
    assert header["texts"][0]["text"].startswith(source[:4])


def test_evidence_needs_measures():
    model = sample_model()
    model.table = None
    with pytest.raises(ValueError, match="have not been measured"):
        find_evidence(model, {"site": 2, "head": 1, "class": "previous"}, progress())


def make_parsed_model() -> OpenModel:
    net = hw.build(hw.families.read_model_spec(BERT), seed=0).eval()
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        attach_tokenizer(net, f"{folder}/tokenizer.json")
    return open_model(net, Target(text="the dogs bark loudly"))


def sentences(count: int) -> str:
    """Sentences "the NOUN VERB ADVERB" with their dependencies; the first 27 differ."""
    choices = list(product(WORDS[1:4], WORDS[4:7], WORDS[7:10]))
    order = np.random.default_rng(0).permutation(len(choices))
    blocks: list[str] = []
    for number in range(count):
        noun, verb, adverb = choices[order[number % len(choices)]]
        rows = [("the", 2, "det"), (noun, 3, "nsubj"), (verb, 0, "root"), (adverb, 3, "advmod")]
        blocks.append(
            "\n".join(
                f"{n}\t{word}\t_\t_\t_\t_\t{governor}\t{relation}\t_\t_"
                for n, (word, governor, relation) in enumerate(rows, 1)
            )
        )
    return "\n\n".join(blocks) + "\n"


def test_relations_are_measured_against_the_best_baseline(page: Any):
    """Every subject stands right before its verb here, so that a fixed distance finds all: no head
    is above it.
    """
    model = make_parsed_model()
    result = measure_syntax(model, {"conllu": sentences(30)}, progress())
    assert result["texts"] == 30
    assert model.table is not None
    measured = [head.measures["syntactic nsubj to governor"] for head in model.table.heads]
    assert all(one.chance == 1 for one in measured)
    best = max(measured, key=lambda one: one.value)
    with served(model) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.get_by_role("link", name="Class").click()
        row = page.get_by_test_id("syntax").get_by_role("row", name="nsubj governor")
        row.wait_for()
        cells = row.locator("td").all_inner_texts()
        assert float(cells[3]) == pytest.approx(best.value, abs=0.006)
        assert cells[5:] == ["1.00", "not above it"]


def test_sentences_that_cannot_be_used_are_refused():
    model = make_parsed_model()
    for text, match in (
        ("", "no sentences"),
        (sentences(1), "too few"),
        (sentences(3), "often enough"),
    ):
        with pytest.raises(ValueError, match=match):
            measure_syntax(model, {"conllu": text}, progress())


def test_the_page_shows_why_a_head_has_its_class(page: Any):
    model = sample_model()
    model.texts = bundled_sample.TEXTS
    with served(model) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/classify?site=2&head=1'")
        why = page.get_by_test_id("why")
        why.wait_for()
        assert model.table is not None
        measure = model.table.head("encoder.2.attention", 1).measures["previous"]
        assert (
            f"({measure.value:.2f} − {measure.chance:.2f}) / (1 − {measure.chance:.2f})"
            in why.inner_text()
        )
        why.get_by_role("button", name="Find the texts").click()
        best = why.get_by_role("region", name="Texts that show it best")
        best.wait_for(timeout=90_000)
        arguments = {"site": 2, "head": 1, "class": "previous", "texts": list(bundled_sample.TEXTS)}
        scores = np.sort(decode_arrays(find_evidence(model, arguments, progress()))[1]["scores"])[
            ::-1
        ]
        shown = [float(cell) for cell in best.locator("tbody td.num").all_inner_texts()]
        assert shown == pytest.approx(scores[:3], abs=0.006)
        worst = (
            why.get_by_role("region", name="Texts that show it worst")
            .locator("tbody td.num")
            .all_inner_texts()
        )
        assert [float(cell) for cell in worst] == pytest.approx(scores[-3:], abs=0.006)
        assert why.locator(".score-bars rect").count() == len(bundled_sample.TEXTS)
