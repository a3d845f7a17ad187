"""GPT-J: one norm for both sublayers, and a head with a bias."""

from __future__ import annotations

from ..plan import WeightNames

GPTJ_LAYER, GPTJ_FILE_LAYER = "decoder.{layer}", ".h.{layer}"

GPTJ_WEIGHTS = WeightNames(
    families=("gptj",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".wte.weight",
        f"{GPTJ_LAYER}.norm.weight": f"{GPTJ_FILE_LAYER}.ln_1.weight",
        f"{GPTJ_LAYER}.norm.bias": f"{GPTJ_FILE_LAYER}.ln_1.bias",
        f"{GPTJ_LAYER}.attention.project.q": f"{GPTJ_FILE_LAYER}.attn.q_proj.weight",
        f"{GPTJ_LAYER}.attention.project.k": f"{GPTJ_FILE_LAYER}.attn.k_proj.weight",
        f"{GPTJ_LAYER}.attention.project.v": f"{GPTJ_FILE_LAYER}.attn.v_proj.weight",
        f"{GPTJ_LAYER}.attention.output.o": f"{GPTJ_FILE_LAYER}.attn.out_proj.weight",
        f"{GPTJ_LAYER}.feed.up": f"{GPTJ_FILE_LAYER}.mlp.fc_in.weight",
        f"{GPTJ_LAYER}.feed.up_bias": f"{GPTJ_FILE_LAYER}.mlp.fc_in.bias",
        f"{GPTJ_LAYER}.feed.down": f"{GPTJ_FILE_LAYER}.mlp.fc_out.weight",
        f"{GPTJ_LAYER}.feed.down_bias": f"{GPTJ_FILE_LAYER}.mlp.fc_out.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": "lm_head.bias",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)
