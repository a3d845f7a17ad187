"""gpt-oss: matrices of experts lie as (in, out), rows of gates and of ups in turn."""

from __future__ import annotations

from ..slots import Slot
from .llama import MAP as LLAMA

EXPERTS = ".layers.{layer}.mlp.experts"
BOTH, BIAS = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.gate_up_proj_bias"
GATE, UP = ({"side": 0}, {"side": 2}), ({"side": 1}, {"side": 2})

MAP = LLAMA._replace(
    families=("gpt_oss",),
    slots={
        **LLAMA.slots,
        "decoder.{layer}.attention.normaliser.sink": ".layers.{layer}.self_attn.sinks",
        "decoder.{layer}.feed.router": ".layers.{layer}.mlp.router.weight",
        "decoder.{layer}.feed.router_bias": ".layers.{layer}.mlp.router.bias",
        "decoder.{layer}.feed.each.gate": Slot(BOTH, "expert model (hidden side)", *GATE),
        "decoder.{layer}.feed.each.up": Slot(BOTH, "expert model (hidden side)", *UP),
        "decoder.{layer}.feed.each.down": Slot(f"{EXPERTS}.down_proj", "expert hidden model"),
        "decoder.{layer}.feed.each.gate_bias": Slot(BIAS, "expert (hidden side)", *GATE),
        "decoder.{layer}.feed.each.up_bias": Slot(BIAS, "expert (hidden side)", *UP),
        "decoder.{layer}.feed.each.down_bias": f"{EXPERTS}.down_proj_bias",
    },
)
