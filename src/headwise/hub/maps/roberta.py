"""RoBERTa and its kin: BERT's layers under a name of their own, other heads."""

from __future__ import annotations

from .bert import MAP as BERT

TOKENS, CLASSES = "lm_head", "classifier"
OWN = {name: path for name, path in BERT.slots.items() if not name.startswith("head.")}

MAP = BERT._replace(
    families=("roberta", "xlm-roberta", "camembert"),
    trunks=("roberta", ""),
    slots={
        **OWN,
        "head.tokens.transform": f"{TOKENS}.dense.weight",
        "head.tokens.transform_bias": f"{TOKENS}.dense.bias",
        "head.tokens.transform_norm.weight": f"{TOKENS}.layer_norm.weight",
        "head.tokens.transform_norm.bias": f"{TOKENS}.layer_norm.bias",
        "head.tokens.weight": f"{TOKENS}.decoder.weight",
        "head.tokens.bias": f"{TOKENS}.bias",
        "head.pooler.transform": ".pooler.dense.weight",
        "head.pooler.transform_bias": ".pooler.dense.bias",
        "head.classes.transform": f"{CLASSES}.dense.weight",
        "head.classes.transform_bias": f"{CLASSES}.dense.bias",
        "head.classes.weight": f"{CLASSES}.out_proj.weight",
        "head.classes.bias": f"{CLASSES}.out_proj.bias",
        "head.choice.transform": ".pooler.dense.weight",
        "head.choice.transform_bias": ".pooler.dense.bias",
        "head.choice.weight": f"{CLASSES}.out_proj.weight",
        "head.choice.bias": f"{CLASSES}.out_proj.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    twins={f"{TOKENS}.decoder.bias": f"{TOKENS}.bias"},
    spelt={**BERT.spelt, **{f"{CLASSES}.{name}": f"{CLASSES}.out_proj.{name}" for name in ("weight", "bias")}},
    ignored=(r"embeddings\.position_ids$", r"^(roberta\.)?pooler\.", r"^lm_head\."),
)
