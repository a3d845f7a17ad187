"""Folders of saved models, ours and those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary
from support.tiny_configs import model_config
from support.transformers_models import ZOO

GPT = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=256, n_positions=24)


def save_byte_model(config: dict[str, Any], folder: Path) -> hw.Transformer:
    """Save a model of ours with a byte tokenizer; return it."""
    net = hw.build(hw.families.read_model_spec(config), seed=0)
    net.usage = hw.ProcessorSpec(tokenizer=ByteVocabulary().document)
    hw.save(net, folder)
    return net


def save_transformers_model(name: str, folder: Path, **keys: Any) -> None:
    """Save a model of transformers with random weights and a byte tokenizer."""
    foreign = ZOO[name]
    keys = {**foreign.keys, "vocab_size": 300, "eos_token_id": None, **keys}
    torch.manual_seed(0)
    model = foreign._replace(keys=keys).build("sdpa")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteVocabulary().document)


def save_models(base: Path) -> dict[str, Path]:
    """Save a model of ours and two of transformers, all with a byte tokenizer."""
    save_byte_model(GPT, base / "ours")
    for name in ("gpt2", "t5"):
        save_transformers_model(name, base / name)
    return {path.name: path for path in base.iterdir()}
