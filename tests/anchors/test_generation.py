"""Generation against transformers: what is drawn from, what beams find, what a penalty does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs_

import headwise as hw
from anchors.hf_whole import VOCABULARY, build_pair
from headwise.models.generation.decoding_state import apply_repetition_penalty, filter_logits
from headwise.models.generation.generate import TextGenerator, parse_prompts

ROWS, WORDS = 40, 23
END, START = 2, 3
FILTERS: dict[str, tuple[Any, ...]] = {
    "top_k": (theirs_.TopKLogitsWarper, 5),
    "top_p": (theirs_.TopPLogitsWarper, 0.8),
    "min_p": (theirs_.MinPLogitsWarper, 0.15),
}


pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.mark.parametrize(
    "chosen", [("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), tuple(FILTERS)]
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_what_is_drawn_from_is_theirs(chosen: tuple[str, ...], temperature: float):
    """Penalty, temperature, top-k, top-p, min-p, in the order in which their
    generation has them.
    """
    logits, past = torch.randn(ROWS, WORDS) * 3, torch.randint(0, WORDS, (ROWS, 7))
    logits[:, 5] = logits[:, 9]  # a tie
    steps = [
        theirs_.RepetitionPenaltyLogitsProcessor(1.6),
        theirs_.TemperatureLogitsWarper(temperature),
    ]
    steps += [FILTERS[name][0](FILTERS[name][1]) for name in chosen]
    expected = LogitsProcessorList(steps)(past, logits.clone())
    how = hw.DecodingConfig(repetition=1.6, **{name: FILTERS[name][1] for name in chosen})
    got = filter_logits(
        apply_repetition_penalty(logits, past.tolist(), how.repetition) / temperature, how
    )
    assert torch.equal(got, expected)
    assert not expected.isfinite().all()


def test_their_order_is_the_one_we_follow():
    """As their generation puts them together from a configuration."""
    net = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=4, n_head=1, n_layer=1, vocab_size=WORDS))
    generation_config = tf.GenerationConfig(
        do_sample=True, temperature=0.5, repetition_penalty=1.6, top_k=5, top_p=0.8, min_p=0.15
    )
    steps = net._get_logits_processor(
        generation_config, input_ids_seq_length=1, prefix_allowed_tokens_fn=None
    )
    names = ["RepetitionPenalty", "Temperature", "TopK", "TopP", "MinP"]
    assert [
        type(step).__name__.removesuffix("Warper").removesuffix("Processor") for step in steps
    ] == [f"{name}Logits" for name in names]


def text_generator(net: hw.Transformer, **options: Any) -> TextGenerator:
    return TextGenerator.from_options(net, options.pop("count"), 0.0, hw.DecodingConfig(**options))


def generate_with_transformers(theirs: Any, ids: Tensor, **options: Any) -> Any:
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": END,
        **options,
    }
    theirs.generation_config = tf.GenerationConfig(bos_token_id=START, decoder_start_token_id=START)
    return theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


def cut(rows: Tensor, end: int) -> list[list[int]]:
    """Up to the end."""
    return [row[: row.index(end)] if end in row else row for row in rows.tolist()]


@pytest.mark.parametrize("penalty", [-0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_beams_find_what_theirs_find(name: str, penalty: float):
    theirs, ours = build_pair(name)
    x = torch.randint(4, VOCABULARY, (3, 5))
    ours.usage = hw.ProcessorSpec(bos=(START,))
    free = hw.generate(ours.float(), x, max_new_tokens=6, config=hw.DecodingConfig(beams=4, best=4))
    end = free[0][1][3]  # so that some answers end early
    options = {
        "num_beams": 4,
        "num_return_sequences": 4,
        "length_penalty": penalty,
        "early_stopping": "never",
    }
    result = generate_with_transformers(theirs.float(), x, **options, eos_token_id=end)
    expected = cut(result.sequences[:, 1 if name == "bart" else x.shape[1] :], end)
    assert penalty > 1 or len({len(row) for row in expected}) > 1
    how = text_generator(ours, count=6, beams=4, best=4, length_penalty=penalty, end=end)
    got = [one for best in how.answers(parse_prompts(ours, x)) for one in best]
    assert [one.ids for one in got] == expected
    torch.testing.assert_close(
        torch.tensor([one.score for one in got]), result.sequences_scores, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_a_penalty_for_repetition_does_what_theirs_does(beams: int):
    theirs, ours = build_pair("gpt2")
    x = torch.randint(4, VOCABULARY, (3, 5))
    options = {"repetition_penalty": 1.7, "num_beams": beams} | (
        {"early_stopping": "never"} if beams > 1 else {}
    )
    expected = cut(generate_with_transformers(theirs.float(), x, **options).sequences[:, 5:], END)
    plain = hw.generate(ours.float(), x, max_new_tokens=6)
    got = hw.generate(
        ours, x, max_new_tokens=6, config=hw.DecodingConfig(beams=beams, repetition=1.7, end=(END,))
    )
    assert got == expected
    assert got != plain
