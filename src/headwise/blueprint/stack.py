"""Blocks, and stacks of them: what a model repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ..errors import SpecError
from ..layout import Layout
from ..seams import Part
from ..spec import AttentionSpec
from .ends import Embedding
from .pieces import Dense, Described, Experts, Norm, Weight, under, weight

LAYERS = 10_000  # more than any model has: a larger number is a slip, and would be listed one by one
PERIOD = 8  # how many blocks a repeated pattern of layers may be long, to be found by itself

Item = TypeVar("Item")

USUAL = Norm()
ATTENTIONS = ("attention", "cross")
# The norms of each sublayer by where they stand; a parallel block has one for all.
NORMS = {
    **dict.fromkeys(("pre", "post", "after", "abreast"), ("norm",)),
    "sandwich": ("norm", "norm_after"),
    "parallel": (),
}


@dataclass(frozen=True, repr=False)
class Nearly(Described):
    """An attention that no spec says: the nearest one, why it is not that one, and the vectors it has besides.

    Its parameters are exact; `like` is what stands in its place where a spec is asked for.
    """

    like: AttentionSpec
    reason: str
    more: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("Nearly", self.more)


@dataclass(frozen=True, repr=False)
class Block(Described):
    """x, then what its attention, its cross-attention and its feed-forward add to it, in this order.

    placement="pre": x + f(norm(x)); "post": norm(x + f(x)); "after": x + norm(f(x)), as OLMo 2; "sandwich":
    x + norm(f(norm(x))), as Gemma 2; "parallel": x + attention(norm(x)) + feed(norm(x)), one norm for both, as GPT-J;
    "abreast": the same with a norm for each, as GPT-NeoX. What a sublayer adds is multiplied with `scale` (Granite).
    form="merged" has no attention of its own: its cross-attention adds the mean of the block's own tokens so far,
    through the same maps (1908.11365). An attention that was cut away altogether is `still`: of "attention" and "cross"
    those that add one learned vector to every token, whatever is read.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"placement": tuple(NORMS), "form": ("plain", "merged")}
    attention: AttentionSpec | Nearly | None = None
    cross: AttentionSpec | None = None
    feed: Dense | Experts | None = None
    norm: Norm = USUAL
    placement: str = "pre"
    form: str = "plain"
    scale: float = 1.0
    still: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [name for name in self.still if name not in ATTENTIONS or name in self.specs]:
            raise SpecError(f"Block(still={self.still!r}) cannot hold {wrong[0]!r}; name an attention that is left out")
        if self.form == "merged" and (self.attention is not None or self.cross is None):
            raise SpecError("Block(form='merged') adds a mean to its cross-attention; give cross=, and no attention")

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The names of what adds to x, in order."""
        there = [name for name in ATTENTIONS if name in self.specs or name in self.still]
        return (*there, *(["feed"] if self.feed else []))

    @property
    def specs(self) -> dict[str, AttentionSpec]:
        """Its attentions by name; of one that no spec says, the nearest."""
        own = self.attention.like if isinstance(self.attention, Nearly) else self.attention
        return {name: spec for name, spec in (("attention", own), ("cross", self.cross)) if spec}

    def late(self, layer: int, layers: int) -> list[tuple[Part, Part]]:
        """Its parts with a schedule that does not stand at this depth yet, and as they would stand."""
        parts = [part for spec in self.specs.values() for _, part in spec.parts()]
        both = [(part, part.placed(layer, layers)) for part in parts]
        return [(part, placed) for part, placed in both if part != placed]

    def placed(self, layer: int, layers: int) -> Block:
        """The same block at one depth of a stack: schedules become numbers."""
        if not self.late(layer, layers):
            return self
        own, cross = self.attention, self.cross
        if isinstance(own, Nearly):
            own = replace(own, like=own.like.placed(layer, layers))
        else:
            own = own and own.placed(layer, layers)
        return replace(self, attention=own, cross=cross and cross.placed(layer, layers))

    def weights(self, model: int) -> Iterator[Weight]:
        """Every tensor it has at this width, by its name inside the block."""
        for name, spec in self.specs.items():
            yield from under(name, name, _weights_of(spec))
        if isinstance(self.attention, Nearly):
            yield from under("attention", "attention", vectors(self.attention.more))
        for name in self.still:
            yield from under(name, name, [weight("constant", "model", model=model)])
        yield from under("feed", "feed", self.feed.weights(model)) if self.feed else ()
        for name in self.norms:
            yield from under(name, "norm", self.norm.weights(model))

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of its norms: "attention_norm", say; "norm" when one serves all."""
        there = [name for name in self.sublayers if name not in self.still or self.placement == "post"]
        if self.placement == "parallel":
            return ("norm",) if there else ()
        return tuple(f"{name}_{norm}" for name in there for norm in NORMS[self.placement])


def _weights_of(spec: AttentionSpec) -> Iterator[Weight]:
    for name, part in spec.parts():
        sizes = spec.sizes_of(part)
        for key, param in part.params(spec).items():
            yield Weight(f"{name}.{key}", param.layout, sizes, learned=param.learned, shared=param.tied or "")


