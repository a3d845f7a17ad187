"""BERT: published files hold a pooler and both heads of pretraining, whichever of them the class in config.json has."""

from __future__ import annotations

from ..plan import Map

LAYER, TOKENS = ".encoder.layer.{layer}", "cls.predictions"

MAP = Map(
    families=("bert",),
    trunks=("bert", ""),
    slots={
        "encoder.embedding.tokens": ".embeddings.word_embeddings.weight",
        "encoder.embedding.positions": ".embeddings.position_embeddings.weight",
        "encoder.embedding.types": ".embeddings.token_type_embeddings.weight",
        "encoder.embedding.norm.weight": ".embeddings.LayerNorm.weight",
        "encoder.embedding.norm.bias": ".embeddings.LayerNorm.bias",
        "encoder.{layer}.attention.project.q": f"{LAYER}.attention.self.query.weight",
        "encoder.{layer}.attention.project.k": f"{LAYER}.attention.self.key.weight",
        "encoder.{layer}.attention.project.v": f"{LAYER}.attention.self.value.weight",
        "encoder.{layer}.attention.project.q_bias": f"{LAYER}.attention.self.query.bias",
        "encoder.{layer}.attention.project.k_bias": f"{LAYER}.attention.self.key.bias",
        "encoder.{layer}.attention.project.v_bias": f"{LAYER}.attention.self.value.bias",
        "encoder.{layer}.attention.output.o": f"{LAYER}.attention.output.dense.weight",
        "encoder.{layer}.attention.output.o_bias": f"{LAYER}.attention.output.dense.bias",
        "encoder.{layer}.attention_norm.weight": f"{LAYER}.attention.output.LayerNorm.weight",
        "encoder.{layer}.attention_norm.bias": f"{LAYER}.attention.output.LayerNorm.bias",
        "encoder.{layer}.feed.up": f"{LAYER}.intermediate.dense.weight",
        "encoder.{layer}.feed.up_bias": f"{LAYER}.intermediate.dense.bias",
        "encoder.{layer}.feed.down": f"{LAYER}.output.dense.weight",
        "encoder.{layer}.feed.down_bias": f"{LAYER}.output.dense.bias",
        "encoder.{layer}.feed_norm.weight": f"{LAYER}.output.LayerNorm.weight",
        "encoder.{layer}.feed_norm.bias": f"{LAYER}.output.LayerNorm.bias",
        "head.tokens.transform": f"{TOKENS}.transform.dense.weight",
        "head.tokens.transform_bias": f"{TOKENS}.transform.dense.bias",
        "head.tokens.transform_norm.weight": f"{TOKENS}.transform.LayerNorm.weight",
        "head.tokens.transform_norm.bias": f"{TOKENS}.transform.LayerNorm.bias",
        "head.tokens.weight": f"{TOKENS}.decoder.weight",
        "head.tokens.bias": f"{TOKENS}.bias",
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
    twins={f"{TOKENS}.decoder.bias": f"{TOKENS}.bias"},
    spelt={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=(r"embeddings\.position_ids$", r"^(bert\.)?pooler\.", r"^cls\."),
)
