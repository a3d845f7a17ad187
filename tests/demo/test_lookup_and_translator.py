"""The demo prints what it computes: soft lookup and translator."""

from __future__ import annotations

import json
import math
import unicodedata
from dataclasses import replace

import pytest
import torch

from headwise import costs, demo
from headwise.demo import soft_lookup, translator
from headwise.training import Recipe

# Checked by hand: three quarters of 40 and an eighth of 43 and 48; 45.5 by symmetry; (40/6 + 43 +
# 48) / (1/6 + 2); the others by kernel regression with these widths.
VALUES = [41.375, 45.5, 45.0769, 45.5, 45.5, 45.49999993, 45.465599, 44.406018, 43.873980]


def test_soft_look_up_gives_the_known_numbers():
    found = [one.value for one in soft_lookup.look_up_by_all_methods()]
    for ours, expected in zip(found, VALUES, strict=True):
        assert math.isclose(
            ours, expected, abs_tol=6 * 10.0 ** -len(str(expected).partition(".")[2])
        ), (ours, expected)


def test_every_answer_is_a_mean():
    assert all(
        math.isclose(sum(one.weights), 1) and min(one.weights) >= 0
        for one in soft_lookup.look_up_by_all_methods()
    )


def test_weights_that_grow_with_distance_go_wrong():
    (beside, line), (met, key) = soft_lookup.counterexamples()
    assert (beside.value, line.value) == (46.75, 44.25)
    assert (met.weights[0], key.value) == (0, 40)
    assert round(met.value, 2) == 45.92


def test_the_pages_fit_a_terminal_and_end_with_a_proof():
    recorded: list[str] = []
    demo.run_demo(recorded.append, recorded.append)
    lines = "\n".join(recorded).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("float64") for line in lines)


def test_the_data_equals_the_counts_of_the_library():
    data = json.loads(json.dumps(demo.demo_data()))
    assert data["counts"]["parameters"] == costs.count_parameters(demo.demo_spec())
    exact = next(row for row in data["proof"] if row["dtype"] == "float64")
    assert 0 < exact["largest"] < 1e-12
    assert exact["tokens"] > exact["slots"]  # the ring has forgotten, and nothing changed


@pytest.mark.parametrize("width", [1e-3, 1e6])
def test_kernel_regression_at_its_ends(width: float):
    near = soft_lookup.look_up(
        "end", soft_lookup.gaussian_weights(width), query=56.4 if width < 1 else 57.0
    )
    assert math.isclose(
        near.value, 43.0 if width < 1 else sum(soft_lookup.VALUES) / 3, rel_tol=1e-6
    )


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> translator.Translator:
    options = {
        "steps": 2,
        "batch": 8,
        "evaluate_every": 2,
        "evaluate_batches": 1,
        "precision": "fp32",
        "compile": "off",
    }
    return translator.Translator(
        tmp_path_factory.mktemp("demo") / "run", Recipe(**options, attention="fused")
    )


def wide(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in line)


def test_the_translators_pages_fit_a_terminal(learned: translator.Translator):
    pages = [learned.training_page(), learned.examples_page(), learned.alignment_page()]
    assert max(wide(line) for page in pages for line in page.splitlines()) <= 80
    assert "2 steps" in pages[0]
    assert {one.direction for one in learned.batch.gold} == {
        line.split()[0] for line in pages[1].splitlines()[::2]
    }


def test_heads_are_judged_by_known_links(learned: translator.Translator):
    """Weights that stand on one known link of each token are right everywhere, and elsewhere
    nowhere.
    """
    batch, net = learned.batch, learned.result.net
    for w_BHTS in translator.cross_attention_weights(net, batch).values():
        live = batch.tokens.is_real[:, None].expand(w_BHTS.shape[:3])
        torch.testing.assert_close(w_BHTS.sum(-1), live.float())
    shape = (len(batch.gold), batch.x.shape[1], batch.source.shape[1])
    good, bad = torch.zeros(shape), torch.zeros(shape)
    for row, one in enumerate(batch.gold):
        for s, t in one.links:
            good[row, t, s] = 1.0
        bad[row, :, 0] = 1.0  # the tag, which translates nothing
    counts = {translator.count_correct_links(weights, batch) for weights in (good, bad)}
    request = sum(len({t for _, t in one.links}) for one in batch.gold)
    assert counts == {(request, request), (0, request)}
    assert net.probes == {}


def test_the_picture_shows_weights_where_they_are(learned: translator.Translator):
    alignment_map = translator.make_alignment_map(
        learned.result.net, learned.head_alignments[0], learned.batch
    )
    assert all(abs(sum(row) - 1) < 1e-5 for row in alignment_map.weights)
    sharp = replace(
        alignment_map,
        weights=tuple(
            tuple(float(s == 1) for s in range(len(row))) for row in alignment_map.weights
        ),
    )
    for line in str(sharp).splitlines()[1:]:
        assert line.count("█") == 1


def test_a_translator_that_is_there_is_not_trained_again(learned: translator.Translator):
    again = translator.Translator(learned.folder, learned.recipe)
    before = (learned.folder / "model.safetensors").read_bytes() if learned.result else b""
    assert again.result.metrics["exact_match"] == learned.result.metrics["exact_match"]
    assert (learned.folder / "model.safetensors").read_bytes() == before
    assert json.loads(json.dumps(again.data))["steps"] == 2
