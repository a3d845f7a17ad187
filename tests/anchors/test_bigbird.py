"""BigBird as transformers has it: its block plan, said as a pattern or a mask, gives its layer's
outputs.

Where it differs from our pattern, these tests say how. Its first and last block are global, ours
the first `globals`; it draws for each head apart and only among the first 2 random + 5 blocks, we
draw one plan for all heads among all; and it draws in training alone: else it reads the first block
once more for each block it would draw.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headwise as hw
from anchors.hf import Site, linear, randomised

B, BLOCK, ROWS = 3, 2, 11
T = BLOCK * ROWS
LAST = hw.patterns.Global(tuple(range(T - BLOCK, T)))
LENGTHS = [T, 13, 6]


pytestmark = pytest.mark.usefixtures("without_gradients")


def bigbird(heads: int, random: int) -> nn.Module:
    config = tf.BigBirdConfig(
        vocab_size=37,
        hidden_size=15,
        num_attention_heads=heads,
        num_hidden_layers=2,
        intermediate_size=29,
        block_size=BLOCK,
        num_random_blocks=random,
        max_position_embeddings=T,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        sep_token_id=3,
    )
    return randomised(tf.BigBirdModel(config))


def sites(model: nn.Module) -> list[Site]:
    spec = hw.design(model=15, heads=model.config.num_attention_heads, bias="qkvo")
    found = []
    for depth, layer in enumerate(model.encoder.layer):
        inner, outer = layer.attention.self, layer.attention.output.dense
        weights = linear("output.o", outer)
        for side, name in zip("qkv", ("query", "key", "value"), strict=True):
            weights |= linear(f"project.{side}", getattr(inner, name))
        found.append(Site(inner, outer, spec, weights, ("attentions", depth)))
    return found


def passed(model: nn.Module, live: Tensor) -> list[Site]:
    """Its layers, after one pass of some tokens."""
    found = sites(model)
    hooks = [hook for each in found for hook in each.hooks()]
    model(input_ids=torch.randint(4, 37, (B, T)), attention_mask=live.long())
    assert model.attention_type == "block_sparse"  # too few tokens would make it read everything
    for hook in hooks:
        hook.remove()
    return found


def plan(attention: nn.Module) -> list[list[list[int]]]:
    """The blocks that its own functions draw for each head and each row of blocks between first and
    last.
    """
    np.random.seed(attention.seed)  # noqa: NPY002 - what transformers draws from
    where = attention._get_rand_attn_plan(T, BLOCK, attention.num_random_blocks)
    chosen = attention._bigbird_block_rand_mask_with_head(
        T, T, BLOCK, BLOCK, attention.num_attention_heads, *where
    )
    return [rows.tolist() for rows in chosen]


def fixed() -> hw.patterns.Pattern:
    """Its window and its two global blocks, as a pattern of ours."""
    return hw.patterns.BigBird(T, block=BLOCK, window=3, globals=1, random=0) | LAST


def edges(rows: list[list[int]]) -> hw.patterns.Edges:
    """One head's drawn blocks, token by token."""
    pairs = [(row, block) for row, blocks in enumerate(rows, 1) for block in blocks]
    within = list(product(range(BLOCK), repeat=2))
    return hw.patterns.Edges(
        tuple((r * BLOCK + i, c * BLOCK + j) for r, c in pairs for i, j in within)
    )


def tokens(pad: str) -> hw.SequenceInfo:
    """Blocks lie where tokens lie in the batch, so padding on the left moves no position."""
    live = hw.SequenceInfo.from_batch(
        torch.zeros(B, T),
        lengths=LENGTHS if pad != "none" else [T] * B,
        pad=pad.replace("none", "left"),
    )
    return hw.SequenceInfo(torch.arange(T).expand(B, -1), live.segment.expand(B, -1))


def far(ours: Tensor, site: Site, at: hw.SequenceInfo) -> float:
    theirs = site.outputs[0]
    return ((ours - theirs)[at.is_real].abs().max() / theirs[at.is_real].abs().max()).item()


@pytest.mark.parametrize("pad", ["none", "right", "left"])
def test_one_head_with_drawn_blocks_is_a_pattern(pad: str, record_property):
    model, at = bigbird(1, 2).train(), tokens(pad)
    worst = 0.0
    for site in passed(model, at.is_real):
        drawn_blocks = edges(plan(site.reads)[0])
        site.spec = hw.design(model=15, heads=1, bias="qkvo", pattern=fixed() | drawn_blocks)
        worst = max(worst, far(site.layer(site.inputs[0], sequence=at), site, at))
    record_property("worst", worst)
    assert worst < 1e-12


def test_heads_that_draw_apart_are_a_mask(record_property):
    """One pattern is for all heads; a mask of the caller's own can differ by head."""
    model, at = bigbird(3, 2).train(), tokens("right")
    place, worst = torch.arange(T), 0.0
    for site in passed(model, at.is_real):
        plans = plan(site.reads)
        assert plans[0] != plans[1] != plans[2]
        both = [(fixed() | edges(rows)).allows(place[:, None], place) for rows in plans]
        worst = max(
            worst,
            far(site.layer(site.inputs[0], sequence=at, mask=torch.stack(both)[None]), site, at),
        )
    record_property("worst", worst)
    assert worst < 1e-12


@pytest.mark.parametrize("pad", ["none", "right", "left"])
def test_outside_training_it_reads_the_first_block_over_and_over(pad: str, record_property):
    """Its plan is then all zeros: three times the same keys weigh as one with log 3 more, in every
    inner row.
    """
    model, at = bigbird(3, 2), tokens(pad)
    more = torch.zeros(T, T, dtype=torch.float64)
    more[BLOCK:-BLOCK, :BLOCK] = math.log(3)
    again, worst = hw.Probe("scores", callback=lambda _, s: s + more), 0.0
    for site in passed(model, at.is_real):
        assert not np.any(plan(site.reads))
        site.spec = hw.design(model=15, heads=3, bias="qkvo", pattern=fixed())
        worst = max(worst, far(site.layer(site.inputs[0], sequence=at, probe=again), site, at))
        assert far(site.layer(site.inputs[0], sequence=at), site, at) > 1e-3
    record_property("worst", worst)
    assert worst < 1e-12


@pytest.mark.parametrize("random", [1, 2])
def test_where_blocks_are_drawn_from(random: int):
    """Each inner row draws as many different blocks that it does not read already; theirs lie
    early, ours anywhere.
    """
    attention = bigbird(3, random).train().encoder.layer[1].attention.self
    ours = hw.patterns.BigBird(T, block=BLOCK, window=3, globals=1, random=random, seed=1)
    for rows in plan(attention):
        for row, blocks in enumerate(rows, 1):
            assert len(set(blocks)) == len(blocks) == random
            assert not {0, row - 1, row, row + 1, ROWS - 1} & set(blocks)
            assert max(blocks) < 2 * random + 5 - 1
    for row in range(1, ROWS):
        blocks = {column[row] for column in ours.sampled_blocks} - {-1}
        assert len(blocks) == random
        assert not {0, row - 1, row, row + 1} & blocks
    assert max(max(column) for column in ours.sampled_blocks) >= 2 * random + 5 - 1
