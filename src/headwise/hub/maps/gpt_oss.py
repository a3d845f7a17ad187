"""gpt-oss: matrices of experts lie as (in, out), rows of gates and of ups in turn."""

from __future__ import annotations

from ..slots import TensorLocation
from .llama import LLAMA_WEIGHTS as LLAMA

FILE_EXPERTS = ".layers.{layer}.mlp.experts"
FILE_GATE_UP, FILE_GATE_UP_BIAS = f"{FILE_EXPERTS}.gate_up_proj", f"{FILE_EXPERTS}.gate_up_proj_bias"
GATE_ROWS, UP_ROWS = ({"side": 0}, {"side": 2}), ({"side": 1}, {"side": 2})

GPT_OSS_WEIGHTS = LLAMA._replace(
    families=("gpt_oss",),
    locations={
        **LLAMA.locations,
        "decoder.{layer}.attention.normaliser.sink": ".layers.{layer}.self_attn.sinks",
        "decoder.{layer}.feed.router": ".layers.{layer}.mlp.router.weight",
        "decoder.{layer}.feed.router_bias": ".layers.{layer}.mlp.router.bias",
        "decoder.{layer}.feed.each.gate": TensorLocation(FILE_GATE_UP, "expert model (hidden side)", *GATE_ROWS),
        "decoder.{layer}.feed.each.up": TensorLocation(FILE_GATE_UP, "expert model (hidden side)", *UP_ROWS),
        "decoder.{layer}.feed.each.down": TensorLocation(f"{FILE_EXPERTS}.down_proj", "expert hidden model"),
        "decoder.{layer}.feed.each.gate_bias": TensorLocation(FILE_GATE_UP_BIAS, "expert (hidden side)", *GATE_ROWS),
        "decoder.{layer}.feed.each.up_bias": TensorLocation(FILE_GATE_UP_BIAS, "expert (hidden side)", *UP_ROWS),
        "decoder.{layer}.feed.each.down_bias": f"{FILE_EXPERTS}.down_proj_bias",
    },
)
