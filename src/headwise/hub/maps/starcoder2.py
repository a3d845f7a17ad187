"""StarCoder 2: Llama's names for attention, GPT-2's for feed-forwards."""

from __future__ import annotations

from .stablelm import LAYER, THERE
from .stablelm import MAP as STABLELM

FEED = {
    f"{LAYER}.feed.up": f"{THERE}.mlp.c_fc.weight",
    f"{LAYER}.feed.up_bias": f"{THERE}.mlp.c_fc.bias",
    f"{LAYER}.feed.down": f"{THERE}.mlp.c_proj.weight",
    f"{LAYER}.feed.down_bias": f"{THERE}.mlp.c_proj.bias",
}
MAP = STABLELM._replace(families=("starcoder2",), slots={**STABLELM.slots, **FEED})
