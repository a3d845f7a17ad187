"""BART and its kin: an encoder and a decoder after Vaswani, which differ in norms and positions."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..blueprint import Beyond, Block, Dense, Embedding, Head, Model, Norm, Positions, Stack, Transform
from ..presets import design
from .config import Config
from .registry import choose, family, labels


class Kin(NamedTuple):
    """What differs: norms before sublayers or behind, positions, a norm behind the table, one at the end, biases."""

    placement: str = "post"
    positions: str = "learned"
    skipped: int = 0
    norm: Norm | None = None
    last: Norm | None = None
    layers: int = 12
    heads: int = 16
    hidden: int = 4096
    act: str = "gelu"
    bias: str = "qkvo"


BART = Kin(skipped=2, norm=Norm())
MBART = Kin("pre", skipped=2, norm=Norm(), last=Norm())
MARIAN = Kin(positions="halves")
PEGASUS = Kin("pre", positions="halves", last=Norm())
M2M = Kin("pre", positions="none", last=Norm(), act="relu")
BLENDERBOT = Kin("pre", last=Norm(), heads=32, hidden=10240)
TIED = "would keep four tables of tokens, of which one is read by nobody"


@family("bart", "Bart", usual="ForConditionalGeneration")
def bart(config: Config, task: str) -> Model:
    """Two rows of the table of positions stand before the first (1910.13461)."""
    return _whole(config, task, BART, tokens=50265)


@family("mbart", "MBart", usual="ForConditionalGeneration")
def mbart(config: Config, task: str) -> Model:
    """BART with norms before sublayers and one at the end (2001.08210)."""
    return _whole(config, task, MBART, tokens=50265)


@family("marian", "Marian", usual="MTModel")
def marian(config: Config, task: str) -> Model:
    """Sines, then cosines, in the place of a table of positions (1804.00344)."""
    own = config.maybe("decoder_vocab_size")
    if not config.flag("share_encoder_decoder_embeddings", True):
        return _apart(config, task, own)
    if own not in (None, config.size("vocab_size", default=58101)):
        config.wrong(f"decoder_vocab_size = {own} of a table that both share", "give that of vocab_size")
    return _whole(config, task, MARIAN, tokens=58101)


@family("pegasus", "Pegasus", usual="ForConditionalGeneration")
def pegasus(config: Config, task: str) -> Model:
    """Sines, then cosines, and norms before sublayers (1912.08777)."""
    return _whole(config, task, PEGASUS, tokens=50265)


@family("blenderbot", "Blenderbot", usual="ForConditionalGeneration")
def blenderbot(config: Config, task: str) -> Model:
    """Two layers that read, twenty-four that write (2004.13637)."""
    deep = {"encoder_layers": 2, "decoder_layers": 24, "d_model": 2560, "max_position_embeddings": 128}
    inner = Config(deep | dict(config.said), config.where)
    inner.name, inner.notes = config.name, config.notes
    return _whole(inner, task, BLENDERBOT, tokens=8008)


@family("m2m_100", "M2M100", usual="ForConditionalGeneration")
def m2m(config: Config, task: str) -> Model:
    """Its sines have frequencies of their own, and no bias stands over its tokens (2010.11125)."""
    why = "positions are sines, then cosines, whose last frequency is 1 / 10,000, from 2 on, which no word says"
    return _whole(config, task, M2M, tokens=128112, beyond=(Beyond(why),))


def model_of(config: Config) -> int:
    """How wide it is."""
    return config.size("d_model", "hidden_size", default=1024)


def _whole(config: Config, task: str, kin: Kin, tokens: int, beyond: tuple[Beyond, ...] = ()) -> Model:
    model, count = model_of(config), config.size("vocab_size", default=tokens)
    config.refuse("tie_word_embeddings", True, TIED)
    said = _table(config, kin, model)
    tables = (("encoder", Embedding(count, **said)), ("decoder", Embedding(count, **said, table="encoder")))
    stacks = tuple(_stack(config, kin, model, name, table) for name, table in tables)
    over = Head("tokens", count, bias="" if config.name == "m2m_100" else "constant", table="encoder")
    return Model(config.name, "encoder-decoder", stacks, _heads(config, task, over, model), tuple(config.notes), beyond)


def _apart(config: Config, task: str, tokens: int | None) -> Model:
    """A Marian whose stacks have each a table of their own; what it writes is read off the second."""
    model, first = model_of(config), config.size("vocab_size", default=58101)
    config.refuse("tie_word_embeddings", True, "would give the head a table of its own, which is not described")
    said = _table(config, MARIAN, model)
    tables = (("encoder", Embedding(first, **said)), ("decoder", Embedding(tokens or first, **said)))
    stacks = tuple(_stack(config, MARIAN, model, name, table) for name, table in tables)
    over = Head("tokens", tokens or first, bias="constant", table="decoder")
    return Model(config.name, "encoder-decoder", stacks, _heads(config, task, over, model), tuple(config.notes))


def _table(config: Config, kin: Kin, model: int) -> dict[str, Any]:
    """Positions, norm and scale of both tables."""
    length = config.size("max_position_embeddings", default=1024)
    positions = {
        "learned": Positions("learned", length, skipped=kin.skipped),
        "halves": Positions("sinusoidal", length, layout="halves"),
        "none": None,
    }
    scale = model**0.5 if config.flag("scale_embedding", config.name == "m2m_100") else 1.0
    return {"positions": positions[kin.positions], "norm": kin.norm, "scale": scale}


def _stack(config: Config, kin: Kin, model: int, name: str, table: Embedding) -> Stack:
    return Stack.of(name, model, layers_of(config, kin, model, name), embedding=table, norm=kin.last)


def layers_of(config: Config, kin: Kin, model: int, stack: str) -> list[Block]:
    """The layers of one stack."""
    layers = config.layers(f"{stack}_layers", default=kin.layers)
    heads = config.heads(f"{stack}_attention_heads", default=kin.heads)
    config.dim(model, heads)
    hidden = config.size(f"{stack}_ffn_dim", default=kin.hidden)
    feed = Dense(hidden, config.activation("activation_function", kin.act), bias="ud")
    every = design(model=model, heads=heads, bias=kin.bias)
    if stack == "encoder":
        return [Block(every, feed=feed, placement=kin.placement)] * layers
    past = design(model=model, heads=heads, bias=kin.bias, pattern="causal()")
    return [Block(past, every, feed, placement=kin.placement)] * layers


def _heads(config: Config, task: str, over: Head, model: int) -> tuple[Head, ...]:
    classes = Head("classes", labels(config, 3), "last", Transform(model), "learned")
    ways = {
        "ForConditionalGeneration": [over],
        "MTModel": [over],
        "Model": [],
        "ForSequenceClassification": [classes],
        "ForQuestionAnswering": [Head("span", 2, bias="learned")],
    }
    return choose(config, task, ways)
