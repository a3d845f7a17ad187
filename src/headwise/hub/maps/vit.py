"""ViT: positions and the first vector lie as rows of a batch of one."""

from __future__ import annotations

from ..plan import Map
from ..slots import Slot

LAYER, ONE = ".encoder.layer.{layer}", ({"one": 0}, {"one": 1})

MAP = Map(
    families=("vit",),
    trunks=("vit", ""),
    slots={
        "encoder.embedding.patches": ".embeddings.patch_embeddings.projection.weight",
        "encoder.embedding.patches_bias": ".embeddings.patch_embeddings.projection.bias",
        "encoder.embedding.first": Slot(".embeddings.cls_token", "one first model", *ONE),
        "encoder.embedding.positions": Slot(".embeddings.position_embeddings", "one position model", *ONE),
        "encoder.{layer}.attention_norm.weight": f"{LAYER}.layernorm_before.weight",
        "encoder.{layer}.attention_norm.bias": f"{LAYER}.layernorm_before.bias",
        "encoder.{layer}.attention.project.q": f"{LAYER}.attention.attention.query.weight",
        "encoder.{layer}.attention.project.k": f"{LAYER}.attention.attention.key.weight",
        "encoder.{layer}.attention.project.v": f"{LAYER}.attention.attention.value.weight",
        "encoder.{layer}.attention.project.q_bias": f"{LAYER}.attention.attention.query.bias",
        "encoder.{layer}.attention.project.k_bias": f"{LAYER}.attention.attention.key.bias",
        "encoder.{layer}.attention.project.v_bias": f"{LAYER}.attention.attention.value.bias",
        "encoder.{layer}.attention.output.o": f"{LAYER}.attention.output.dense.weight",
        "encoder.{layer}.attention.output.o_bias": f"{LAYER}.attention.output.dense.bias",
        "encoder.{layer}.feed_norm.weight": f"{LAYER}.layernorm_after.weight",
        "encoder.{layer}.feed_norm.bias": f"{LAYER}.layernorm_after.bias",
        "encoder.{layer}.feed.up": f"{LAYER}.intermediate.dense.weight",
        "encoder.{layer}.feed.up_bias": f"{LAYER}.intermediate.dense.bias",
        "encoder.{layer}.feed.down": f"{LAYER}.output.dense.weight",
        "encoder.{layer}.feed.down_bias": f"{LAYER}.output.dense.bias",
        "encoder.norm.weight": ".layernorm.weight",
        "encoder.norm.bias": ".layernorm.bias",
        "head.pooler.transform": ".pooler.dense.weight",
        "head.pooler.transform_bias": ".pooler.dense.bias",
        "head.classes.weight": "classifier.weight",
        "head.classes.bias": "classifier.bias",
    },
)
