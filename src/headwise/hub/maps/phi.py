"""Phi: one norm for both sublayers, and a head with a bias."""

from __future__ import annotations

from .stablelm import OWN_LAYER, FILE_LAYER
from .stablelm import STABLELM_WEIGHTS as STABLELM

PHI_NAMES = {
    f"{OWN_LAYER}.attention.output.o": f"{FILE_LAYER}.self_attn.dense.weight",
    f"{OWN_LAYER}.attention.output.o_bias": f"{FILE_LAYER}.self_attn.dense.bias",
    f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.mlp.fc1.weight",
    f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.mlp.fc1.bias",
    f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.mlp.fc2.weight",
    f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.mlp.fc2.bias",
    "decoder.norm.weight": ".final_layernorm.weight",
    "decoder.norm.bias": ".final_layernorm.bias",
    "head.tokens.bias": "lm_head.bias",
}
PHI_WEIGHTS = STABLELM._replace(families=("phi",), locations={**STABLELM.locations, **PHI_NAMES})
