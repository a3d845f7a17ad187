"""Blocks, and stacks of them: what a model repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ..errors import SpecError
from ..layout import AxisLayout
from ..seams import Part
from ..spec import AttentionSpec
from .ends import EmbeddingSpec
from .pieces import FeedForwardSpec, SpecNode, ExpertsSpec, NormSpec, WeightSpec, add_prefix, make_weight

MAX_LAYERS = 10_000  # more than any model has: a larger number is a slip, and would be listed one by one
MAX_PERIOD = 8  # how many blocks a repeated pattern of layers may be long, to be found by itself

Item = TypeVar("Item")

DEFAULT_NORM = NormSpec()
ATTENTION_SUBLAYERS = ("attention", "cross")
# The norms of each sublayer by where they stand; a parallel block has one for all.
NORMS_OF_PLACEMENT = {
    **dict.fromkeys(("pre", "post", "after", "abreast"), ("norm",)),
    "sandwich": ("norm", "norm_after"),
    "parallel": (),
}


@dataclass(frozen=True, repr=False)
class ApproximateAttention(SpecNode):
    """An attention that no spec says: the nearest one, why it is not that one, and the vectors it has besides.

    Its parameters are exact; `like` is what stands in its place where a spec is asked for.
    """

    like: AttentionSpec
    reason: str
    more: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_named_sizes("Nearly", self.more)


@dataclass(frozen=True, repr=False)
class BlockSpec(SpecNode):
    """x, then what its attention, its cross-attention and its feed-forward add to it, in this order.

    placement="pre": x + f(norm(x)); "post": norm(x + f(x)); "after": x + norm(f(x)), as OLMo 2; "sandwich":
    x + norm(f(norm(x))), as Gemma 2; "parallel": x + attention(norm(x)) + feed(norm(x)), one norm for both, as GPT-J;
    "abreast": the same with a norm for each, as GPT-NeoX. What a sublayer adds is multiplied with `scale` (Granite).
    form="merged" has no attention of its own: its cross-attention adds the mean of the block's own tokens so far,
    through the same maps (1908.11365). An attention that was cut away altogether is `still`: of "attention" and "cross"
    those that add one learned vector to every token, whatever is read.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"placement": tuple(NORMS_OF_PLACEMENT), "form": ("plain", "merged")}
    attention: AttentionSpec | ApproximateAttention | None = None
    cross: AttentionSpec | None = None
    feed: FeedForwardSpec | ExpertsSpec | None = None
    norm: NormSpec = DEFAULT_NORM
    placement: str = "pre"
    form: str = "plain"
    scale: float = 1.0
    still: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [name for name in self.still if name not in ATTENTION_SUBLAYERS or name in self.attention_specs]:
            raise SpecError(f"Block(still={self.still!r}) cannot hold {wrong[0]!r}; name an attention that is left out")
        if self.form == "merged" and (self.attention is not None or self.cross is None):
            raise SpecError("Block(form='merged') adds a mean to its cross-attention; give cross=, and no attention")

    @property
    def sublayer_names(self) -> tuple[str, ...]:
        """The names of what adds to x, in order."""
        there = [name for name in ATTENTION_SUBLAYERS if name in self.attention_specs or name in self.still]
        return (*there, *(["feed"] if self.feed else []))

    @property
    def attention_specs(self) -> dict[str, AttentionSpec]:
        """Its attentions by name; of one that no spec says, the nearest."""
        own = self.attention.like if isinstance(self.attention, ApproximateAttention) else self.attention
        return {name: spec for name, spec in (("attention", own), ("cross", self.cross)) if spec}

    def parts_with_schedule(self, layer: int, layers: int) -> list[tuple[Part, Part]]:
        """Its parts with a schedule that does not stand at this depth yet, and as they would stand."""
        parts = [part for spec in self.attention_specs.values() for _, part in spec.parts()]
        both = [(part, part.at_depth(layer, layers)) for part in parts]
        return [(part, placed) for part, placed in both if part != placed]

    def at_depth(self, layer: int, layers: int) -> BlockSpec:
        """The same block at one depth of a stack: schedules become numbers."""
        if not self.parts_with_schedule(layer, layers):
            return self
        own, cross = self.attention, self.cross
        if isinstance(own, ApproximateAttention):
            own = replace(own, like=own.like.at_depth(layer, layers))
        else:
            own = own and own.at_depth(layer, layers)
        return replace(self, attention=own, cross=cross and cross.at_depth(layer, layers))

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Every tensor it has at this width, by its name inside the block."""
        for name, spec in self.attention_specs.items():
            yield from add_prefix(name, name, _attention_weights(spec))
        if isinstance(self.attention, ApproximateAttention):
            yield from add_prefix("attention", "attention", make_vectors(self.attention.more))
        for name in self.still:
            yield from add_prefix(name, name, [make_weight("constant", "model", model=width)])
        yield from add_prefix("feed", "feed", self.feed.weights(width)) if self.feed else ()
        for name in self.norm_names:
            yield from add_prefix(name, "norm", self.norm.weights(width))

    @property
    def norm_names(self) -> tuple[str, ...]:
        """The names of its norms: "attention_norm", say; "norm" when one serves all."""
        there = [name for name in self.sublayer_names if name not in self.still or self.placement == "post"]
        if self.placement == "parallel":
            return ("norm",) if there else ()
        return tuple(f"{name}_{norm}" for name in there for norm in NORMS_OF_PLACEMENT[self.placement])


def _attention_weights(spec: AttentionSpec) -> Iterator[WeightSpec]:
    for name, part in spec.parts():
        sizes = spec.sizes_of(part)
        for key, param in part.params(spec).items():
            yield WeightSpec(f"{name}.{key}", param.layout, sizes, trainable=param.trainable, tied_to=param.tied_to or "")


def check_named_sizes(what: str, more: Iterable[tuple[str, int]]) -> None:
    """Refuse what is no list of names with sizes."""
    for row in more:
        if [type(item) for item in row] != [str, int] or row[1] < 1:
            raise SpecError(f"{what}(more={more!r}) must name sizes; write more=(('project.k_bias', 12),)")


def make_vectors(named: Iterable[tuple[str, int]]) -> Iterator[WeightSpec]:
    """Tensors of which only the size is known."""
    return (WeightSpec(name, AxisLayout.parse("channel"), {"channel": size}) for name, size in named)


@dataclass(frozen=True, repr=False)
class LayerRun(SpecNode):
    """Blocks in a row, all of them so many times: Run(13, (local, full)) is 26 layers."""

    times: int
    blocks: tuple[BlockSpec, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks or not all(type(block) is BlockSpec for block in self.blocks):
            raise SpecError(f"Run(blocks={self.blocks!r}) must hold blocks; write blocks=(Block(...),)")


@dataclass(frozen=True, repr=False)
class StackSpec(SpecNode):
    """Layers over an embedding, `model` wide, and a norm behind them or none.

    `runs` say the layers; however they are written, stacks of the same layers are equal. `Stack.of` takes blocks
    instead, finds what repeats, and places schedules by depth. weights_of="first": all layers read those of the first
    (ALBERT, 1909.11942), "each": every layer has its own.

    >>> block = BlockSpec(feed=Dense(12))
    >>> stack = StackSpec.of("decoder", 3, [block] * 5)
    >>> stack.runs[0].times, len(stack.layers), sum(w.numel for w in stack.weights())
    (5, 5, 390)
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"weights_of": ("each", "first")}
    name: str
    model: int
    runs: tuple[LayerRun, ...]
    embedding: EmbeddingSpec | None = None
    norm: NormSpec | None = None
    weights_of: str = "each"

    @staticmethod
    def from_blocks(name: str, width: int, blocks: Sequence[BlockSpec], **said: Any) -> StackSpec:
        """A stack of these blocks, each placed at its depth; `said` are the other fields."""
        _check_depth(len(blocks))
        placed = [block.at_depth(depth, len(blocks)) for depth, block in enumerate(blocks)]
        return StackSpec(name, width, group_blocks(placed), **said)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier() or self.name == "head":
            raise SpecError(f"Stack(name={self.name!r}) is no name of a stack; write a word such as 'decoder'")
        if not all(type(run) is LayerRun for run in self.runs):
            raise SpecError(f"{self.name}: runs={self.runs!r} must hold runs; write runs=(Run(12, (block,)),)")
        _check_depth(sum(run.times * len(run.blocks) for run in self.runs))
        object.__setattr__(self, "runs", group_blocks(self.layers))
        for spec in (spec for run in self.runs for block in run.blocks for spec in block.attention_specs.values()):
            if spec.model != self.model:
                raise SpecError(f"{self.name} is {self.model} wide, an attention in it {spec.model}; use one width")
        for depth, block in enumerate(self.layers):
            for part, placed in block.parts_with_schedule(depth, len(self.layers))[:1]:
                raise SpecError(
                    f"{self.name}: layer {depth} holds {part!r}, whose numbers follow from the depth; "
                    f"use Stack.of, which places it, or write {placed!r}"
                )

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        """Every block, in order."""
        return tuple(block for run in self.runs for _ in range(run.times) for block in run.blocks)

    def weights(self) -> Iterator[WeightSpec]:
        """Every tensor by its full name; one that layers share is named where it first stands."""
        if self.embedding:
            yield from add_prefix(f"{self.name}.embedding", "embedding", self.embedding.weights(self.model))
        owned: dict[tuple[str, tuple[int, ...]], str] = {}
        for depth, block in enumerate(self.layers if self.weights_of == "each" else self.layers[:1]):
            for w in block.weights(self.model):
                name = f"{self.name}.{depth}.{w.name}"
                key = (w.name, w.shape)
                if not w.tied_to or owned.setdefault(key, name) == name:
                    yield replace(w, name=name)
        if self.norm:
            yield from add_prefix(f"{self.name}.norm", "norm", self.norm.weights(self.model))


def _check_depth(layers: int) -> None:
    if not 0 <= layers <= MAX_LAYERS:
        raise SpecError(f"{layers} layers are more than any model has; use at most {MAX_LAYERS}")


def group_blocks(blocks: Sequence[BlockSpec]) -> tuple[LayerRun, ...]:
    """What repeats in a row of blocks, from its start: as many as possible at a time, by the shortest pattern."""
    return tuple(LayerRun(times, pattern) for times, pattern in find_repeats(blocks))


def find_repeats(items: Sequence[Item]) -> Iterator[tuple[int, tuple[Item, ...]]]:
    """The same of any things: how many times, and what.

    >>> list(find_repeats("abababc"))
    [(3, ('a', 'b')), (1, ('c',))]
    """
    at = 0
    while at < len(items):
        ways = [(_repeats(items, at, period) * period, -period) for period in range(1, MAX_PERIOD + 1)]
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
