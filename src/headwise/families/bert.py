"""BERT: learned positions and two kinds of token, LayerNorm behind, a head that transforms before it tells tokens."""

from __future__ import annotations

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Positions, Stack, Transform
from ..presets import design
from .config import Config
from .registry import choose, family, labels, tied


@family("bert", "Bert", usual="ForMaskedLM")
def bert(config: Config, task: str) -> Model:
    """A classifier reads the first token through a pooler (1810.04805)."""
    model = config.size("hidden_size", default=768)
    heads = config.heads("num_attention_heads", default=12)
    layers = config.layers("num_hidden_layers", default=12)
    tokens = config.size("vocab_size", default=30522)
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-12))
    act = config.activation("hidden_act", "gelu")
    config.refuse("position_embedding_type", "absolute", "is not described")
    config.refuse("add_cross_attention", False, "reads a model that this file does not describe")
    config.dim(model, heads)

    pattern = "causal()" if config.flag("is_decoder", False) else "full()"
    feed = Dense(config.size("intermediate_size", default=3072), act, bias="ud")
    attention = design(model=model, heads=heads, pattern=pattern, bias="qkvo")
    embedding = Embedding(
        tokens,
        positions=Positions("learned", config.size("max_position_embeddings", default=512)),
        types=config.size("type_vocab_size", default=2),
        norm=norm,
    )
    blocks = [Block(attention, feed=feed, norm=norm, placement="post")] * layers
    stack = Stack.of("encoder", model, blocks, embedding=embedding)

    pool, table, count = Transform(model), tied(config, "encoder", True), labels(config)
    if not table:
        config.note("tie_word_embeddings: the second bias that transformers gives the decoder is left out")
    masked = Head("tokens", tokens, transform=Transform(model, act, norm), bias="learned", table=table)
    ways = {
        "Model": [Head("pooler", at="first", transform=pool)],
        "ForMaskedLM": [masked],
        "LMHeadModel": [masked],
        "ForPreTraining": [masked, Head("next", 2, "first", pool, "learned")],
        "ForNextSentencePrediction": [Head("next", 2, "first", pool, "learned")],
        "ForSequenceClassification": [Head("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [Head("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [Head("classes", count, bias="learned")],
        "ForQuestionAnswering": [Head("span", count, bias="learned")],
    }
    return Model("bert", "encoder", (stack,), choose(config, task, ways), tuple(config.notes))
