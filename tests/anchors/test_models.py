"""Whole models against transformers and torch: padding, token types, greedy answers, layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from anchors.hf import randomised
from anchors.hf_whole import ROTARY, VOCABULARY, build_pair
from headwise.models.model_spec import BlockSpec, FeedForwardSpec, ModelSpec, NormSpec, StackSpec

B, T, S = 3, 11, 13
LENGTHS = {T: [T, 4, 7], S: [5, S, 9]}
PAIRS = ("t5", "t5-gated", "bart")
DECODED = ("gpt2", *ROTARY, *PAIRS)


pytestmark = pytest.mark.usefixtures("without_gradients")


def ids(count: int) -> Tensor:
    """Ids 0 to 2 mean something to some models."""
    return torch.randint(3, VOCABULARY, (B, count))


def check_close(got: Tensor, expected: Tensor, name: str) -> None:
    """To within a share of the largest logit; theirs takes angles and root mean squares in float32
    in every dtype.
    """
    share = 1e-5 if name in ROTARY or name.startswith("t5") else 1e-11
    torch.testing.assert_close(got, expected, rtol=0.0, atol=share * expected.abs().max().item())


def padded(count: int, pad: str) -> tuple[hw.SequenceInfo, dict[str, Tensor]]:
    at = hw.SequenceInfo.from_batch(torch.zeros(B, count), lengths=LENGTHS[count], pad=pad)
    return at, {"attention_mask": at.is_real.long()}


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "bert-masked", "bert-classes", "t5", "bart"])
def test_padding_changes_nothing(name: str, pad: str):
    """BART counts padding among positions, and so agrees on the right only;
    BERT's are handed over.
    """
    theirs, ours = build_pair(name)
    x, (at, mask) = ids(T), padded(T, pad)
    if name in PAIRS:
        (result, hidden), source = padded(S, "right" if name == "bart" else pad), ids(S)
        at = hw.SequenceInfo.from_batch(
            x, lengths=LENGTHS[T], pad="right" if name == "bart" else pad
        )
        options: dict[str, Any] = {"input_ids": source, "decoder_input_ids": x} | hidden
        expected = theirs(**options, decoder_attention_mask=at.is_real.long()).logits
        got = ours(x, sequence=at, source=source, source_sequence=result)
    elif name == "bert-classes" and pad == "left":
        # theirs reads place 0
        rows = [x[row : row + 1, T - length :] for row, length in enumerate(LENGTHS[T])]
        expected = torch.cat([theirs(input_ids=row).logits for row in rows])
        got = ours(x, sequence=at)
    else:
        expected = theirs(input_ids=x, position_ids=at.position.expand(B, -1), **mask).logits
        got = ours(x, sequence=at)
    live = at.is_real if got.dim() == 3 else torch.ones(B, dtype=torch.bool)
    check_close(got[live], expected[live], name)


def test_types_of_tokens_agree():
    theirs, ours = build_pair("bert-masked")
    x, types = ids(T), torch.randint(0, 2, (B, T))
    got = ours(hw.models.TokenTypeInput(x, types))
    check_close(got, theirs(input_ids=x, token_type_ids=types).logits, "bert")
    assert not torch.allclose(got, ours(x))


def likeliest(model: nn.Module, count: int, **options: Tensor) -> list[list[int]]:
    """Without any cache: the whole sequence anew for every token."""
    grows = "decoder_input_ids" if "decoder_input_ids" in options else "input_ids"
    first = options[grows].shape[1]
    for _ in range(count):
        best = model(**options, use_cache=False).logits[:, -1:].argmax(-1)
        options[grows] = torch.cat([options[grows], best], 1)
    return options[grows][:, first:].tolist()


@pytest.mark.parametrize("name", DECODED)
def test_greedy_decoding_agrees(name: str):
    theirs, ours = build_pair(name)
    prompt, source = ids(3), ids(S)
    if name in PAIRS:
        expected = likeliest(theirs, 17, input_ids=source, decoder_input_ids=prompt)
        encoded = ours.encode(source)
        answer = hw.generation.greedy_decode(
            ours, prompt, max_new_tokens=17, encoder_output=encoded
        )
        assert answer == expected
        check_close(ours(prompt, source=encoded), ours(prompt, source=source), "bart")
        return
    expected = likeliest(theirs, 17, input_ids=prompt)
    assert hw.generation.greedy_decode(ours, prompt, max_new_tokens=17) == expected
    theirs.generation_config.eos_token_id = None
    generated = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=17,
        do_sample=False,
        pad_token_id=0,
    )
    assert generated[:, 3:].tolist() == expected


# --- torch's own layers ---------------------------------------------------------------------------

NORM_FIRST = {"pre": True, "post": False}


def of_torch(layer: nn.Module, norms: dict[str, str]) -> dict[str, Tensor]:
    """One layer of torch under our names."""
    recorded = {}
    for name, ours in (("self_attn", "attention"), ("multihead_attn", "cross")):
        if name in dict(layer.named_children()):
            attention = getattr(layer, name)
            for side, weight, bias in zip(
                "qkv",
                attention.in_proj_weight.chunk(3),
                attention.in_proj_bias.chunk(3),
                strict=True,
            ):
                recorded |= {f"{ours}.project.{side}": weight, f"{ours}.project.{side}_bias": bias}
            recorded |= {
                f"{ours}.output.o": attention.out_proj.weight,
                f"{ours}.output.o_bias": attention.out_proj.bias,
            }
    for name, ours in (("linear1", "feed.up"), ("linear2", "feed.down")):
        recorded |= {ours: getattr(layer, name).weight, f"{ours}_bias": getattr(layer, name).bias}
    for name, ours in norms.items():
        recorded |= {
            f"{ours}.weight": getattr(layer, name).weight,
            f"{ours}.bias": getattr(layer, name).bias,
        }
    return recorded


@pytest.mark.parametrize("placement", NORM_FIRST)
def test_layers_of_torch_agree(placement: str):
    options: dict[str, Any] = {
        "d_model": 15,
        "nhead": 3,
        "dim_feedforward": 19,
        "activation": "gelu",
    }
    options |= {"batch_first": True, "norm_first": NORM_FIRST[placement], "layer_norm_eps": 1e-3}
    theirs = [
        randomised(nn.TransformerEncoderLayer(**options)),
        randomised(nn.TransformerDecoderLayer(**options)),
    ]
    every, past = (
        hw.design(model=15, heads=3, bias="qkvo", pattern=pattern)
        for pattern in ("full()", "causal()")
    )
    rest: dict[str, Any] = {
        "feed": FeedForwardSpec(19, "gelu", bias="ud"),
        "norm": NormSpec(eps=1e-3),
        "placement": placement,
    }
    stacks = (
        StackSpec.from_blocks("encoder", 15, [BlockSpec(every, **rest)]),
        StackSpec.from_blocks("decoder", 15, [BlockSpec(past, every, **rest)]),
    )
    ours = hw.build(ModelSpec("torch", "encoder-decoder", stacks)).double().eval()
    norms = [["attention_norm", "feed_norm"], ["attention_norm", "cross_norm", "feed_norm"]]
    for stack, layer, own in zip(("encoder", "decoder"), theirs, norms, strict=True):
        stored = of_torch(layer, {f"norm{n}": name for n, name in enumerate(own, 1)})
        ours.get_submodule(f"{stack}.0").load_state_dict(stored)
    source, x = (torch.randn(B, count, 15, dtype=torch.float64) for count in (S, T))
    (result, hidden), (at, mask) = padded(S, "left"), padded(T, "right")
    dead = {
        name: ~value["attention_mask"].bool() for name, value in (("source", hidden), ("x", mask))
    }
    memory = theirs[0](source, src_key_padding_mask=dead["source"])
    blind = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected = theirs[1](
        x,
        memory,
        tgt_mask=blind,
        tgt_key_padding_mask=dead["x"],
        memory_key_padding_mask=dead["source"],
    )
    got = ours(x, sequence=at, source=source, source_sequence=result)
    check_close(got[at.is_real], expected[at.is_real], "torch")