def check_sizes(what: str, more: Iterable[tuple[str, int]]) -> None:
    """Refuse what is no list of names with sizes."""
    for row in more:
        if [type(item) for item in row] != [str, int] or row[1] < 1:
            raise SpecError(f"{what}(more={more!r}) must name sizes; write more=(('project.k_bias', 12),)")


def vectors(named: Iterable[tuple[str, int]]) -> Iterator[Weight]:
    """Tensors of which only the size is known."""
    return (Weight(name, Layout.parse("channel"), {"channel": size}) for name, size in named)


@dataclass(frozen=True, repr=False)
class Run(Described):
    """Blocks in a row, all of them so many times: Run(13, (local, full)) is 26 layers."""

    times: int
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks or not all(type(block) is Block for block in self.blocks):
            raise SpecError(f"Run(blocks={self.blocks!r}) must hold blocks; write blocks=(Block(...),)")


@dataclass(frozen=True, repr=False)
class Stack(Described):
    """Layers over an embedding, `model` wide, and a norm behind them or none.

    `runs` say the layers; however they are written, stacks of the same layers are equal. `Stack.of` takes blocks
    instead, finds what repeats, and places schedules by depth. weights_of="first": all layers read those of the first
    (ALBERT, 1909.11942), "each": every layer has its own.

    >>> block = Block(feed=Dense(12))
    >>> stack = Stack.of("decoder", 3, [block] * 5)
    >>> stack.runs[0].times, len(stack.layers), sum(w.numel for w in stack.weights())
    (5, 5, 390)
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"weights_of": ("each", "first")}
    name: str
    model: int
    runs: tuple[Run, ...]
    embedding: Embedding | None = None
    norm: Norm | None = None
    weights_of: str = "each"

    @staticmethod
    def of(name: str, model: int, blocks: Sequence[Block], **said: Any) -> Stack:
        """A stack of these blocks, each placed at its depth; `said` are the other fields."""
        _check_depth(len(blocks))
        placed = [block.placed(depth, len(blocks)) for depth, block in enumerate(blocks)]
        return Stack(name, model, runs_of(placed), **said)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier() or self.name == "head":
            raise SpecError(f"Stack(name={self.name!r}) is no name of a stack; write a word such as 'decoder'")
        if not all(type(run) is Run for run in self.runs):
            raise SpecError(f"{self.name}: runs={self.runs!r} must hold runs; write runs=(Run(12, (block,)),)")
        _check_depth(sum(run.times * len(run.blocks) for run in self.runs))
        object.__setattr__(self, "runs", runs_of(self.layers))
        for spec in (spec for run in self.runs for block in run.blocks for spec in block.specs.values()):
            if spec.model != self.model:
                raise SpecError(f"{self.name} is {self.model} wide, an attention in it {spec.model}; use one width")
        for depth, block in enumerate(self.layers):
            for part, placed in block.late(depth, len(self.layers))[:1]:
                raise SpecError(
                    f"{self.name}: layer {depth} holds {part!r}, whose numbers follow from the depth; "
                    f"use Stack.of, which places it, or write {placed!r}"
                )

    @property
    def layers(self) -> tuple[Block, ...]:
        """Every block, in order."""
        return tuple(block for run in self.runs for _ in range(run.times) for block in run.blocks)

    def weights(self) -> Iterator[Weight]:
        """Every tensor by its full name; one that layers share is named where it first stands."""
        if self.embedding:
            yield from under(f"{self.name}.embedding", "embedding", self.embedding.weights(self.model))
        owned: dict[tuple[str, tuple[int, ...]], str] = {}
        for depth, block in enumerate(self.layers if self.weights_of == "each" else self.layers[:1]):
            for w in block.weights(self.model):
                name = f"{self.name}.{depth}.{w.name}"
                key = (w.name, w.shape)
                if not w.shared or owned.setdefault(key, name) == name:
                    yield replace(w, name=name)
        if self.norm:
            yield from under(f"{self.name}.norm", "norm", self.norm.weights(self.model))


def _check_depth(layers: int) -> None:
    if not 0 <= layers <= LAYERS:
        raise SpecError(f"{layers} layers are more than any model has; use at most {LAYERS}")


def runs_of(blocks: Sequence[Block]) -> tuple[Run, ...]:
    """What repeats in a row of blocks, from its start: as many as possible at a time, by the shortest pattern."""
    return tuple(Run(times, pattern) for times, pattern in repeats(blocks))


def repeats(items: Sequence[Item]) -> Iterator[tuple[int, tuple[Item, ...]]]:
    """The same of any things: how many times, and what.

    >>> list(repeats("abababc"))
    [(3, ('a', 'b')), (1, ('c',))]
    """
    at = 0
    while at < len(items):
        ways = [(_repeats(items, at, period) * period, -period) for period in range(1, PERIOD + 1)]
        covered, back = max(way for way in ways if way[1] == -1 or way[0] > -way[1])
        yield covered // -back, tuple(items[at : at - back])
        at += covered


def _repeats(items: Sequence[Item], at: int, period: int) -> int:
    """How often the next `period` come one after another."""
    pattern = items[at : at + period]
    times = 1
    while len(pattern) == period and items[at + times * period : at + (times + 1) * period] == pattern:
        times += 1
    return times if len(pattern) == period else 0
