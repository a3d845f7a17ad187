"""A random Llama of transformers that reads bytes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def build_byte_llama(vocab_size: int, **special_ids: int) -> Any:
    """Return the model in eval mode, of 2 layers with 4 heads on 2 key-value heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **special_ids,
    )
    return AutoModelForCausalLM.from_config(config).eval()
