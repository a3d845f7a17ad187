"""ViT: positions and the first vector lie as rows of a batch of one."""

from __future__ import annotations

from ..plan import WeightNames
from ..slots import TensorLocation

VIT_LAYER, BATCH_OF_ONE = ".encoder.layer.{layer}", ({"one": 0}, {"one": 1})

VIT_WEIGHTS = WeightNames(
    families=("vit",),
    prefixes=("vit", ""),
    locations={
        "encoder.embedding.patches": ".embeddings.patch_embeddings.projection.weight",
        "encoder.embedding.patches_bias": ".embeddings.patch_embeddings.projection.bias",
        "encoder.embedding.first": TensorLocation(".embeddings.cls_token", "one first model", *BATCH_OF_ONE),
        "encoder.embedding.positions": TensorLocation(".embeddings.position_embeddings", "one position model", *BATCH_OF_ONE),
        "encoder.{layer}.attention_norm.weight": f"{VIT_LAYER}.layernorm_before.weight",
        "encoder.{layer}.attention_norm.bias": f"{VIT_LAYER}.layernorm_before.bias",
        "encoder.{layer}.attention.project.q": f"{VIT_LAYER}.attention.attention.query.weight",
        "encoder.{layer}.attention.project.k": f"{VIT_LAYER}.attention.attention.key.weight",
        "encoder.{layer}.attention.project.v": f"{VIT_LAYER}.attention.attention.value.weight",
        "encoder.{layer}.attention.project.q_bias": f"{VIT_LAYER}.attention.attention.query.bias",
        "encoder.{layer}.attention.project.k_bias": f"{VIT_LAYER}.attention.attention.key.bias",
        "encoder.{layer}.attention.project.v_bias": f"{VIT_LAYER}.attention.attention.value.bias",
        "encoder.{layer}.attention.output.o": f"{VIT_LAYER}.attention.output.dense.weight",
        "encoder.{layer}.attention.output.o_bias": f"{VIT_LAYER}.attention.output.dense.bias",
        "encoder.{layer}.feed_norm.weight": f"{VIT_LAYER}.layernorm_after.weight",
        "encoder.{layer}.feed_norm.bias": f"{VIT_LAYER}.layernorm_after.bias",
        "encoder.{layer}.feed.up": f"{VIT_LAYER}.intermediate.dense.weight",
        "encoder.{layer}.feed.up_bias": f"{VIT_LAYER}.intermediate.dense.bias",
        "encoder.{layer}.feed.down": f"{VIT_LAYER}.output.dense.weight",
        "encoder.{layer}.feed.down_bias": f"{VIT_LAYER}.output.dense.bias",
        "encoder.norm.weight": ".layernorm.weight",
        "encoder.norm.bias": ".layernorm.bias",
        "head.pooler.transform": ".pooler.dense.weight",
        "head.pooler.transform_bias": ".pooler.dense.bias",
        "head.classes.weight": "classifier.weight",
        "head.classes.bias": "classifier.bias",
    },
)
