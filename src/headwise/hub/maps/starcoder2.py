"""StarCoder 2: Llama's names for attention, GPT-2's for feed-forwards."""

from __future__ import annotations

from .stablelm import OWN_LAYER, FILE_LAYER
from .stablelm import STABLELM_WEIGHTS as STABLELM

STARCODER2_FEED_FORWARD = {
    f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.mlp.c_fc.weight",
    f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.mlp.c_fc.bias",
    f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.mlp.c_proj.weight",
    f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.mlp.c_proj.bias",
}
STARCODER2_WEIGHTS = STABLELM._replace(families=("starcoder2",), locations={**STABLELM.locations, **STARCODER2_FEED_FORWARD})
