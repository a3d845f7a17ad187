"""Phi: one norm for both sublayers, and a head with a bias."""

from __future__ import annotations

from .stablelm import LAYER, THERE
from .stablelm import MAP as STABLELM

MORE = {
    f"{LAYER}.attention.output.o": f"{THERE}.self_attn.dense.weight",
    f"{LAYER}.attention.output.o_bias": f"{THERE}.self_attn.dense.bias",
    f"{LAYER}.feed.up": f"{THERE}.mlp.fc1.weight",
    f"{LAYER}.feed.up_bias": f"{THERE}.mlp.fc1.bias",
    f"{LAYER}.feed.down": f"{THERE}.mlp.fc2.weight",
    f"{LAYER}.feed.down_bias": f"{THERE}.mlp.fc2.bias",
    "decoder.norm.weight": ".final_layernorm.weight",
    "decoder.norm.bias": ".final_layernorm.bias",
    "head.tokens.bias": "lm_head.bias",
}
MAP = STABLELM._replace(families=("phi",), slots={**STABLELM.slots, **MORE})
