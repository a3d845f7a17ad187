"""GPT-J: one norm for both sublayers, and a head with a bias."""

from __future__ import annotations

from ..plan import Map

LAYER, THERE = "decoder.{layer}", ".h.{layer}"

MAP = Map(
    families=("gptj",),
    trunks=("transformer", ""),
    slots={
        "decoder.embedding.tokens": ".wte.weight",
        f"{LAYER}.norm.weight": f"{THERE}.ln_1.weight",
        f"{LAYER}.norm.bias": f"{THERE}.ln_1.bias",
        f"{LAYER}.attention.project.q": f"{THERE}.attn.q_proj.weight",
        f"{LAYER}.attention.project.k": f"{THERE}.attn.k_proj.weight",
        f"{LAYER}.attention.project.v": f"{THERE}.attn.v_proj.weight",
        f"{LAYER}.attention.output.o": f"{THERE}.attn.out_proj.weight",
        f"{LAYER}.feed.up": f"{THERE}.mlp.fc_in.weight",
        f"{LAYER}.feed.up_bias": f"{THERE}.mlp.fc_in.bias",
        f"{LAYER}.feed.down": f"{THERE}.mlp.fc_out.weight",
        f"{LAYER}.feed.down_bias": f"{THERE}.mlp.fc_out.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": "lm_head.bias",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)
