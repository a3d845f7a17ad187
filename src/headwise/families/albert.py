"""ALBERT: one layer that serves all depths, and a table narrower than it (1909.11942)."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint import ModelSpec, HeadTransformSpec
from ..presets import design
from . import reading
from .config import TransformersConfig
from .electra import factorized_embedding, factorized_token_head, make_token_head
from .registry import register_family, read_tied_stack

ALBERT_DEFAULTS = reading.EncoderDefaults(4096, 64, 12, 30000, 16384, "gelu_new")


@register_family("albert", "Albert", default_task="ForMaskedLM")
def read_albert(config: TransformersConfig, task: str) -> ModelSpec:
    """Every depth has a state of its own and the weights of the first."""
    sizes = reading.read_encoder_sizes(config, ALBERT_DEFAULTS)
    for name in ("num_hidden_groups", "inner_group_num"):
        config.require_default(name, 1, "makes several layers that take turns, which is not described")
    narrow = config.read_int("embedding_size", default=128)
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    length, types = config.read_int("max_position_embeddings", default=512), config.read_int("type_vocab_size", default=2)
    if narrow == sizes.model:
        config.fail(f"embedding_size = {narrow} is hidden_size", "give a narrower one: the map between is learned too")
    beyond = (factorized_embedding(narrow, sizes.model, length + types + sizes.vocab_size),)
    body = replace(reading.make_encoder_stack(sizes, [attention] * sizes.layers, None), weights_of="first")
    owner = read_tied_stack(config, "encoder", True)
    if task == "ForMaskedLM":
        beyond += (factorized_token_head(narrow, sizes.vocab_size, owner),)
    said = reading.EncoderHeads(HeadTransformSpec(sizes.model), make_token_head(sizes, narrow, sizes.activation, owner))
    return reading.build_encoder(config, task, body, said, beyond)
