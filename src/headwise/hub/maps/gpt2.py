"""GPT-2: matrices lie as (in, out), and those of queries, keys and values side by side."""

from __future__ import annotations

from ..plan import Map
from ..slots import Slot

MATRIX, BIAS = ".h.{layer}.attn.c_attn.weight", ".h.{layer}.attn.c_attn.bias"
FUSED = {"qkv": 3}

MAP = Map(
    families=("gpt2",),
    trunks=("transformer", ""),
    slots={
        "decoder.embedding.tokens": ".wte.weight",
        "decoder.embedding.positions": ".wpe.weight",
        "decoder.{layer}.attention_norm.weight": ".h.{layer}.ln_1.weight",
        "decoder.{layer}.attention_norm.bias": ".h.{layer}.ln_1.bias",
        "decoder.{layer}.attention.project.q": Slot(MATRIX, "model (qkv q dim)", {"qkv": 0}, FUSED),
        "decoder.{layer}.attention.project.k": Slot(MATRIX, "source (qkv kv dim)", {"qkv": 1}, FUSED),
        "decoder.{layer}.attention.project.v": Slot(MATRIX, "source (qkv kv vdim)", {"qkv": 2}, FUSED),
        "decoder.{layer}.attention.project.q_bias": Slot(BIAS, "(qkv q dim)", {"qkv": 0}, FUSED),
        "decoder.{layer}.attention.project.k_bias": Slot(BIAS, "(qkv kv dim)", {"qkv": 1}, FUSED),
        "decoder.{layer}.attention.project.v_bias": Slot(BIAS, "(qkv kv vdim)", {"qkv": 2}, FUSED),
        "decoder.{layer}.attention.output.o": Slot(".h.{layer}.attn.c_proj.weight", "(out vdim) model"),
        "decoder.{layer}.attention.output.o_bias": ".h.{layer}.attn.c_proj.bias",
        "decoder.{layer}.feed_norm.weight": ".h.{layer}.ln_2.weight",
        "decoder.{layer}.feed_norm.bias": ".h.{layer}.ln_2.bias",
        "decoder.{layer}.feed.up": Slot(".h.{layer}.mlp.c_fc.weight", "model hidden"),
        "decoder.{layer}.feed.up_bias": ".h.{layer}.mlp.c_fc.bias",
        "decoder.{layer}.feed.down": Slot(".h.{layer}.mlp.c_proj.weight", "hidden model"),
        "decoder.{layer}.feed.down_bias": ".h.{layer}.mlp.c_proj.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)
