"""What a model is made of besides attention: norms, feed-forwards, embeddings, heads; each says its own weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from ..errors import SpecError, nearest
from ..layout import Layout
from ..registry import Spoken


@dataclass(frozen=True)
class Weight:
    """A tensor of a model: its full name, its axes, and where it stands.

    `role` is one of "embedding", "attention", "cross", "feed", "norm" and "head"; `learned` is False of what is saved
    but never trained; `shared` is the name by which layers of one stack hold it in common, for most none.

    >>> Weight("up", Layout.parse("hidden model"), {"hidden": 3, "model": 5}, "feed").shape
    (3, 5)
    """

    name: str
    layout: Layout
    sizes: Mapping[str, int] = field(hash=False)
    role: str = ""
    learned: bool = True
    shared: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored."""
        return self.layout.shape(self.sizes)

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return self.layout.numel(self.sizes)


def under(prefix: str, role: str, weights: Iterable[Weight]) -> Iterator[Weight]:
    """The same weights, standing there."""
    return (replace(w, name=f"{prefix}.{w.name}", role=role) for w in weights)


def weight(name: str, layout: str, **sizes: int) -> Weight:
    """A learned weight with its axes as text."""
    return Weight(name, Layout.parse(layout), sizes)


@dataclass(frozen=True, repr=False)
class Described(Spoken):
    """A description: its words are known ones, its sizes at least 1 (0 where that is usual), its factors above 0."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for told in fields(self):
            value = getattr(self, told.name)
            least = 0 if told.default == 0 else 1
            if isinstance(value, int) and value < least:
                raise SpecError(f"{name}({told.name}={value!r}) is no size; give {told.name}={least} or more")
            if isinstance(value, float) and not value > 0:
                raise SpecError(f"{name}({told.name}={value!r}) is not positive; leave it out or give more than 0")
        for key, known in self.choices.items():
            if getattr(self, key) not in known:
                said = getattr(self, key)
                raise SpecError(f"{name}({key}={said!r}) is unknown; {nearest(said, [word for word in known if word])}")


@dataclass(frozen=True, repr=False)
class Norm(Described):
    """kind="layer": (x - mean) / std times a weight plus a bias; "unbiased": without the bias; "rms": x / rms times a
    weight; "offset": the same with a weight that is stored less one, as Gemma's.

    >>> [w.name for w in Norm().weights(7)], [w.name for w in Norm("rms").weights(7)]
    (['weight', 'bias'], ['weight'])
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": ("layer", "unbiased", "rms", "offset")}
    kind: str = "layer"
    eps: float = 1e-5

    def weights(self, model: int) -> Iterator[Weight]:
        """What it learns at this width."""
        yield weight("weight", "model", model=model)
        if self.kind == "layer":
            yield weight("bias", "model", model=model)


@dataclass(frozen=True, repr=False)
class Dense(Described):
    """y = W_down act(W_up x), or W_down (act(W_gate x) * W_up x) when form="gated"; `bias` names those that have one.

    A gated one of Llama-2-7B's sizes, 3 d f:

    >>> sum(w.numel for w in Dense(11008, "silu", form="gated").weights(4096))
    135266304
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": ("plain", "gated")}
    hidden: int
    activation: str = "gelu"
    form: str = "plain"
    bias: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        letters = "".join(name[0] for name in self.maps)
        if set(self.bias) - set(letters) or len(set(self.bias)) != len(self.bias):
            raise SpecError(f"Dense(bias={self.bias!r}) names unknown biases; use letters of {letters!r}, each once")

    @property
    def maps(self) -> dict[str, str]:
        """Its linear maps, as axes."""
        gate = {"gate": "hidden model"} if self.form == "gated" else {}
        return {"up": "hidden model"} | gate | {"down": "model hidden"}

    def weights(self, model: int, experts: int = 0) -> Iterator[Weight]:
        """What it learns at this width; one of each for every expert."""
        each, sizes = ("expert ", {"expert": experts}) if experts else ("", {})
        sizes |= {"model": model, "hidden": self.hidden}
        for name, axes in self.maps.items():
            yield weight(name, each + axes, **sizes)
            if name[0] in self.bias:
                yield weight(f"{name}_bias", each + axes.split()[0], **sizes)


@dataclass(frozen=True, repr=False)
class Experts(Described):
    """`active` of `count` feed-forwards for each token, chosen by the scores of a router, and one `shared` by all.

    scores="softmax": over all experts, "chosen": over those chosen, "sigmoid": of each alone. bias="learned" adds one
    to the router's scores; "constant" one that only the choice sees and balance moves (DeepSeek-V3, 2412.19437).
    `scale` is what the sum of the chosen is multiplied with.

    >>> [w.name for w in Experts(Dense(3), count=4, active=2).weights(7)]
    ['router', 'each.up', 'each.down']
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scores": ("softmax", "chosen", "sigmoid"),
        "bias": ("", "learned", "constant"),
    }
    each: Dense
    count: int
    active: int
    shared: Dense | None = None
    scores: str = "softmax"
    bias: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.count:
            raise SpecError(f"Experts(active={self.active}) are more than count={self.count}; use at most {self.count}")

    def weights(self, model: int) -> Iterator[Weight]:
        """What it learns at this width."""
        yield weight("router", "expert model", expert=self.count, model=model)
        if self.bias:
            bias = weight("router_bias", "expert", expert=self.count)
            yield replace(bias, learned=self.bias == "learned")
        yield from under("each", "", self.each.weights(model, self.count))
        if self.shared:
            yield from under("shared", "", self.shared.weights(model))


@dataclass(frozen=True, repr=False)
class Positions(Described):
    """A vector added for each of `length` positions; `skipped` rows of a learned table stand before the first.

    >>> [w.shape for w in Positions("learned", 1024, skipped=2).weights(7)], list(Positions("sinusoidal").weights(7))
    ([(1026, 7)], [])
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": ("learned", "sinusoidal")}
    kind: str
    length: int | None = None
    skipped: int = 0

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
    """An image of rows x columns patches, each high x wide pixels of some channels, as one linear map with a bias.

    >>> sum(w.numel for w in Patches(rows=14, columns=14, high=16, wide=16, channels=3).weights(768))
    590592
    """

    rows: int
    columns: int
    high: int
    wide: int
    channels: int = 3

    @property
    def count(self) -> int:
        """How many tokens an image becomes."""
        return self.rows * self.columns

    def weights(self, model: int) -> Iterator[Weight]:
        """The map of one patch."""
        sizes = {"model": model, "channel": self.channels, "high": self.high, "wide": self.wide}
        yield weight("patches", "model channel high wide", **sizes)
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


def total(weights: Iterable[Weight]) -> int:
    """The numbers in all of them."""
    return sum(math.prod(w.shape) for w in weights)
