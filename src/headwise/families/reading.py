"""What encoders after BERT have in common: sizes, a table with positions, heads that tell tokens and classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..blueprint import Beyond, Block, Dense, Embedding, Head, Model, Norm, Positions, Stack, Transform
from .config import Config
from .registry import choose, labels
from .trunk import Attention


class Encoder(NamedTuple):
    """The sizes of an encoder, in the words that BERT uses for them."""

    model: int
    heads: int
    layers: int
    tokens: int
    norm: Norm
    feed: Dense

    @property
    def act(self) -> str:
        """The activation of its feed-forwards, and of its heads."""
        return self.feed.activation


class Usual(NamedTuple):
    """The sizes of a config that does not say its own: BERT's, unless said."""

    model: int = 768
    heads: int = 12
    layers: int = 12
    tokens: int = 30522
    hidden: int = 3072
    act: str = "gelu"
    eps: float = 1e-12


BERT = Usual()


def encoder(config: Config, usual: Usual = BERT) -> Encoder:
    """The sizes of a config, or the usual ones."""
    wide = config.size("hidden_size", default=usual.model)
    heads = config.heads("num_attention_heads", default=usual.heads)
    config.dim(wide, heads)
    config.refuse("add_cross_attention", False, "reads a model that this file does not describe")
    hidden = config.size("intermediate_size", default=usual.hidden)
    feed = Dense(hidden, config.activation("hidden_act", usual.act), bias="ud")
    layers, tokens = (
        config.layers("num_hidden_layers", default=usual.layers),
        config.size("vocab_size", default=usual.tokens),
    )
    return Encoder(wide, heads, layers, tokens, Norm("layer", config.number("layer_norm_eps", default=usual.eps)), feed)


def behind_padding(config: Config, length: int = 512, pad: int = 1) -> Positions:
    """Learned positions of which the first stands behind the row of padding, as fairseq numbers them."""
    rows, skipped = (
        config.size("max_position_embeddings", default=length),
        1 + config.size("pad_token_id", default=pad, least=0),
    )
    if rows <= skipped:
        config.wrong(f"max_position_embeddings = {rows} leaves none behind pad_token_id", f"give more than {skipped}")
    return Positions("learned", rows - skipped, skipped=skipped)


def stack(sizes: Encoder, attentions: Iterable[Attention], embedding: Embedding | None) -> Stack:
    """Layers after Vaswani: a norm behind every sublayer."""
    blocks = [Block(one, feed=sizes.feed, norm=sizes.norm, placement="post") for one in attentions]
    return Stack.of("encoder", sizes.model, blocks, embedding=embedding)


class Said(NamedTuple):
    """What the heads of a family are like: how rows are pooled for classes, and whether the bare model pools too."""

    pool: Transform | None
    masked: Head
    bare: bool = True


def whole(config: Config, task: str, body: Stack, said: Said, beyond: tuple[Beyond, ...] = ()) -> Model:
    """The model with the head that a task asks for."""
    count, pool = labels(config), said.pool
    ways = {
        "Model": [Head("pooler", at="first", transform=pool)] if pool and said.bare else [],
        "ForMaskedLM": [said.masked],
        "ForCausalLM": [said.masked],
        "ForSequenceClassification": [Head("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [Head("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [Head("classes", count, bias="learned")],
        "ForQuestionAnswering": [Head("span", count, bias="learned")],
    }
    return Model(config.name, "encoder", (body,), choose(config, task, ways), tuple(config.notes), beyond)
