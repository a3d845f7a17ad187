"""What enters a stack and what leaves a model: embeddings and heads; each says its own weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ..errors import SpecError
from .pieces import Described, Norm, Weight, under, weight


@dataclass(frozen=True, repr=False)
class Positions(Described):
    """A vector added for each of `length` positions; `skipped` rows of a learned table stand before the first.

    Sinusoidal ones of layout="interleaved" alternate sine and cosine (1706.03762); "halves" puts all sines first.

    >>> [w.shape for w in Positions("learned", 1024, skipped=2).weights(7)], list(Positions("sinusoidal").weights(7))
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

    def weights(self, model: int) -> Iterator[Weight]:
        """The table, where it is learned."""
        if self.kind == "learned" and self.length:
            yield weight("positions", "position model", position=self.length + self.skipped, model=model)


@dataclass(frozen=True, repr=False)
class Patches(Described):
    """An image of rows x columns patches, each high x wide pixels of some channels, as one linear map.

    bias="none" leaves out the bias that it has otherwise.

    >>> sum(w.numel for w in Patches(rows=14, columns=14, high=16, wide=16, channels=3).weights(768))
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
    def count(self) -> int:
        """How many tokens an image becomes."""
        return self.rows * self.columns

    def weights(self, model: int) -> Iterator[Weight]:
        """The map of one patch."""
        sizes = {"model": model, "channel": self.channels, "high": self.high, "wide": self.wide}
        yield weight("patches", "model channel high wide", **sizes)
        if self.bias == "learned":
            yield weight("patches_bias", "model", model=model)


@dataclass(frozen=True, repr=False)
class Embedding(Described):
    """What enters a stack: a row of a table of `tokens` (or a map of `patches`, with a first vector of its own),
    times `scale`, plus positions, plus a row for each of `types`, normalised where there is a norm.

    `table` names the stack whose table of tokens it reads; none stands for its own.

    >>> [w.name for w in Embedding(tokens=11, positions=Positions("learned", 5), types=2).weights(7)]
    ['tokens', 'positions', 'types']
    """

    tokens: int = 0
    patches: Patches | None = None
    first: int = 0
    positions: Positions | None = None
    types: int = 0
    norm: Norm | None = None
    scale: float = 1.0
    table: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.tokens) == bool(self.patches):
            raise SpecError(f"{self!r} embeds tokens or patches; give just one of tokens= and patches=")
        length = self.positions.length if self.positions else None
        if self.patches and length is not None and length != self.first + self.patches.count:
            met = self.first + self.patches.count
            raise SpecError(f"{length} positions for {met} tokens of an image; give Positions(length={met})")

    def weights(self, model: int) -> Iterator[Weight]:
        """What it learns at this width, but for a table that another stack owns."""
        if self.tokens and not self.table:
            yield weight("tokens", "token model", token=self.tokens, model=model)
        yield from self.patches.weights(model) if self.patches else ()
        if self.first:
            yield weight("first", "first model", first=self.first, model=model)
        yield from self.positions.weights(model) if self.positions else ()
        if self.types:
            yield weight("types", "type model", type=self.types, model=model)
        yield from under("norm", "", self.norm.weights(model)) if self.norm else ()

    def products(self, model: int) -> Iterator[Weight]:
        """The matrix that each patch is multiplied with; a row of a table is only looked up."""
        if self.patches:
            yield next(self.patches.weights(model))


@dataclass(frozen=True, repr=False)
class Transform(Described):
    """What a head does first: a linear map with a bias to `hidden` channels, an activation, a norm or none."""

    hidden: int
    activation: str = "tanh"
    norm: Norm | None = None

    def weights(self, model: int) -> Iterator[Weight]:
        """What it learns at this width."""
        yield weight("transform", "hidden model", hidden=self.hidden, model=model)
        yield weight("transform_bias", "hidden", hidden=self.hidden)
        yield from under("transform_norm", "", self.norm.weights(self.hidden)) if self.norm else ()


@dataclass(frozen=True, repr=False)
class Head(Described):
    """What leaves a model: `outputs` numbers for each token, or for the first, the last or the mean of them (`at`).

    `table` names the stack whose table of tokens is its weight; outputs=0 gives what the transform gives. Before the
    map numbers are multiplied with `scale`, behind it bent to at most `cap` (Gemma 2).

    >>> [w.name for w in Head("tokens", 11, table="decoder", bias="learned").weights(7)]
    ['bias']
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "at": ("each", "first", "last", "mean"),
        "bias": ("", "learned", "constant"),
    }
    name: str
    outputs: int = 0
    at: str = "each"
    transform: Transform | None = None
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

    def weights(self, model: int) -> Iterator[Weight]:
        """What it learns at this width, but for a table that a stack owns."""
        yield from self.transform.weights(model) if self.transform else ()
        width = self.transform.hidden if self.transform else model
        if self.outputs and not self.table:
            yield weight("weight", "output hidden", output=self.outputs, hidden=width)
        if self.outputs and self.bias:
            yield replace(weight("bias", "output", output=self.outputs), learned=self.bias == "learned")

    def products(self, model: int) -> Iterator[Weight]:
        """The matrices that a token is multiplied with, whoever owns them."""
        if self.transform:
            yield weight("transform", "hidden model", hidden=self.transform.hidden, model=model)
        if self.outputs:
            width = self.transform.hidden if self.transform else model
            yield weight("weight", "output hidden", output=self.outputs, hidden=width)
