"""RoBERTa and its kin: BERT's layers under a name of their own, other heads."""

from __future__ import annotations

from .bert import BERT_WEIGHTS as BERT

ROBERTA_LM_HEAD, ROBERTA_CLASSIFIER = "lm_head", "classifier"
ROBERTA_LAYERS = {name: path for name, path in BERT.locations.items() if not name.startswith("head.")}

ROBERTA_WEIGHTS = BERT._replace(
    families=("roberta", "xlm-roberta", "camembert"),
    prefixes=("roberta", ""),
    locations={
        **ROBERTA_LAYERS,
        "head.tokens.transform": f"{ROBERTA_LM_HEAD}.dense.weight",
        "head.tokens.transform_bias": f"{ROBERTA_LM_HEAD}.dense.bias",
        "head.tokens.transform_norm.weight": f"{ROBERTA_LM_HEAD}.layer_norm.weight",
        "head.tokens.transform_norm.bias": f"{ROBERTA_LM_HEAD}.layer_norm.bias",
        "head.tokens.weight": f"{ROBERTA_LM_HEAD}.decoder.weight",
        "head.tokens.bias": f"{ROBERTA_LM_HEAD}.bias",
        "head.pooler.transform": ".pooler.dense.weight",
        "head.pooler.transform_bias": ".pooler.dense.bias",
        "head.classes.transform": f"{ROBERTA_CLASSIFIER}.dense.weight",
        "head.classes.transform_bias": f"{ROBERTA_CLASSIFIER}.dense.bias",
        "head.classes.weight": f"{ROBERTA_CLASSIFIER}.out_proj.weight",
        "head.classes.bias": f"{ROBERTA_CLASSIFIER}.out_proj.bias",
        "head.choice.transform": ".pooler.dense.weight",
        "head.choice.transform_bias": ".pooler.dense.bias",
        "head.choice.weight": f"{ROBERTA_CLASSIFIER}.out_proj.weight",
        "head.choice.bias": f"{ROBERTA_CLASSIFIER}.out_proj.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    tied_names={f"{ROBERTA_LM_HEAD}.decoder.bias": f"{ROBERTA_LM_HEAD}.bias"},
    suffix_aliases={**BERT.suffix_aliases, **{f"{ROBERTA_CLASSIFIER}.{name}": f"{ROBERTA_CLASSIFIER}.out_proj.{name}" for name in ("weight", "bias")}},
    ignored=(r"embeddings\.position_ids$", r"^(roberta\.)?pooler\.", r"^lm_head\."),
)
