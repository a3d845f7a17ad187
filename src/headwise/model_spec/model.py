"""Blocks, and stacks of them: what a model repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ..errors import SpecError
from ..interfaces import Part
from ..interfaces.axis_layout import AxisLayout
from ..spec.attention_spec import AttentionSpec
from .components import (
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    NormSpec,
    OutputHeadSpec,
    SpecNode,
    WeightSpec,
    add_prefix,
    make_weight,
)

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

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "placement": tuple(NORMS_OF_PLACEMENT),
        "form": ("plain", "merged"),
    }
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
            raise SpecError(
                f"BlockSpec(still={self.still!r}) cannot hold {wrong[0]!r}; name an attention that is left out"
            )
        if self.form == "merged" and (self.attention is not None or self.cross is None):
            raise SpecError(
                "BlockSpec(form='merged') adds a mean to its cross-attention; give cross=, and no attention"
            )

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
            yield WeightSpec(
                f"{name}.{key}", param.layout, sizes, trainable=param.trainable, tied_to=param.tied_to or ""
            )


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
    """Blocks in a row, all of them so many times: LayerRun(13, (local, full)) is 26 layers."""

    times: int
    blocks: tuple[BlockSpec, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks or not all(type(block) is BlockSpec for block in self.blocks):
            raise SpecError(f"LayerRun(blocks={self.blocks!r}) must hold blocks; write blocks=(BlockSpec(...),)")


@dataclass(frozen=True, repr=False)
class StackSpec(SpecNode):
    """Layers over an embedding, `model` wide, and a norm behind them or none.

    `runs` say the layers; however they are written, stacks of the same layers are equal. `StackSpec.from_blocks`
    takes blocks instead, finds what repeats, and places schedules by depth. weights_of="first": all layers read those
    of the first (ALBERT, 1909.11942), "each": every layer has its own.

    >>> block = BlockSpec(feed=FeedForwardSpec(12))
    >>> stack = StackSpec.from_blocks("decoder", 3, [block] * 5)
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
            raise SpecError(f"StackSpec(name={self.name!r}) is no name of a stack; write a word such as 'decoder'")
        if not all(type(run) is LayerRun for run in self.runs):
            raise SpecError(f"{self.name}: runs={self.runs!r} must hold runs; write runs=(LayerRun(12, (block,)),)")
        _check_depth(sum(run.times * len(run.blocks) for run in self.runs))
        object.__setattr__(self, "runs", group_blocks(self.layers))
        for spec in (spec for run in self.runs for block in run.blocks for spec in block.attention_specs.values()):
            if spec.model != self.model:
                raise SpecError(f"{self.name} is {self.model} wide, an attention in it {spec.model}; use one width")
        for depth, block in enumerate(self.layers):
            for part, placed in block.parts_with_schedule(depth, len(self.layers))[:1]:
                raise SpecError(
                    f"{self.name}: layer {depth} holds {part!r}, whose numbers follow from the depth; "
                    f"use StackSpec.from_blocks, which places it, or write {placed!r}"
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


# --- A whole model, described --------------------------------------------------------------------------

MODEL_KINDS = ("decoder", "encoder", "encoder-decoder", "vision")
WEIGHT_ROLES = frozenset({"embedding", "attention", "cross", "feed", "norm", "head"})


@dataclass(frozen=True, repr=False)
class UnsupportedPart(SpecNode):
    """What a model has besides and no word here says: why, and its tensors by name and size, if it has any.

    They are counted with the model's; what is computed with them is not, and such a model is not built.

    >>> [
    ...     (w.name, w.numel, w.role)
    ...     for w in UnsupportedPart("reads sound", (("encoder.embedding.conv1", 12),)).weights()
    ... ]
    [('encoder.embedding.conv1', 12, 'embedding')]
    """

    reason: str
    more: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_named_sizes("Beyond", self.more)
        for name, _ in self.more:
            if name.count(".") < 2 or not WEIGHT_ROLES & set(name.split(".")):
                raise SpecError(
                    f"Beyond names {name!r}; write its stack, its place and its name: 'encoder.0.feed.gate'"
                )

    def weights(self) -> Iterator[WeightSpec]:
        """What it learns, each tensor as one row of numbers."""
        for w in make_vectors(self.more):
            yield replace(w, role=next(word for word in w.name.split(".") if word in WEIGHT_ROLES))


@dataclass(frozen=True, repr=False)
class ModelSpec(SpecNode):
    """What a model is, never how it runs: counting, building and saving read the same tensors off it.

    Heads read the last stack. `notes` keep what the words here do not say of a model that was read from elsewhere;
    `beyond` what stands in it besides, with tensors of its own.

    >>> stack = StackSpec.from_blocks("encoder", 3, [], embedding=EmbeddingSpec(tokens=11))
    >>> model = ModelSpec("none", "encoder", (stack,), (OutputHeadSpec("tokens", 11, table="encoder", bias="learned"),))
    >>> model.shapes()
    {'encoder.embedding.tokens': (11, 3), 'head.tokens.bias': (11,)}
    >>> model.tied_weights()
    {'head.tokens.weight': 'encoder.embedding.tokens'}
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": MODEL_KINDS}
    name: str
    kind: str
    stacks: tuple[StackSpec, ...]
    heads: tuple[OutputHeadSpec, ...] = ()
    notes: tuple[str, ...] = ()
    beyond: tuple[UnsupportedPart, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, kind in (
            ("stacks", StackSpec),
            ("heads", OutputHeadSpec),
            ("notes", str),
            ("beyond", UnsupportedPart),
        ):
            if not all(type(item) is kind for item in getattr(self, field)):
                write = f"write {field}=({kind.__name__}(...),)"
                raise SpecError(f"{self.name}: {field}={getattr(self, field)!r} must hold {kind.__name__}s; {write}")
        if len(self.stacks) != (wanted := 2 if self.kind == "encoder-decoder" else 1):
            raise SpecError(f"{self.name}: {self.kind} with {len(self.stacks)} stacks; give {wanted}")
        names = Counter([stack.name for stack in self.stacks] + [f"head {head.name}" for head in self.heads])
        if twice := [name for name, times in names.items() if times > 1]:
            raise SpecError(f"{self.name} names {twice[0]!r} twice; give each its own name")
        for reader, table, tokens, width in self._tied_readers():
            self._check_table(reader, table, (tokens, width))
        for stack in self.stacks:
            self._check_sources(stack)

    def _tied_readers(self) -> Iterator[tuple[str, str, int, int]]:
        """Who reads a table that another owns: its name, the owner's stack, and the shape it needs."""
        for stack in self.stacks:
            if stack.embedding and stack.embedding.table:
                yield f"{stack.name}.embedding.tokens", stack.embedding.table, stack.embedding.tokens, stack.model
        for head in self.heads:
            width = head.transform.hidden if head.transform else self.stacks[-1].model
            if head.table:
                yield f"head.{head.name}.weight", head.table, head.outputs, width

    def _check_table(self, reader: str, table: str, wanted: tuple[int, int]) -> None:
        owners = {stack.name: stack for stack in self.stacks if _owns_table(stack.embedding)}
        if table not in owners:
            own = f"name one of {', '.join(owners)}" if owners else "no stack owns one; leave table out"
            raise SpecError(f"{self.name}: {reader} reads the table of {table!r}; {own}")
        embedding, model = owners[table].embedding, owners[table].model
        if embedding and (embedding.tokens, model) != wanted:
            raise SpecError(
                f"{self.name}: {reader} of {wanted[0]} x {wanted[1]} cannot be the table of {table}, "
                f"{embedding.tokens} x {model}; leave table out"
            )

    def _check_sources(self, stack: StackSpec) -> None:
        """What a cross-attention reads is as wide as the stack before it."""
        crosses = [block.cross for run in stack.runs for block in run.blocks if block.cross]
        if crosses and stack is self.stacks[0]:
            raise SpecError(f"{self.name}: {stack.name} has cross-attention, but no stack before it to read; add one")
        for cross in crosses:
            if (cross.source or cross.model) != self.stacks[0].model:
                read = f"{cross.source or cross.model} wide, but {self.stacks[0].name} is {self.stacks[0].model}"
                raise SpecError(f"{self.name}: what cross-attention reads is {read}; give source=")

    def weights(self) -> Iterator[WeightSpec]:
        """Every tensor, once: one that is shared or tied stands under its owner's name."""
        for stack in self.stacks:
            yield from stack.weights()
        for head in self.heads:
            yield from add_prefix(f"head.{head.name}", "head", head.weights(self.stacks[-1].model))
        for beyond in self.beyond:
            yield from beyond.weights()

    def params(self) -> dict[str, WeightSpec]:
        """Every tensor by its name, as a spec says its own."""
        return {w.name: w for w in self.weights()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by its name."""
        return {w.name: w.shape for w in self.weights()}

    def tied_weights(self) -> dict[str, str]:
        """Names that a tensor also goes by, with the one it is kept under."""
        return {reader: f"{table}.embedding.tokens" for reader, table, _, _ in self._tied_readers()}

    def attention_specs(self) -> Iterator[tuple[str, AttentionSpec]]:
        """Every attention by where its tensors stand, "decoder.3.attention"; the nearest spec if none says it."""
        for stack in self.stacks:
            for depth, block in enumerate(stack.layers):
                yield from ((f"{stack.name}.{depth}.{name}", spec) for name, spec in block.attention_specs.items())

    def approximation_reasons(self) -> dict[str, str]:
        """Attentions that no spec says, with the reason."""
        return {
            f"{stack.name}.{depth}.attention": block.attention.reason
            for stack in self.stacks
            for depth, block in enumerate(stack.layers)
            if isinstance(block.attention, ApproximateAttention)
        }

    def __str__(self) -> str:
        from .serialization import to_toml

        return to_toml(self)


def _owns_table(embedding: EmbeddingSpec | None) -> bool:
    return embedding is not None and bool(embedding.tokens) and not embedding.table
