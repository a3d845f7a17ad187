"""A whole model, described: stacks over embeddings, and heads on the last of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ..errors import SpecError
from ..spec import AttentionSpec
from .ends import EmbeddingSpec, OutputHeadSpec
from .pieces import SpecNode, WeightSpec, add_prefix
from .stack import ApproximateAttention, StackSpec, check_named_sizes, make_vectors

MODEL_KINDS = ("decoder", "encoder", "encoder-decoder", "vision")
WEIGHT_ROLES = frozenset({"embedding", "attention", "cross", "feed", "norm", "head"})


@dataclass(frozen=True, repr=False)
class UnsupportedPart(SpecNode):
    """What a model has besides and no word here says: why, and its tensors by name and size, if it has any.

    They are counted with the model's; what is computed with them is not, and such a model is not built.

    >>> [(w.name, w.numel, w.role) for w in UnsupportedPart("reads sound", (("encoder.embedding.conv1", 12),)).weights()]
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

    >>> stack = StackSpec.of("encoder", 3, [], embedding=Embedding(tokens=11))
    >>> model = ModelSpec("none", "encoder", (stack,), (OutputHeadSpec("tokens", 11, table="encoder", bias="learned"),))
    >>> model.shapes()
    {'encoder.embedding.tokens': (11, 3), 'head.tokens.bias': (11,)}
    >>> model.ties()
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
        for field, kind in (("stacks", StackSpec), ("heads", OutputHeadSpec), ("notes", str), ("beyond", UnsupportedPart)):
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

    def weights_by_name(self) -> dict[str, WeightSpec]:
        """Every tensor by its name, as a spec says its own."""
        return {w.name: w for w in self.weights()}

    def shapes_by_name(self) -> dict[str, tuple[int, ...]]:
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
        from .text import to_toml

        return to_toml(self)


def _owns_table(embedding: EmbeddingSpec | None) -> bool:
    return embedding is not None and bool(embedding.tokens) and not embedding.table
