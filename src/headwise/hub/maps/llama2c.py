"""llama2.c: Llama's tensors under short names, where a pair that turns together lies in neighbouring rows."""

from __future__ import annotations

from ..plan import WeightNames
from ..slots import TensorLocation

ROPE_PAIR_AXIS = {"side": 2}

LLAMA2C_WEIGHTS = WeightNames(
    families=("llama2.c",),
    locations={
        "decoder.embedding.tokens": "tokens",
        "decoder.{layer}.attention_norm.weight": "{layer}.rms_att",
        "decoder.{layer}.attention.project.q": TensorLocation(
            "{layer}.wq", "(q pair side) model", extra_axes=ROPE_PAIR_AXIS, own_layout="(q side pair) model"
        ),
        "decoder.{layer}.attention.project.k": TensorLocation(
            "{layer}.wk", "(kv pair side) source", extra_axes=ROPE_PAIR_AXIS, own_layout="(kv side pair) source"
        ),
        "decoder.{layer}.attention.project.v": "{layer}.wv",
        "decoder.{layer}.attention.output.o": "{layer}.wo",
        "decoder.{layer}.feed_norm.weight": "{layer}.rms_ffn",
        "decoder.{layer}.feed.gate": "{layer}.w1",
        "decoder.{layer}.feed.down": "{layer}.w2",
        "decoder.{layer}.feed.up": "{layer}.w3",
        "decoder.norm.weight": "rms_final",
        "head.tokens.weight": "wcls",
    },
    ignored=(r"^angles_",),
)
