"""Phi-3: queries, keys and values end to end in one matrix, gates and ups in another."""

from __future__ import annotations

from ..slots import Slot
from .llama import MAP as LLAMA

QKV, ATTENTION = ".layers.{layer}.self_attn.qkv_proj.weight", "decoder.{layer}.attention.project"
RUNS, BOTH = "([q|kv|v] dim) model", "(side hidden) model"
UPS = ".layers.{layer}.mlp.gate_up_proj.weight"

FEED = {
    "decoder.{layer}.feed.gate": Slot(UPS, BOTH, {"side": 0}, {"side": 2}),
    "decoder.{layer}.feed.up": Slot(UPS, BOTH, {"side": 1}, {"side": 2}),
}
MAP = LLAMA._replace(
    families=("phi3",),
    slots={
        **LLAMA.slots,
        **FEED,
        f"{ATTENTION}.q": Slot(QKV, RUNS, {"q|kv|v": "q"}, ours="(q dim) model"),
        f"{ATTENTION}.k": Slot(QKV, RUNS, {"q|kv|v": "kv"}, ours="(kv dim) model"),
        f"{ATTENTION}.v": Slot(QKV, RUNS, {"q|kv|v": "v"}, ours="(v dim) model"),
    },
)
