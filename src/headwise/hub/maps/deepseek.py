"""DeepSeek-V2 and V3, and others whose experts have tensors of their own: keys and values of a head lie together."""

from __future__ import annotations

from ..slots import TensorLocation
from .llama import LLAMA_WEIGHTS as LLAMA

OWN_LAYER, FILE_ATTENTION = "decoder.{layer}", ".layers.{layer}.self_attn"
FILE_EXPERT, FILE_SHARED_EXPERT = ".layers.{layer}.mlp.experts.{expert}", ".layers.{layer}.mlp.shared_experts"
FILE_KV_UP, FUSED_KV_LAYOUT = f"{FILE_ATTENTION}.kv_b_proj.weight", "(kv [dim|vdim]) rank"

DEEPSEEK_WEIGHTS = LLAMA._replace(
    families=("deepseek_v2", "deepseek_v3", "qwen3_moe", "olmoe"),
    locations={
        **LLAMA.locations,
        f"{OWN_LAYER}.attention.project.q_down": f"{FILE_ATTENTION}.q_a_proj.weight",
        f"{OWN_LAYER}.attention.project.q_norm": f"{FILE_ATTENTION}.q_a_layernorm.weight",
        f"{OWN_LAYER}.attention.project.q_up": f"{FILE_ATTENTION}.q_b_proj.weight",
        f"{OWN_LAYER}.attention.project.kv_down": f"{FILE_ATTENTION}.kv_a_proj_with_mqa.weight",
        f"{OWN_LAYER}.attention.project.kv_norm": f"{FILE_ATTENTION}.kv_a_layernorm.weight",
        f"{OWN_LAYER}.attention.project.k_up": TensorLocation(FILE_KV_UP, FUSED_KV_LAYOUT, {"dim|vdim": "dim"}),
        f"{OWN_LAYER}.attention.project.v_up": TensorLocation(FILE_KV_UP, FUSED_KV_LAYOUT, {"dim|vdim": "vdim"}),
        f"{OWN_LAYER}.feed.router": ".layers.{layer}.mlp.gate.weight",
        f"{OWN_LAYER}.feed.router_bias": ".layers.{layer}.mlp.gate.e_score_correction_bias",
        f"{OWN_LAYER}.feed.each.gate": TensorLocation(f"{FILE_EXPERT}.gate_proj.weight", "hidden model"),
        f"{OWN_LAYER}.feed.each.up": TensorLocation(f"{FILE_EXPERT}.up_proj.weight", "hidden model"),
        f"{OWN_LAYER}.feed.each.down": TensorLocation(f"{FILE_EXPERT}.down_proj.weight", "model hidden"),
        f"{OWN_LAYER}.feed.shared.gate": f"{FILE_SHARED_EXPERT}.gate_proj.weight",
        f"{OWN_LAYER}.feed.shared.up": f"{FILE_SHARED_EXPERT}.up_proj.weight",
        f"{OWN_LAYER}.feed.shared.down": f"{FILE_SHARED_EXPERT}.down_proj.weight",
        f"{OWN_LAYER}.feed.shared.gate_bias": f"{FILE_SHARED_EXPERT}.gate_proj.bias",
        f"{OWN_LAYER}.feed.shared.up_bias": f"{FILE_SHARED_EXPERT}.up_proj.bias",
        f"{OWN_LAYER}.feed.shared.down_bias": f"{FILE_SHARED_EXPERT}.down_proj.bias",
    },
)
