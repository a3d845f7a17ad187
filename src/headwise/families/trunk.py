"""What decoders have in common, however their layers are put together: sizes, and ends around a row of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..blueprint import Beyond, Block, Dense, Embedding, Experts, Head, Model, Nearly, Norm, Positions, Stack
from ..spec import AttentionSpec
from .config import Config
from .registry import said_by

Kind = TypeVar("Kind", bound=Hashable)
Attention = AttentionSpec | Nearly


class Sizes(NamedTuple):
    """How wide a model is, and its heads."""

    model: int
    heads: int
    kv: int
    dim: int

    @property
    def words(self) -> dict[str, Any]:
        """As `design` is told."""
        return self._asdict()


def sizes(config: Config, model: int, heads: int, kv: int | None = None, dim: int | None = None) -> Sizes:
    """Those of a config in the words that most use, or the usual ones."""
    wide = config.size("hidden_size", default=model)
    asked = config.heads("num_attention_heads", default=heads)
    return Sizes(wide, asked, config.grouped(asked, default=kv), config.dim(wide, asked, "head_dim", default=dim))


def depth(config: Config, usual: int) -> int:
    """How many layers."""
    return config.layers("num_hidden_layers", default=usual)


def length(config: Config, usual: int) -> int:
    """How many positions a model was made for."""
    return config.size("max_position_embeddings", default=usual)


def each(kinds: Iterable[Kind], make: Callable[[Kind], Attention]) -> list[Attention]:
    """The attention of each layer, by its kind; those of a kind are made once."""
    told = list(kinds)
    made = {kind: make(kind) for kind in dict.fromkeys(told)}
    return [made[kind] for kind in told]


def mixture(config: Config, expert: Dense, count: int, active: int, weighed: str) -> Experts:
    """Experts behind a softmax; `weighed` is what their shares sum to one over, "all" of them or those "chosen"."""
    usual = config.flag("norm_topk_prob", weighed == "chosen")
    many = config.size("num_experts", "num_local_experts", default=count)
    chosen = config.size("num_experts_per_tok", default=active, most=many)
    return Experts(expert, many, chosen, scores="chosen" if usual else "softmax")


class Ends(NamedTuple):
    """What stands around a row of blocks: a table of tokens, perhaps with positions, a norm, and a head over tokens."""

    tokens: int
    tied: bool = False
    scale: float = 1.0
    positions: Positions | None = None
    norm: Norm | None = None
    bias: str = ""
    said: float = 1.0
    cap: float | None = None


def decoder(
    config: Config, task: str, blocks: Sequence[Block], last: Norm | None, ends: Ends, beyond: tuple[Beyond, ...] = ()
) -> Model:
    """A decoder of these blocks, whose width is that of their attention."""
    (wide,) = {spec.model for block in blocks for spec in block.specs.values()}
    table = Embedding(ends.tokens, positions=ends.positions, norm=ends.norm, scale=ends.scale)
    stack = Stack.of("decoder", wide, blocks, embedding=table, norm=last)
    tied = "decoder" if config.flag("tie_word_embeddings", ends.tied) else ""
    head = Head("tokens", ends.tokens, bias=ends.bias, table=tied, scale=ends.said, cap=ends.cap)
    return Model(config.name, "decoder", (stack,), said_by(config, task, head), tuple(config.notes), beyond)


def blocks(attentions: Iterable[Attention], feed: Dense | Experts, norm: Norm, **said: Any) -> list[Block]:
    """A block for each attention, otherwise alike."""
    return [Block(attention, feed=feed, norm=norm, **said) for attention in attentions]
