"""Mixtral: every expert has tensors of its own."""

from __future__ import annotations

from ..slots import Slot
from .llama import MAP as LLAMA

LAYER, THERE = "decoder.{layer}", ".layers.{layer}.block_sparse_moe"

MAP = LLAMA._replace(
    families=("mixtral",),
    slots={
        **LLAMA.slots,
        f"{LAYER}.feed.router": f"{THERE}.gate.weight",
        f"{LAYER}.feed.each.gate": Slot(f"{THERE}.experts.{{expert}}.w1.weight", "hidden model"),
        f"{LAYER}.feed.each.up": Slot(f"{THERE}.experts.{{expert}}.w3.weight", "hidden model"),
        f"{LAYER}.feed.each.down": Slot(f"{THERE}.experts.{{expert}}.w2.weight", "model hidden"),
    },
)
