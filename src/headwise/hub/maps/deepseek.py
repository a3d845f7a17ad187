"""DeepSeek-V2 and V3, and others whose experts have tensors of their own: keys and values of a head lie together."""

from __future__ import annotations

from ..slots import Slot
from .llama import MAP as LLAMA

LAYER, ATTENTION = "decoder.{layer}", ".layers.{layer}.self_attn"
EXPERT, SHARED = ".layers.{layer}.mlp.experts.{expert}", ".layers.{layer}.mlp.shared_experts"
UP, BOTH = f"{ATTENTION}.kv_b_proj.weight", "(kv [dim|vdim]) rank"

MAP = LLAMA._replace(
    families=("deepseek_v2", "deepseek_v3", "qwen3_moe", "olmoe"),
    slots={
        **LLAMA.slots,
        f"{LAYER}.attention.project.q_down": f"{ATTENTION}.q_a_proj.weight",
        f"{LAYER}.attention.project.q_norm": f"{ATTENTION}.q_a_layernorm.weight",
        f"{LAYER}.attention.project.q_up": f"{ATTENTION}.q_b_proj.weight",
        f"{LAYER}.attention.project.kv_down": f"{ATTENTION}.kv_a_proj_with_mqa.weight",
        f"{LAYER}.attention.project.kv_norm": f"{ATTENTION}.kv_a_layernorm.weight",
        f"{LAYER}.attention.project.k_up": Slot(UP, BOTH, {"dim|vdim": "dim"}),
        f"{LAYER}.attention.project.v_up": Slot(UP, BOTH, {"dim|vdim": "vdim"}),
        f"{LAYER}.feed.router": ".layers.{layer}.mlp.gate.weight",
        f"{LAYER}.feed.router_bias": ".layers.{layer}.mlp.gate.e_score_correction_bias",
        f"{LAYER}.feed.each.gate": Slot(f"{EXPERT}.gate_proj.weight", "hidden model"),
        f"{LAYER}.feed.each.up": Slot(f"{EXPERT}.up_proj.weight", "hidden model"),
        f"{LAYER}.feed.each.down": Slot(f"{EXPERT}.down_proj.weight", "model hidden"),
        f"{LAYER}.feed.shared.gate": f"{SHARED}.gate_proj.weight",
        f"{LAYER}.feed.shared.up": f"{SHARED}.up_proj.weight",
        f"{LAYER}.feed.shared.down": f"{SHARED}.down_proj.weight",
        f"{LAYER}.feed.shared.gate_bias": f"{SHARED}.gate_proj.bias",
        f"{LAYER}.feed.shared.up_bias": f"{SHARED}.up_proj.bias",
        f"{LAYER}.feed.shared.down_bias": f"{SHARED}.down_proj.bias",
    },
)
