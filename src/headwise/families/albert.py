"""ALBERT: one layer that serves all depths, and a table narrower than it (1909.11942)."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint import Model, Transform
from ..presets import design
from . import reading
from .config import Config
from .electra import narrower, outside, told
from .registry import family, tied

USUAL = reading.Usual(4096, 64, 12, 30000, 16384, "gelu_new")


@family("albert", "Albert", usual="ForMaskedLM")
def albert(config: Config, task: str) -> Model:
    """Every depth has a state of its own and the weights of the first."""
    sizes = reading.encoder(config, USUAL)
    for name in ("num_hidden_groups", "inner_group_num"):
        config.refuse(name, 1, "makes several layers that take turns, which is not described")
    narrow = config.size("embedding_size", default=128)
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    length, types = config.size("max_position_embeddings", default=512), config.size("type_vocab_size", default=2)
    if narrow == sizes.model:
        config.wrong(f"embedding_size = {narrow} is hidden_size", "give a narrower one: the map between is learned too")
    beyond = (narrower(narrow, sizes.model, length + types + sizes.tokens),)
    body = replace(reading.stack(sizes, [attention] * sizes.layers, None), weights_of="first")
    owner = tied(config, "encoder", True)
    if task == "ForMaskedLM":
        beyond += (outside(narrow, sizes.tokens, owner),)
    said = reading.Said(Transform(sizes.model), told(sizes, narrow, sizes.act, owner))
    return reading.whole(config, task, body, said, beyond)
