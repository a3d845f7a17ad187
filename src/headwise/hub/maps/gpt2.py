"""GPT-2: matrices lie as (in, out), and those of queries, keys and values side by side."""

from __future__ import annotations

from ..plan import WeightNames
from ..slots import TensorLocation

FUSED_QKV, FUSED_QKV_BIAS = ".h.{layer}.attn.c_attn.weight", ".h.{layer}.attn.c_attn.bias"
QKV_AXIS = {"qkv": 3}

GPT2_WEIGHTS = WeightNames(
    families=("gpt2",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".wte.weight",
        "decoder.embedding.positions": ".wpe.weight",
        "decoder.{layer}.attention_norm.weight": ".h.{layer}.ln_1.weight",
        "decoder.{layer}.attention_norm.bias": ".h.{layer}.ln_1.bias",
        "decoder.{layer}.attention.project.q": TensorLocation(FUSED_QKV, "model (qkv q dim)", {"qkv": 0}, QKV_AXIS),
        "decoder.{layer}.attention.project.k": TensorLocation(FUSED_QKV, "source (qkv kv dim)", {"qkv": 1}, QKV_AXIS),
        "decoder.{layer}.attention.project.v": TensorLocation(FUSED_QKV, "source (qkv kv vdim)", {"qkv": 2}, QKV_AXIS),
        "decoder.{layer}.attention.project.q_bias": TensorLocation(FUSED_QKV_BIAS, "(qkv q dim)", {"qkv": 0}, QKV_AXIS),
        "decoder.{layer}.attention.project.k_bias": TensorLocation(FUSED_QKV_BIAS, "(qkv kv dim)", {"qkv": 1}, QKV_AXIS),
        "decoder.{layer}.attention.project.v_bias": TensorLocation(FUSED_QKV_BIAS, "(qkv kv vdim)", {"qkv": 2}, QKV_AXIS),
        "decoder.{layer}.attention.output.o": TensorLocation(".h.{layer}.attn.c_proj.weight", "(out vdim) model"),
        "decoder.{layer}.attention.output.o_bias": ".h.{layer}.attn.c_proj.bias",
        "decoder.{layer}.feed_norm.weight": ".h.{layer}.ln_2.weight",
        "decoder.{layer}.feed_norm.bias": ".h.{layer}.ln_2.bias",
        "decoder.{layer}.feed.up": TensorLocation(".h.{layer}.mlp.c_fc.weight", "model hidden"),
        "decoder.{layer}.feed.up_bias": ".h.{layer}.mlp.c_fc.bias",
        "decoder.{layer}.feed.down": TensorLocation(".h.{layer}.mlp.c_proj.weight", "hidden model"),
        "decoder.{layer}.feed.down_bias": ".h.{layer}.mlp.c_proj.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)
