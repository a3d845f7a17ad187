"""BERT: published files hold a pooler and both heads of pretraining, whichever of them the class in config.json has."""

from __future__ import annotations

from ..plan import WeightNames

BERT_LAYER, BERT_LM_HEAD = ".encoder.layer.{layer}", "cls.predictions"

BERT_WEIGHTS = WeightNames(
    families=("bert",),
    prefixes=("bert", ""),
    locations={
        "encoder.embedding.tokens": ".embeddings.word_embeddings.weight",
        "encoder.embedding.positions": ".embeddings.position_embeddings.weight",
        "encoder.embedding.types": ".embeddings.token_type_embeddings.weight",
        "encoder.embedding.norm.weight": ".embeddings.LayerNorm.weight",
        "encoder.embedding.norm.bias": ".embeddings.LayerNorm.bias",
        "encoder.{layer}.attention.project.q": f"{BERT_LAYER}.attention.self.query.weight",
        "encoder.{layer}.attention.project.k": f"{BERT_LAYER}.attention.self.key.weight",
        "encoder.{layer}.attention.project.v": f"{BERT_LAYER}.attention.self.value.weight",
        "encoder.{layer}.attention.project.q_bias": f"{BERT_LAYER}.attention.self.query.bias",
        "encoder.{layer}.attention.project.k_bias": f"{BERT_LAYER}.attention.self.key.bias",
        "encoder.{layer}.attention.project.v_bias": f"{BERT_LAYER}.attention.self.value.bias",
        "encoder.{layer}.attention.output.o": f"{BERT_LAYER}.attention.output.dense.weight",
        "encoder.{layer}.attention.output.o_bias": f"{BERT_LAYER}.attention.output.dense.bias",
        "encoder.{layer}.attention_norm.weight": f"{BERT_LAYER}.attention.output.LayerNorm.weight",
        "encoder.{layer}.attention_norm.bias": f"{BERT_LAYER}.attention.output.LayerNorm.bias",
        "encoder.{layer}.feed.up": f"{BERT_LAYER}.intermediate.dense.weight",
        "encoder.{layer}.feed.up_bias": f"{BERT_LAYER}.intermediate.dense.bias",
        "encoder.{layer}.feed.down": f"{BERT_LAYER}.output.dense.weight",
        "encoder.{layer}.feed.down_bias": f"{BERT_LAYER}.output.dense.bias",
        "encoder.{layer}.feed_norm.weight": f"{BERT_LAYER}.output.LayerNorm.weight",
        "encoder.{layer}.feed_norm.bias": f"{BERT_LAYER}.output.LayerNorm.bias",
        "head.tokens.transform": f"{BERT_LM_HEAD}.transform.dense.weight",
        "head.tokens.transform_bias": f"{BERT_LM_HEAD}.transform.dense.bias",
        "head.tokens.transform_norm.weight": f"{BERT_LM_HEAD}.transform.LayerNorm.weight",
        "head.tokens.transform_norm.bias": f"{BERT_LM_HEAD}.transform.LayerNorm.bias",
        "head.tokens.weight": f"{BERT_LM_HEAD}.decoder.weight",
        "head.tokens.bias": f"{BERT_LM_HEAD}.bias",
        **{f"head.{name}.transform": ".pooler.dense.weight" for name in ("pooler", "next", "classes", "choice")},
        **{f"head.{name}.transform_bias": ".pooler.dense.bias" for name in ("pooler", "next", "classes", "choice")},
        "head.next.weight": "cls.seq_relationship.weight",
        "head.next.bias": "cls.seq_relationship.bias",
        "head.classes.weight": "classifier.weight",
        "head.classes.bias": "classifier.bias",
        "head.choice.weight": "classifier.weight",
        "head.choice.bias": "classifier.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    tied_names={f"{BERT_LM_HEAD}.decoder.bias": f"{BERT_LM_HEAD}.bias"},
    suffix_aliases={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=(r"embeddings\.position_ids$", r"^(bert\.)?pooler\.", r"^cls\."),
)
