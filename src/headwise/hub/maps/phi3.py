"""Phi-3: queries, keys and values end to end in one matrix, gates and ups in another."""

from __future__ import annotations

from ..slots import TensorLocation
from .llama import LLAMA_WEIGHTS as LLAMA

PHI3_QKV, PHI3_PROJECTION = ".layers.{layer}.self_attn.qkv_proj.weight", "decoder.{layer}.attention.project"
FUSED_QKV_LAYOUT, FUSED_GATE_UP_LAYOUT = "([q|kv|v] dim) model", "(side hidden) model"
PHI3_GATE_UP = ".layers.{layer}.mlp.gate_up_proj.weight"

FUSED_GATE_UP_NAMES = {
    "decoder.{layer}.feed.gate": TensorLocation(PHI3_GATE_UP, FUSED_GATE_UP_LAYOUT, {"side": 0}, {"side": 2}),
    "decoder.{layer}.feed.up": TensorLocation(PHI3_GATE_UP, FUSED_GATE_UP_LAYOUT, {"side": 1}, {"side": 2}),
}
PHI3_WEIGHTS = LLAMA._replace(
    families=("phi3",),
    locations={
        **LLAMA.locations,
        **FUSED_GATE_UP_NAMES,
        f"{PHI3_PROJECTION}.q": TensorLocation(PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "q"}, own_layout="(q dim) model"),
        f"{PHI3_PROJECTION}.k": TensorLocation(PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "kv"}, own_layout="(kv dim) model"),
        f"{PHI3_PROJECTION}.v": TensorLocation(PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "v"}, own_layout="(v dim) model"),
    },
)
