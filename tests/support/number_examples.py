"""Texts of numbers as examples, and small models with sharp attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from support.tiny_configs import model_config

WORDS = 29


def make_example(ids: Sequence[int], name: str = "x") -> Example:
    """A text of these ids under this input name."""
    ids_, none = torch.tensor(list(ids)), torch.zeros(len(ids), dtype=torch.bool)
    words = tuple(map(str, ids))
    tokens = TokenAnnotations(
        ids_, words, none, none, none, torch.arange(len(ids)), torch.ones(len(ids))
    )
    return Example({name: ids_[None]}, {"text": tokens})


def make_examples(
    count: int = 5, name: str = "x", words: int = WORDS, longest: int = 17
) -> list[Example]:
    """Several texts of different lengths."""
    draw = np.random.default_rng(3)
    return [
        make_example(draw.integers(3, words, size=draw.integers(7, longest)).tolist(), name)
        for _ in range(count)
    ]


def small_gpt2(layers: int = 2, heads: int = 4, seed: int = 0, sharp: float = 6.0) -> nn.Module:
    """A GPT-2 of 20 channels with random weights and sharp attention."""
    config = model_config("gpt2", n_embd=20, n_head=heads, n_layer=layers, vocab_size=WORDS)
    net = hw.build(hw.families.read_model_spec(config), seed=seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(("project.q", "project.k")):
                parameter.mul_(sharp)
    return net.eval()
