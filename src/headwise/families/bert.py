"""BERT: learned positions and two kinds of token, LayerNorm behind, a head that transforms before it tells tokens."""

from __future__ import annotations

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, StackSpec, HeadTransformSpec
from ..presets import design
from .config import TransformersConfig
from .registry import select_heads, register_family, read_num_labels, read_tied_stack


@register_family("bert", "Bert", default_task="ForMaskedLM")
def read_bert(config: TransformersConfig, task: str) -> ModelSpec:
    """A classifier reads the first token through a pooler (1810.04805)."""
    model = config.read_int("hidden_size", default=768)
    heads = config.read_num_heads("num_attention_heads", default=12)
    layers = config.read_num_layers("num_hidden_layers", default=12)
    tokens = config.read_int("vocab_size", default=30522)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    act = config.read_activation("hidden_act", "gelu")
    config.require_default("position_embedding_type", "absolute", "is not described")
    config.require_default("add_cross_attention", False, "reads a model that this file does not describe")
    config.resolve_head_dim(model, heads)

    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=3072), act, bias="ud")
    attention = design(model=model, heads=heads, pattern=pattern, bias="qkvo")
    embedding = EmbeddingSpec(
        tokens,
        positions=PositionSpec("learned", config.read_int("max_position_embeddings", default=512)),
        types=config.read_int("type_vocab_size", default=2),
        norm=norm,
    )
    blocks = [BlockSpec(attention, feed=feed, norm=norm, placement="post")] * layers
    stack = StackSpec.from_blocks("encoder", model, blocks, embedding=embedding)

    pool, table, count = HeadTransformSpec(model), read_tied_stack(config, "encoder", True), read_num_labels(config)
    if not table:
        config.add_note("tie_word_embeddings: the second bias that transformers gives the decoder is left out")
    masked = OutputHeadSpec("tokens", tokens, transform=HeadTransformSpec(model, act, norm), bias="learned", table=table)
    ways = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pool)],
        "ForMaskedLM": [masked],
        "LMHeadModel": [masked],
        "ForPreTraining": [masked, OutputHeadSpec("next", 2, "first", pool, "learned")],
        "ForNextSentencePrediction": [OutputHeadSpec("next", 2, "first", pool, "learned")],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [OutputHeadSpec("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", count, bias="learned")],
    }
    return ModelSpec("bert", "encoder", (stack,), select_heads(config, task, ways), tuple(config.notes))
