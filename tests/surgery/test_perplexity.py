"""Perplexity of a text file at a stated context and stride, against transformers one token at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

import headwise as hw
from headwise.observe.inspect.model_tokenizer import with_tokenizer
from headwise.surgery.verification.evaluation_tasks import (
    PerplexityOptions,
    compare_perplexity,
    cut_windows,
    score_targets,
)
from headwise.util.errors import SpecError
from support.byte_llama import build_byte_llama

TEXT = "In the first place, a head reads what it is told to read. " * 3


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    """A random Llama of transformers, headwise's equal of it, and one with heads removed."""
    model = build_byte_llama(259)
    pruned = hw.prune(model, 0.5, ["one text", "another one"], tokenizer="bytes")
    return model, pruned.before, pruned.after


def test_the_windows_are_those_of_the_standard_protocol() -> None:
    """The loop that the guides of transformers print: begin, end and the length of its targets."""
    for size, context, stride in ((23, 7, 3), (23, 7, 7), (7, 7, 2), (8, 7, 1), (5, 9, 4)):
        expected = list[tuple[int, int, int]]()
        previous = 0
        for begin in range(0, size, stride):
            end = min(begin + context, size)
            targets = end - previous
            # labels are shifted by one, so the first token of a window is never a target
            first = max(end - targets, begin + 1)
            if first < end:
                expected.append((begin, first, end))
            previous = end
            if end == size:
                break
        assert cut_windows(size, context, stride) == expected
        scored = [at for _, first, end in expected for at in range(first, end)]
        assert len(set(scored)) == len(scored)


def test_a_perplexity_is_the_mean_of_the_losses_of_transformers(
    pair: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    model, before, after = pair
    file = tmp_path / "long.txt"
    file.write_text(TEXT)
    row = compare_perplexity(before, after, PerplexityOptions(file, context=16, stride=5))
    ids = torch.tensor([[*before.usage.prefix_ids, *TEXT.encode()]])
    losses = list[float]()
    with torch.no_grad():
        for start, first, end in cut_windows(ids.shape[1], 16, 5):
            logits = model(ids[:, start:end]).logits[0].double().log_softmax(-1)
            losses += [-float(logits[at - start - 1, ids[0, at]]) for at in range(first, end)]
    assert len(losses) == ids.shape[1] - 1
    assert row.name == "perplexity of long.txt, context 16, stride 5"
    assert row.before is not None
    assert row.change is not None
    assert row.before.value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert row.change.value == pytest.approx(row.after.value - row.before.value)
    assert row.change.low < row.change.value < row.change.high


def test_a_model_of_transformers_has_the_perplexity_of_headwises(
    pair: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    file = tmp_path / "long.txt"
    file.write_text(TEXT)
    model, before, _ = pair
    options = PerplexityOptions(file, context=16, stride=5)
    expected = compare_perplexity(before, before, options)
    row = compare_perplexity(with_tokenizer(model, "bytes"), model, options)
    assert row.name == expected.name
    assert row.after == pytest.approx(expected.after, rel=1e-5)
    rows = [list(TEXT.encode()[:n]) for n in (3, 17, 9)]
    for one, other in zip(
        *(score_targets(n, rows, [1, 5, 8]) for n in (model, before)), strict=True
    ):
        assert one.total == pytest.approx(other.total, abs=1e-4)
        assert one[1:] == other[1:]
    headless = AutoModel.from_config(model.config)
    with pytest.raises(SpecError, match="LlamaModel is a model without such a head, and next tok"):
        compare_perplexity(headless, headless, options)


def test_padding_a_batch_changes_no_score(pair: tuple[Any, Any, Any]) -> None:
    _, net, _ = pair
    rows = [list(TEXT.encode()[:n]) for n in (3, 17, 9, 2)]
    together = score_targets(net, rows, [1, 5, 8, 1])
    for index, row in enumerate(rows):
        alone = score_targets(net, [row], [[1, 5, 8, 1][index]])[0]
        assert together[index].total == pytest.approx(alone.total, abs=1e-5)
        assert together[index][1:] == alone[1:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "a context of 1 predicts no token; give 2 or more"),
        ({"context": 0}, "a context of 0 predicts no token; give 2 or more"),
        ({"stride": 0}, "a stride of 0 tokens leaves out tokens between windows"),
        ({"context": 8, "stride": 9}, "leaves out tokens between windows of 8; give 1 to 8"),
        ({"context": 900}, "one window of 900. Give a longer text, or a smaller context"),
    ],
)
def test_windows_that_leave_out_tokens_are_refused(
    pair: tuple[Any, Any, Any], tmp_path: Path, options: dict[str, int], message: str
) -> None:
    _, net, _ = pair
    file = tmp_path / "long.txt"
    file.write_text(TEXT)
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        compare_perplexity(net, net, PerplexityOptions(file, **options))


def test_models_that_predict_no_next_token_are_refused() -> None:
    config = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2}
    config |= {"num_hidden_layers": 1, "vocab_size": 300, "intermediate_size": 16}
    net = hw.build(hw.families.read_model_spec(config), seed=0)
    with pytest.raises(SpecError, match="bert is an encoder, and next tokens"):
        compare_perplexity(net, net, PerplexityOptions("unread.txt"))
