"""Retrieval scores against a hand-set retrieval head, and against numpy over the weights that
transformers returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import headwise as hw
from headwise.observe.head_analysis.retrieval_heads import (
    HiddenNeedle,
    Needle,
    find_decoder_sites,
    hide_needle,
    make_needles,
    read_ids,
    read_needles,
    run_hidden_needles,
    top_heads,
)
from headwise.observe.inspect.model_tokenizer import use_tokenizer
from headwise.report.data import Estimate as Measure
from headwise.util.errors import SpecError
from observe.head_analysis.handset_heads import induction_model
from support.refusals import refused_cases
from support.transformers_models import ZOO

# a needle behind token 2, which also ends the question; the answer repeats the needle
NEEDLES = [
    ([0, 1, 2], [3, 4, 5, 6], [7, 8]),
    ([0, 2], [9, 4, 7], [1, 8, 3]),
    ([0, 5, 1, 2], [8, 3, 6], [7]),
    ([0, 4, 2], [6, 1, 9, 3], [8, 7]),
    ([0, 7, 2], [1, 4, 5], [9]),
    ([0, 2], [7, 9, 8, 1, 5], [3]),
]


def hide(before: list[int], needle: list[int], behind: list[int], question: int) -> HiddenNeedle:
    start = len(before)
    ids = torch.tensor([*before, *needle, *behind, question, *needle])
    return HiddenNeedle(ids, range(start, start + len(needle)))


def run(model: Any, tests: list[HiddenNeedle]) -> tuple[dict[str, Measure], str]:
    """The scores of the heads by name, and the note."""
    table = run_hidden_needles(model, find_decoder_sites(model), list(enumerate(tests)))
    return {table.name(one): one.measures["retrieval"] for one in table.heads}, table.notes[0]


def test_the_hand_set_induction_head_retrieves_every_token():
    tests = [hide(*one, 2) for one in NEEDLES]
    scores, note = run(induction_model(), tests)
    assert note == (
        "the model found 6 of 6 hidden needles: 1 of 6 heads are retrieval heads (score 0.1 or "
        "more, corrected p below 0.05)"
    )
    assert scores["L1H0"].value == 1
    assert scores["L1H0"].rows == 22
    assert scores["L1H0"].p < 0.001
    # of all tokens of the needle, its largest key at another step is on the one that is predicted
    lengths = [len(needle) for _, needle, _ in NEEDLES]
    assert scores["L1H0"].chance == pytest.approx(len(lengths) / sum(lengths))
    uniform = 0.0
    for one in tests:
        steps = range(len(one.needle))
        uniform += sum(1 / (len(one.ids) - len(one.needle) + step) for step in steps)
    for name in ("L0H0", "L0H1"):  # they read the previous and the first token
        assert scores[name].value == 0
        assert scores[name].chance == pytest.approx(uniform / 22)


def test_a_head_without_a_cue_misses_the_first_token():
    """Token 10 stands nowhere before: nothing is found behind it."""
    scores, _ = run(induction_model(), [hide(*one, 10) for one in NEEDLES])
    assert scores["L1H0"].value == pytest.approx((22 - 6) / 22)


def retrieval_by_numpy(model: Any, ids: list[int], needle: range) -> np.ndarray:
    """Retrieved tokens of each head, token by token: [layers, heads, 3]."""
    output = model(torch.tensor([ids]), output_attentions=True)
    logits = output.logits[0].detach().numpy()
    counts = []
    for weights in output.attentions:
        by_head = []
        for rows in weights[0].detach().numpy():
            own = uniform = 0.0
            steps = range(len(ids) - len(needle) - 1, len(ids) - 1)
            for step in steps:
                word = int(logits[step].argmax())
                copies = [place for place in needle if ids[place] == word]
                own += int(rows[step].argmax()) in copies
                uniform += len(copies) / (step + 1)
            permuted = 0
            for step in steps:
                word = int(logits[step].argmax())
                for other in steps:
                    key = int(rows[other].argmax())
                    permuted += key in needle and ids[key] == word
            by_head.append([own, uniform, permuted / len(needle)])
        counts.append(by_head)
    return np.array(counts)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_scores_equal_numpy_over_the_weights_of_transformers(name):
    torch.manual_seed(3)
    model = ZOO[name].build("eager")
    draw = np.random.default_rng(5)
    tests = []
    expected = []
    counts = []
    for _ in range(4):
        before, behind = (draw.integers(3, 9, length).tolist() for length in (7, 5))
        needle = draw.integers(3, 9, 6).tolist()
        ids = torch.tensor([*before, *needle, *behind, *needle])
        hidden = HiddenNeedle(ids, range(7, 13))
        with torch.no_grad():  # the model's own continuation, so that it finds the needle
            for step in range(len(ids) - 6, len(ids)):
                ids[step] = ids[7 + step - 18] = model(ids[None, :step]).logits[0, -1].argmax()
            predicted = model(ids[None, :-1]).logits[0, -6:].argmax(-1)
        if (predicted == ids[-6:]).float().mean() >= 0.5:
            tests.append(hidden)
            expected.append(retrieval_by_numpy(model, ids.tolist(), hidden.needle))
            counts.append(6)
    assert len(tests) >= 2
    scores, _ = run(model, tests)
    total = np.sum(expected, 0) / np.sum(counts)
    assert total[..., 0].max() > 0
    measured = np.array([one.value for one in scores.values()]).reshape(total.shape[:2])
    chance = np.array([one.chance for one in scores.values()]).reshape(total.shape[:2])
    assert measured == pytest.approx(total[..., 0], abs=1e-12)
    assert chance == pytest.approx(total[..., 1:].max(-1), abs=1e-7)


def test_needles_are_hidden_between_texts():
    texts = [[10, 11, 12], [13, 14], [15, 16, 17]]
    haystack, start = hide_needle(texts, [3, 4], 12, 0.5)
    assert (haystack, start) == ([10, 11, 12, 13, 14, 3, 4, 15, 16, 17, 10, 11, 12, 13], 5)
    assert [hide_needle(texts, [3, 4], 12, depth)[1] for depth in (0, 1)] == [0, 12]


def test_depths_stay_apart_in_one_long_text():
    text = list(range(1000))
    starts = [hide_needle([text], [3, 4], 512, depth)[1] for depth in (0.25, 0.5, 0.75)]
    assert starts == [128, 256, 384]
    sentences = [text[start : start + 40] for start in range(0, 1000, 40)]
    starts = [hide_needle(sentences, [3, 4], 512, depth)[1] for depth in (0.25, 0.5, 0.75)]
    assert starts == [120, 240, 400]


@pytest.mark.parametrize("end", [".", "!", "?", "\u3002", "\uff01", "\uff1f"])
def test_long_texts_are_cut_at_the_ends_of_sentences(end):
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    model = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, f"c{end}": 3}, unk_token="[UNK]"))
    model.pre_tokenizer = WhitespaceSplit()
    with use_tokenizer(net, model) as reader:
        prefix, sentences, _ = read_ids(reader, [f"a b c{end} b c{end} a", "a a"])
    assert (prefix, sentences) == ([], [[1, 2, 3], [2, 3], [1], [1, 1]])


def test_needles_and_lengths_that_are_none_are_refused():
    config = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 1, "vocab_size": 256}
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    with pytest.raises(SpecError, match=r"lengths is empty; give .* such as lengths=\[128\]"):
        hw.head_analysis.measure_retrieval(net, lengths=[], tokenizer="bytes")
    with pytest.raises(SpecError, match="each of lengths must be a whole number of at least 1"):
        hw.head_analysis.measure_retrieval(net, lengths=[0], tokenizer="bytes")
    cases: list[Any] = [[("The key is red.", "Which key?")], ["The key is red."]]
    for needles in cases:
        kind = type(needles[0]).__name__
        words = f"needle 0 is of type {kind}; give Needle\\(text, question\\)"
        with pytest.raises(SpecError, match=words):
            hw.head_analysis.measure_retrieval(net, needles, tokenizer="bytes")


def test_a_model_that_finds_nothing_has_no_scores():
    config = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 256}
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    table = hw.head_analysis.measure_retrieval(net, lengths=[40], tokenizer="bytes")
    assert table.notes[0] == "the model found 0 of 50 hidden needles: no score"
    assert all(np.isnan(one.measures["retrieval"].value) for one in table.heads)
    assert not top_heads(table, "retrieval").rows


def test_needles_follow_the_seed_and_files(tmp_path):
    assert make_needles(4) == make_needles(4)
    assert make_needles(4) != make_needles(4, seed=1)
    assert len({one.text for one in make_needles(40)}) == 40
    (tmp_path / "needles").write_text("The key is red.\tWhich key?\nA b.\tC?\n")
    assert read_needles(tmp_path / "needles") == [
        Needle("The key is red.", "Which key?"),
        Needle("A b.", "C?"),
    ]
    (tmp_path / "wrong").write_text("no question\n")
    with pytest.raises(SpecError, match="line 1 has 1 column; write NEEDLE, tab, QUESTION"):
        read_needles(tmp_path / "wrong")


@pytest.mark.parametrize(("config", "words"), refused_cases(__file__, "needles", {}))
def test_models_without_a_retrieval_heads(config, words):
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.measure_retrieval(net, tokenizer="bytes")
