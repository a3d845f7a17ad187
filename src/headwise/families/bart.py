"""BART: an encoder and a decoder after Vaswani, LayerNorm behind, learned positions, one table of tokens."""

from __future__ import annotations

from typing import Any

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Positions, Stack, Transform
from ..presets import design
from .config import Config
from .registry import choose, family, labels

USUAL = {"layers": 12, "ffn_dim": 4096, "attention_heads": 16}


@family("bart", "Bart", usual="ForConditionalGeneration")
def bart(config: Config, task: str) -> Model:
    """Two rows of the table of positions stand before the first (1910.13461)."""
    model = config.size("d_model", "hidden_size", default=1024)
    tokens = config.size("vocab_size", default=50265)
    length = config.size("max_position_embeddings", default=1024)
    scale = model**0.5 if config.flag("scale_embedding", False) else 1.0
    config.refuse("tie_word_embeddings", True, "would keep four tables of tokens, of which one is read by nobody")
    said: dict[str, Any] = {"positions": Positions("learned", length, skipped=2), "norm": Norm(), "scale": scale}
    tables = (("encoder", Embedding(tokens, **said)), ("decoder", Embedding(tokens, **said, table="encoder")))
    stacks = tuple(Stack.of(name, model, _blocks(config, model, name), embedding=table) for name, table in tables)
    constant = Head("tokens", tokens, bias="constant", table="encoder")
    classes = Head("classes", labels(config, 3), "last", Transform(model), "learned")
    ways = {
        "ForConditionalGeneration": [constant],
        "Model": [],
        "ForSequenceClassification": [classes],
        "ForQuestionAnswering": [Head("span", 2, bias="learned")],
    }
    return Model("bart", "encoder-decoder", stacks, choose(config, task, ways), tuple(config.notes))


def _blocks(config: Config, model: int, stack: str) -> list[Block]:
    layers = config.layers(f"{stack}_layers", default=USUAL["layers"])
    heads = config.heads(f"{stack}_attention_heads", default=USUAL["attention_heads"])
    config.dim(model, heads)
    hidden = config.size(f"{stack}_ffn_dim", default=USUAL["ffn_dim"])
    feed = Dense(hidden, config.activation("activation_function", "gelu"), bias="ud")
    every = design(model=model, heads=heads, bias="qkvo")
    if stack == "encoder":
        return [Block(every, feed=feed, placement="post")] * layers
    past = design(model=model, heads=heads, bias="qkvo", pattern="causal()")
    return [Block(past, every, feed, placement="post")] * layers
