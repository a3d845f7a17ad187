"""ELECTRA: BERT whose table may be narrower than its layers, and that tells which tokens were replaced."""

from __future__ import annotations

from ..blueprint import Beyond, Embedding, Head, Model, Positions, Transform
from ..presets import design
from . import reading
from .config import Config
from .registry import choose, family, tied


@family("electra", "Electra", usual="ForPreTraining")
def electra(config: Config, task: str) -> Model:
    """Of every token whether it was replaced (2003.10555)."""
    sizes = reading.encoder(config, reading.Usual(256, 4, hidden=1024))
    narrow = config.size("embedding_size", default=128)
    pattern = "causal()" if config.flag("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    length, types = config.size("max_position_embeddings", default=512), config.size("type_vocab_size", default=2)
    table, rows, beyond = None, length + types + sizes.tokens, tuple[Beyond, ...]()
    if narrow == sizes.model:
        table = Embedding(sizes.tokens, positions=Positions("learned", length), types=types, norm=sizes.norm)
    else:
        beyond = (narrower(narrow, sizes.model, rows),)
    body = reading.stack(sizes, [attention] * sizes.layers, table)
    owner = tied(config, "encoder", True)
    masked = told(sizes, narrow, "gelu", owner)
    if table is None and task in ("ForMaskedLM", "ForCausalLM"):
        beyond += (outside(narrow, sizes.tokens, owner),)
    if task == "ForPreTraining":
        replaced = Head("replaced", 1, transform=Transform(sizes.model, sizes.act), bias="learned")
        ways = choose(config, task, {task: [replaced]})
        return Model("electra", "encoder", (body,), ways, tuple(config.notes), beyond)
    return reading.whole(config, task, body, reading.Said(Transform(sizes.model, "gelu"), masked, bare=False), beyond)


def narrower(narrow: int, model: int, rows: int) -> Beyond:
    """A table of another width than the layers', with its norm, and the map between."""
    why = f"tokens, positions and types are {narrow} wide and brought to {model} by a map, which no word says"
    sizes = {"rows": rows * narrow, "norm": 2 * narrow, "wider": narrow * model + model}
    return Beyond(why, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items()))


def outside(narrow: int, tokens: int, table: str) -> Beyond:
    """A head over tokens by such a table: its bias, and a matrix of its own where it is not tied."""
    own = () if table else (("head.tokens.weight", tokens * narrow),)
    return Beyond("the head over tokens reads that narrow table", (("head.tokens.bias", tokens), *own))


def told(sizes: reading.Encoder, narrow: int, act: str, owner: str) -> Head:
    """The head over tokens, or what of it words can say where the table is narrower."""
    inner = Transform(narrow, act, sizes.norm)
    if narrow == sizes.model:
        return Head("tokens", sizes.tokens, transform=inner, bias="learned", table=owner)
    return Head("tokens", transform=inner)
