"""Mixtral: every expert has tensors of its own."""

from __future__ import annotations

from ..slots import TensorLocation
from .llama import LLAMA_WEIGHTS as LLAMA

OWN_LAYER, FILE_EXPERTS = "decoder.{layer}", ".layers.{layer}.block_sparse_moe"

MIXTRAL_WEIGHTS = LLAMA._replace(
    families=("mixtral",),
    locations={
        **LLAMA.locations,
        f"{OWN_LAYER}.feed.router": f"{FILE_EXPERTS}.gate.weight",
        f"{OWN_LAYER}.feed.each.gate": TensorLocation(f"{FILE_EXPERTS}.experts.{{expert}}.w1.weight", "hidden model"),
        f"{OWN_LAYER}.feed.each.up": TensorLocation(f"{FILE_EXPERTS}.experts.{{expert}}.w3.weight", "hidden model"),
        f"{OWN_LAYER}.feed.each.down": TensorLocation(f"{FILE_EXPERTS}.experts.{{expert}}.w2.weight", "model hidden"),
    },
)
