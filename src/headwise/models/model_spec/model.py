"""Specs of blocks, stacks of blocks and whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, ClassVar, TypeVar

from ...attention.interfaces import Part
from ...attention.spec.attention_spec import AttentionSpec
from ...attention.spec.serialization import dump_toml
from ...util.errors import SpecError
from .components import (
    EmbeddingSpec,
    NormSpec,
    OutputHeadSpec,
    SpecNode,
    WeightSpec,
    add_prefix,
    make_weight,
    to_plain,
)
from .layer_edges import check_edges
from .quantization import QuantizationSpec
from .sublayers import ConvolutionSpec, ExpertsSpec, FeedForwardSpec, RecurrentSpec

# more than any model has; a larger number is a typing error, and every layer would be listed
MAX_LAYERS = 10_000
MAX_PERIOD = 8  # longest repeated pattern of blocks that `find_repeats` looks for

Item = TypeVar("Item")

DEFAULT_NORM = NormSpec()
ATTENTION_SUBLAYERS = ("attention", "cross")
# Suffixes of the norms of each sublayer, by placement; a parallel block has one norm for all
# sublayers.
NORMS_OF_PLACEMENT = {
    **dict.fromkeys(("pre", "post", "post_sublayer", "parallel_two_norms"), ("norm",)),
    "sandwich": ("norm", "norm_after"),
    "parallel": (),
}


@dataclass(frozen=True, repr=False)
class BlockSpec(SpecNode):
    """One layer: mixer, attention, cross-attention, feed-forward, in this order, each with a
    residual connection.

    `mixer` is a recurrence or convolution over the tokens, which usually replaces the
    self-attention.

    placement="pre": x + f(norm(x)); "post": norm(x + f(x)); "post_sublayer": x + norm(f(x)), as
    OLMo 2; "sandwich": x + norm(f(norm(x))), as Gemma 2; "parallel": x + attention(norm(x)) +
    feed(norm(x)), one norm for both, as GPT-J; "parallel_two_norms": parallel sublayers with one
    norm each, as GPT-NeoX. The output of every sublayer is multiplied by `scale` (Granite).
    form="merged" has no self-attention; its cross-attention also adds the mean over the tokens so
    far, computed with its own value and output projections (1908.11365). `constant_sublayers` names
    attentions ("attention", "cross") that were pruned away entirely: each is replaced by one
    learned vector, which is added to every token.

    With `kv_layers_back` the self-attention has queries only, and attends to the keys and values of
    the layer so many layers before it, which may read those of an earlier one: with 1 in every
    second layer cross-layer attention (2405.12981), with 1 in all layers of the second half YOCO's
    decoder (2405.05254; its norm of keys and values folds into their matrices).
    `value_residual` adds the first layer's values V_1 to those of this layer (2410.17897): "mean"
    is (V_1 + V) / 2, as in the released code, "learned" a V_1 + b V with weights that start at 1/2.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "placement": tuple(NORMS_OF_PLACEMENT),
        "form": ("plain", "merged"),
        "value_residual": ("", "mean", "learned"),
    }
    attention: AttentionSpec | None = None
    cross: AttentionSpec | None = None
    feed: FeedForwardSpec | ExpertsSpec | None = None
    norm: NormSpec = DEFAULT_NORM
    placement: str = "pre"
    form: str = "plain"
    scale: float = 1.0
    constant_sublayers: tuple[str, ...] = ()
    mixer: RecurrentSpec | ConvolutionSpec | None = None
    kv_layers_back: int = 0
    value_residual: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        invalid = [
            name
            for name in self.constant_sublayers
            if name not in ATTENTION_SUBLAYERS or name in self.attention_specs
        ]
        if invalid:
            fact = (
                f"BlockSpec(constant_sublayers={self.constant_sublayers!r}) cannot hold "
                f"{invalid[0]!r}"
            )
            raise SpecError(f"{fact}; name an attention that is left out")
        if self.form == "merged" and (self.attention is not None or self.cross is None):
            raise SpecError(
                "BlockSpec(form='merged') adds a mean to its cross-attention; give cross=, and no "
                "attention"
            )
        if self.kv_layers_back and not {"attention"} & {
            *self.attention_specs,
            *self.constant_sublayers,
        }:
            raise SpecError(
                f"BlockSpec(kv_layers_back={self.kv_layers_back}) has no self-attention that could "
                "read keys; give attention="
            )
        if self.kv_layers_back and self.value_residual:
            raise SpecError(
                "a layer that reads the keys and values of an earlier one has no values to add a "
                "residual to; leave kv_layers_back or value_residual out"
            )

    @property
    def starts_from_source(self) -> bool:
        """True if its recurrence starts from the last state of an encoder."""
        return self.mixer is not None and self.mixer.starts_from_source

    @property
    def sublayer_names(self) -> tuple[str, ...]:
        """The names of its sublayers, in the order in which they are applied."""
        present = [
            name
            for name in ATTENTION_SUBLAYERS
            if name in self.attention_specs or name in self.constant_sublayers
        ]
        return (*(["mixer"] if self.mixer else []), *present, *(["feed"] if self.feed else []))

    @property
    def attention_specs(self) -> dict[str, AttentionSpec]:
        """The attention specs by name."""
        named = (("attention", self.attention), ("cross", self.cross))
        return {name: spec for name, spec in named if spec}

    def parts_with_schedule(self, layer: int, layers: int) -> list[tuple[Part, Part]]:
        """Parts that still depend on depth, each paired with its version for this layer."""
        pairs = list[tuple[Part, Part]]()
        for spec in self.attention_specs.values():
            pairs += [(part, part.at_depth(layer, layers)) for _, part in spec.parts()]
        return [(part, placed) for part, placed in pairs if part != placed]

    def at_depth(self, layer: int, layers: int) -> BlockSpec:
        """Return this block at one depth of a stack: schedules become numbers."""
        if not self.parts_with_schedule(layer, layers):
            return self
        own = self.attention
        cross = self.cross
        return replace(
            self,
            attention=own and own.at_depth(layer, layers),
            cross=cross and cross.at_depth(layer, layers),
        )

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield every tensor of the block at this model width, by its name inside the block."""
        yield from add_prefix("mixer", "mixer", self.mixer.weights(width)) if self.mixer else ()
        read = {".".join(names) for names in self.params_read_elsewhere}
        for name, spec in self.attention_specs.items():
            weights = add_prefix(name, name, attention_weights(spec))
            yield from (w for w in weights if w.name not in read)
        if self.value_residual == "learned":
            yield replace(make_weight("value_mix", "part", part=2), role="attention")
        for name in self.constant_sublayers:
            yield from add_prefix(name, name, [make_weight("constant", "model", model=width)])
        yield from add_prefix("feed", "feed", self.feed.weights(width)) if self.feed else ()
        for name in self.norm_names:
            yield from add_prefix(name, "norm", self.norm.weights(width))

    @property
    def params_read_elsewhere(self) -> list[tuple[str, str, str]]:
        """The parameters that its self-attention does not have, because it reads the keys and
        values of an earlier layer: names of the attention, of parts and of parameters.
        """
        if not self.kv_layers_back or self.attention is None:
            return []
        return [("attention", *names) for names in self.attention.list_kv_only_params()]

    @property
    def norm_names(self) -> tuple[str, ...]:
        """The names of its norms, such as "attention_norm"; "norm" if one norm serves all
        sublayers.
        """
        normed = [
            name
            for name in self.sublayer_names
            if name not in self.constant_sublayers or self.placement == "post"
        ]
        if self.placement == "parallel":
            return ("norm",) if normed else ()
        return tuple(map("_".join, product(normed, NORMS_OF_PLACEMENT[self.placement])))


def attention_weights(spec: AttentionSpec) -> Iterator[WeightSpec]:
    """Yield every tensor of an attention layer, by its name inside the layer."""
    for name, part in spec.parts():
        sizes = spec.sizes_of(part)
        for key, param in part.params(spec).items():
            yield WeightSpec(
                f"{name}.{key}",
                param.layout,
                sizes,
                trainable=param.trainable,
                tied_to=param.tied_to or "",
            )


@dataclass(frozen=True, repr=False)
class LayerRun(SpecNode):
    """A sequence of blocks repeated `times` times: LayerRun(13, (local, full)) is 26 layers."""

    times: int
    blocks: tuple[BlockSpec, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks or not all(type(block) is BlockSpec for block in self.blocks):
            raise SpecError(
                f"LayerRun(blocks={self.blocks!r}) must hold blocks; write blocks=(BlockSpec(...),)"
            )


@dataclass(frozen=True, repr=False)
class StackSpec(SpecNode):
    """Layers of width `model`, with an optional embedding before them and an optional norm after
    them.

    `runs` lists the layers, with repetition; stacks with equal layers are equal, however their runs
    are grouped. `StackSpec.from_blocks` takes one block per layer instead, finds repetition, and
    replaces schedules by their numbers at each depth.

    >>> block = BlockSpec(feed=FeedForwardSpec(12))
    >>> stack = StackSpec.from_blocks("decoder", 3, [block] * 5)
    >>> stack.runs[0].times, len(stack.layers), sum(w.numel for w in stack.weights())
    (5, 5, 390)
    """

    name: str
    model: int
    runs: tuple[LayerRun, ...]
    embedding: EmbeddingSpec | None = None
    norm: NormSpec | None = None

    @staticmethod
    def from_blocks(
        name: str, width: int, blocks: Sequence[BlockSpec], **options: Any
    ) -> StackSpec:
        """Return a stack of these blocks, each placed at its depth; `options`
        are the other fields.
        """
        _check_depth(len(blocks))
        placed = [block.at_depth(depth, len(blocks)) for depth, block in enumerate(blocks)]
        return StackSpec(name, width, group_blocks(placed), **options)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier() or self.name == "head":
            raise SpecError(
                f"StackSpec(name={self.name!r}) is not a valid name; write an identifier such as "
                "'decoder'"
            )
        if not all(type(run) is LayerRun for run in self.runs):
            raise SpecError(
                f"{self.name}: runs={self.runs!r} must hold runs; write runs=(LayerRun(12, "
                "(block,)),)"
            )
        _check_depth(sum(run.times * len(run.blocks) for run in self.runs))
        object.__setattr__(self, "runs", group_blocks(self.layers))
        for block in self.kinds_of_blocks:
            for spec in block.attention_specs.values():
                if spec.model != self.model:
                    raise SpecError(
                        f"{self.name} is {self.model} wide, but an attention in it is "
                        f"{spec.model} wide; use one width"
                    )
        check_edges(self.name, self.layers)
        for depth, block in enumerate(self.layers):
            for part, placed in block.parts_with_schedule(depth, len(self.layers))[:1]:
                raise SpecError(
                    f"{self.name}: layer {depth} holds {part!r}, whose numbers depend on the "
                    "depth; "
                    f"use StackSpec.from_blocks, which computes them, or write {placed!r}"
                )

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        """Every block in order, with runs expanded."""
        return tuple(chain.from_iterable(run.blocks * run.times for run in self.runs))

    @property
    def kinds_of_blocks(self) -> tuple[BlockSpec, ...]:
        """The blocks of one repeat of each run."""
        return tuple(chain.from_iterable(run.blocks for run in self.runs))

    def weights(self) -> Iterator[WeightSpec]:
        """Yield every tensor by its full name; a tensor shared by layers has the name that it has
        in the first.
        """
        if self.embedding:
            yield from add_prefix(
                f"{self.name}.embedding", "embedding", self.embedding.weights(self.model)
            )
        owned: dict[tuple[str, tuple[int, ...]], str] = {}
        for depth, block in enumerate(self.layers):
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
    """Group consecutive blocks into runs: greedily the run that covers most blocks, by the shortest
    pattern.
    """
    return tuple(LayerRun(times, pattern) for times, pattern in find_repeats(blocks))


def find_repeats(items: Sequence[Item]) -> Iterator[tuple[int, tuple[Item, ...]]]:
    """Yield (times, pattern) for consecutive repeats in a sequence.

    >>> list(find_repeats("abababc"))
    [(3, ('a', 'b')), (1, ('c',))]
    """
    start = 0
    while start < len(items):
        candidates = [
            (_repeats(items, start, period) * period, -period)
            for period in range(1, MAX_PERIOD + 1)
        ]
        # Most items covered wins, then the shortest period; a period above 1 must occur more than
        # once.
        covered, minus_period = max(run for run in candidates if run[1] == -1 or run[0] > -run[1])
        yield covered // -minus_period, tuple(items[start : start - minus_period])
        start += covered


def _repeats(items: Sequence[Item], start: int, period: int) -> int:
    """Count how often the `period` items from `start` on occur in succession."""
    pattern = items[start : start + period]
    times = 1
    while (
        len(pattern) == period
        and items[start + times * period : start + (times + 1) * period] == pattern
    ):
        times += 1
    return times if len(pattern) == period else 0


# --- Whole models ---------------------------------------------------------------------------------

MODEL_KINDS = ("decoder", "encoder", "encoder-decoder", "vision")


@dataclass(frozen=True, repr=False)
class ModelSpec(SpecNode):
    """The architecture of a model: stacks of layers and output heads, independent of how they are
    executed.

    Counting, building and saving all use the tensors that this spec lists. Heads read the last
    stack. For a model that was read from another format, `notes` lists properties that the spec
    does not describe. `quantization` lists the matrices that the checkpoint stores in fewer bits.

    >>> stack = StackSpec.from_blocks("encoder", 3, [], embedding=EmbeddingSpec(tokens=11))
    >>> model = ModelSpec(
    ...     "none",
    ...     "encoder",
    ...     (stack,),
    ...     (OutputHeadSpec("tokens", 11, table="encoder", bias="learned"),),
    ... )
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
    quantization: QuantizationSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, kind in (("stacks", StackSpec), ("heads", OutputHeadSpec), ("notes", str)):
            if not all(type(item) is kind for item in getattr(self, field)):
                remedy = f"write {field}=({kind.__name__}(...),)"
                raise SpecError(
                    f"{self.name}: {field}={getattr(self, field)!r} must hold {kind.__name__}s; "
                    f"{remedy}"
                )
        expected = 2 if self.kind == "encoder-decoder" else 1
        if len(self.stacks) != expected:
            raise SpecError(
                f"{self.name}: {self.kind} with {len(self.stacks)} stacks; give {expected}"
            )
        names = Counter(
            [stack.name for stack in self.stacks] + [f"head {head.name}" for head in self.heads]
        )
        twice = [name for name, times in names.items() if times > 1]
        if twice:
            raise SpecError(f"{self.name} names {twice[0]!r} twice; give each its own name")
        for reader, table, tokens, width in self._tied_readers():
            self._check_table(reader, table, (tokens, width))
        for stack in self.stacks:
            self._check_sources(stack)

    def _tied_readers(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield each weight tied to a token table: its name, the stack that owns the table, and the
        shape it needs.
        """
        for stack in self.stacks:
            if stack.embedding and stack.embedding.table:
                yield (
                    f"{stack.name}.embedding.tokens",
                    stack.embedding.table,
                    stack.embedding.tokens,
                    stack.model,
                )
        for head in self.heads:
            width = head.transform.hidden if head.transform else self.stacks[-1].model
            if head.table:
                yield f"head.{head.name}.weight", head.table, head.outputs, width

    def _check_table(self, reader: str, table: str, expected: tuple[int, int]) -> None:
        own = [stack for stack in self.stacks if stack.embedding and not stack.embedding.table]
        owners = {stack.name: stack for stack in own if stack.embedding and stack.embedding.tokens}
        if table not in owners:
            remedy = "no stack owns one; leave table out"
            if owners:
                remedy = f"name one of {', '.join(owners)}"
            raise SpecError(f"{self.name}: {reader} reads the table of {table!r}; {remedy}")
        embedding = owners[table].embedding
        model = owners[table].model
        if embedding and (embedding.tokens, model) != expected:
            raise SpecError(
                f"{self.name}: {reader} of {expected[0]} x {expected[1]} cannot be the table of "
                f"{table}, "
                f"{embedding.tokens} x {model}; leave table out"
            )

    def _check_sources(self, stack: StackSpec) -> None:
        """Refuse what reads an encoder without a stack before it, or with another source width than
        that stack.
        """
        starts_from_source = any(block.starts_from_source for block in stack.kinds_of_blocks)
        if starts_from_source and (stack is self.stacks[0] or stack.model != self.stacks[0].model):
            remedy = "give initial='zeros', or a stack of this width before it"
            raise SpecError(
                f"{self.name}: {stack.name} starts from the state of an encoder; {remedy}"
            )
        crosses = [block.cross for block in stack.kinds_of_blocks if block.cross]
        if crosses and stack is self.stacks[0]:
            raise SpecError(
                f"{self.name}: {stack.name} has cross-attention, but no stack before it to read; "
                "add one"
            )
        for cross in crosses:
            if (cross.source or cross.model) != self.stacks[0].model:
                widths = (
                    f"{cross.source or cross.model} wide, but {self.stacks[0].name} is "
                    f"{self.stacks[0].model}"
                )
                raise SpecError(
                    f"{self.name}: the source of a cross-attention is {widths}; give source="
                )

    def weights(self) -> Iterator[WeightSpec]:
        """Yield every tensor once; a shared or tied tensor has the name of its owner."""
        for stack in self.stacks:
            yield from stack.weights()
        for head in self.heads:
            yield from add_prefix(f"head.{head.name}", "head", head.weights(self.stacks[-1].model))

    def params(self) -> dict[str, WeightSpec]:
        """Return the spec of every tensor by its name."""
        return {w.name: w for w in self.weights()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name."""
        return {w.name: w.shape for w in self.weights()}

    def tied_weights(self) -> dict[str, str]:
        """Return the names of tied weights, each with the name of the tensor that it shares."""
        return {reader: f"{table}.embedding.tokens" for reader, table, _, _ in self._tied_readers()}

    def attention_specs(self) -> Iterator[tuple[str, AttentionSpec]]:
        """Yield every attention by its name, such as "decoder.3.attention"."""
        for stack in self.stacks:
            for depth, block in enumerate(stack.layers):
                yield from (
                    (f"{stack.name}.{depth}.{name}", spec)
                    for name, spec in block.attention_specs.items()
                )

    @property
    def num_state_values(self) -> int:
        """Values that decoding keeps of each row for the recurrences and convolutions of the last
        stack.
        """
        stack = self.stacks[-1]
        return sum(block.mixer.state_vectors * stack.model for block in stack.layers if block.mixer)

    @property
    def has_mixer(self) -> bool:
        """True if a layer is a recurrence or a convolution, so that each row must hold one text."""
        blocks = chain.from_iterable(stack.kinds_of_blocks for stack in self.stacks)
        return any(block.mixer for block in blocks)

    def __str__(self) -> str:
        return dump_toml(to_plain(self))
