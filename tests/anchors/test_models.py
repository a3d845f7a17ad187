"""Whole models against transformers: the same config, the same weights, the same logits and the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from anchors.hf_whole import MODELS, ROTARY, VOCABULARY, made

B, T, S = 3, 11, 13
LENGTHS = {T: [T, 4, 7], S: [5, S, 9]}
PAIRS = ("t5", "t5-gated", "bart")
DECODED = ("gpt2", *ROTARY, *PAIRS)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def ids(count: int) -> Tensor:
    """Ids 0 to 2 mean something to some models."""
    return torch.randint(3, VOCABULARY, (B, count))


def check_close(got: Tensor, expected: Tensor, name: str) -> None:
    """To within a share of the largest logit; theirs takes angles and root mean squares in float32 in every dtype."""
    share = 1e-5 if name in ROTARY or name.startswith("t5") else 1e-11
    torch.testing.assert_close(got, expected, rtol=0.0, atol=share * expected.abs().max().item())


def padded(count: int, pad: str) -> tuple[hw.Tokens, dict[str, Tensor]]:
    at = hw.Tokens.of(torch.zeros(B, count), lengths=LENGTHS[count], pad=pad)
    return at, {"attention_mask": at.live.long()}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_logits_agree(name: str, tmp_path: Path):
    theirs, ours = made(name, tmp_path)
    x = ids(T)
    if name in PAIRS:
        source = ids(S)
        expected = theirs(input_ids=source, decoder_input_ids=x).logits
        got = ours(x, source=source)
        check_close(ours(x, source=ours.encode(source)), got, "bart")
    else:
        expected, got = theirs(input_ids=x).logits, ours(x)
    assert expected.abs().max() > 0.1
    check_close(got, expected, name)


def test_an_image_is_classified_alike(tmp_path: Path):
    """11 x 9 pixels are 3 x 3 patches of 3 x 3; two rows are left out."""
    theirs, ours = made("vit", tmp_path)
    pixels = torch.randn(B, 2, 11, 9, dtype=torch.float64)
    check_close(ours(pixels), theirs(pixels).logits, "vit")


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "bert-masked", "bert-classes", "t5", "bart"])
def test_padding_changes_nothing(name: str, pad: str, tmp_path: Path):
    """BART counts padding among positions, and so agrees on the right only; BERT's are handed over."""
    theirs, ours = made(name, tmp_path)
    x, (at, mask) = ids(T), padded(T, pad)
    if name in PAIRS:
        (told, hidden), source = padded(S, "right" if name == "bart" else pad), ids(S)
        at = hw.Tokens.of(x, lengths=LENGTHS[T], pad="right" if name == "bart" else pad)
        given: dict[str, Any] = {"input_ids": source, "decoder_input_ids": x} | hidden
        expected = theirs(**given, decoder_attention_mask=at.live.long()).logits
        got = ours(x, tokens=at, source=source, source_tokens=told)
    elif name == "bert-classes" and pad == "left":
        rows = [x[row : row + 1, T - length :] for row, length in enumerate(LENGTHS[T])]  # theirs reads place 0
        expected, got = torch.cat([theirs(input_ids=row).logits for row in rows]), ours(x, tokens=at)
    else:
        expected = theirs(input_ids=x, position_ids=at.position.expand(B, -1), **mask).logits
        got = ours(x, tokens=at)
    live = at.live if got.dim() == 3 else torch.ones(B, dtype=torch.bool)
    check_close(got[live], expected[live], name)


def test_types_of_tokens_agree(tmp_path: Path):
    theirs, ours = made("bert-masked", tmp_path)
    x, types = ids(T), torch.randint(0, 2, (B, T))
    got = ours(hw.models.Typed(x, types))
    check_close(got, theirs(input_ids=x, token_type_ids=types).logits, "bert")
    assert not torch.allclose(got, ours(x))


def likeliest(model: nn.Module, count: int, **given: Tensor) -> list[list[int]]:
    """Without any cache: the whole sequence anew for every token."""
    grows = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    first = given[grows].shape[1]
    for _ in range(count):
        best = model(**given, use_cache=False).logits[:, -1:].argmax(-1)
        given[grows] = torch.cat([given[grows], best], 1)
    return given[grows][:, first:].tolist()


@pytest.mark.parametrize("name", DECODED)
def test_greedy_decoding_agrees(name: str, tmp_path: Path):
    theirs, ours = made(name, tmp_path)
    prompt, source = ids(3), ids(S)
    if name in PAIRS:
        expected = likeliest(theirs, 9, input_ids=source, decoder_input_ids=prompt)
        assert hw.greedy(ours, prompt, count=9, memory=ours.encode(source)) == expected
        return
    expected = likeliest(theirs, 9, input_ids=prompt)
    assert hw.greedy(ours, prompt, count=9) == expected
    theirs.generation_config.eos_token_id = None
    said = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False, pad_token_id=0
    )
    assert said[:, 3:].tolist() == expected
