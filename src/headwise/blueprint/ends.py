"""What enters a stack and what leaves a model: embeddings and heads; each says its own weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ..errors import SpecError
from .pieces import SpecNode, NormSpec, WeightSpec, add_prefix, make_weight


@dataclass(frozen=True, repr=False)
class PositionSpec(SpecNode):
    """A vector added for each of `length` positions; `skipped` rows of a learned table stand before the first.

    Sinusoidal ones of layout="interleaved" alternate sine and cosine (1706.03762); "halves" puts all sines first.

    >>> [w.shape for w in PositionSpec("learned", 1024, skipped=2).weights(7)], list(PositionSpec("sinusoidal").weights(7))
    ([(1026, 7)], [])
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "kind": ("learned", "sinusoidal"),
        "layout": ("interleaved", "halves"),
    }
    kind: str
    length: int | None = None
    skipped: int = 0
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "learned" and self.length is None:
            raise SpecError("Positions('learned') need a row for each position; give length=512, say")

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """The table, where it is learned."""
        if self.kind == "learned" and self.length:
            yield make_weight("positions", "position model", position=self.length + self.skipped, model=width)


@dataclass(frozen=True, repr=False)
class PatchSpec(SpecNode):
    """An image of rows x columns patches, each high x wide pixels of some channels, as one linear map.

    bias="none" leaves out the bias that it has otherwise.

    >>> sum(w.numel for w in PatchSpec(rows=14, columns=14, high=16, wide=16, channels=3).weights(768))
    590592
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"bias": ("learned", "none")}
    rows: int
    columns: int
    high: int
    wide: int
    channels: int = 3
    bias: str = "learned"

    @property
    def num_patches(self) -> int:
        """How many tokens an image becomes."""
        return self.rows * self.columns

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """The map of one patch."""
        sizes = {"model": width, "channel": self.channels, "high": self.high, "wide": self.wide}
        yield make_weight("patches", "model channel high wide", **sizes)
        if self.bias == "learned":
            yield make_weight("patches_bias", "model", model=width)


@dataclass(frozen=True, repr=False)
class EmbeddingSpec(SpecNode):
    """What enters a stack: a row of a table of `tokens` (or a map of `patches`, with a first vector of its own),
    times `scale`, plus positions, plus a row for each of `types`, normalised where there is a norm.

    `table` names the stack whose table of tokens it reads; none stands for its own.

    >>> [w.name for w in EmbeddingSpec(tokens=11, positions=Positions("learned", 5), types=2).weights(7)]
    ['tokens', 'positions', 'types']
    """

    tokens: int = 0
    patches: PatchSpec | None = None
    first: int = 0
    positions: PositionSpec | None = None
    types: int = 0
    norm: NormSpec | None = None
    scale: float = 1.0
    table: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.tokens) == bool(self.patches):
            raise SpecError(f"{self!r} embeds tokens or patches; give just one of tokens= and patches=")
        length = self.positions.length if self.positions else None
        if self.patches and length is not None and length != self.first + self.patches.num_patches:
            met = self.first + self.patches.num_patches
            raise SpecError(f"{length} positions for {met} tokens of an image; give Positions(length={met})")

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """What it learns at this width, but for a table that another stack owns."""
        if self.tokens and not self.table:
            yield make_weight("tokens", "token model", token=self.tokens, model=width)
        yield from self.patches.weights(width) if self.patches else ()
        if self.first:
            yield make_weight("first", "first model", first=self.first, model=width)
        yield from self.positions.weights(width) if self.positions else ()
        if self.types:
            yield make_weight("types", "type model", type=self.types, model=width)
        yield from add_prefix("norm", "", self.norm.weights(width)) if self.norm else ()

    def matmul_weights(self, width: int) -> Iterator[WeightSpec]:
        """The matrix that each patch is multiplied with; a row of a table is only looked up."""
        if self.patches:
            yield next(self.patches.weights(width))


@dataclass(frozen=True, repr=False)
class HeadTransformSpec(SpecNode):
    """What a head does first: a linear map with a bias to `hidden` channels, an activation, a norm or none."""

    hidden: int
    activation: str = "tanh"
    norm: NormSpec | None = None

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """What it learns at this width."""
        yield make_weight("transform", "hidden model", hidden=self.hidden, model=width)
        yield make_weight("transform_bias", "hidden", hidden=self.hidden)
        yield from add_prefix("transform_norm", "", self.norm.weights(self.hidden)) if self.norm else ()


@dataclass(frozen=True, repr=False)
class OutputHeadSpec(SpecNode):
    """What leaves a model: `outputs` numbers for each token, or for the first, the last or the mean of them (`at`).

    `table` names the stack whose table of tokens is its weight; outputs=0 gives what the transform gives. Before the
    map numbers are multiplied with `scale`, behind it bent to at most `cap` (Gemma 2).

    >>> [w.name for w in OutputHeadSpec("tokens", 11, table="decoder", bias="learned").weights(7)]
    ['bias']
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "at": ("each", "first", "last", "mean"),
        "bias": ("", "learned", "constant"),
    }
    name: str
    outputs: int = 0
    at: str = "each"
    transform: HeadTransformSpec | None = None
    bias: str = ""
    table: str = ""
    scale: float = 1.0
    cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier():
            raise SpecError(f"Head(name={self.name!r}) is no name of a head; write a word such as 'tokens'")
        if not self.outputs and not self.transform:
            raise SpecError(f"{self!r} gives nothing; say outputs= or transform=")

    def weights(self, model: int) -> Iterator[WeightSpec]:
        """What it learns at this width, but for a table that a stack owns."""
        yield from self.transform.weights(model) if self.transform else ()
        width = self.transform.hidden if self.transform else model
        if self.outputs and not self.table:
            yield make_weight("weight", "output hidden", output=self.outputs, hidden=width)
        if self.outputs and self.bias:
            yield replace(make_weight("bias", "output", output=self.outputs), trainable=self.bias == "learned")

    def matmul_weights(self, model: int) -> Iterator[WeightSpec]:
        """The matrices that a token is multiplied with, whoever owns them."""
        if self.transform:
            yield make_weight("transform", "hidden model", hidden=self.transform.hidden, model=model)
        if self.outputs:
            width = self.transform.hidden if self.transform else model
            yield make_weight("weight", "output hidden", output=self.outputs, hidden=width)
