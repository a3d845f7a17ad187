"""What layers are made of besides attention, norms and feed-forwards; each says its own weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from ..errors import SpecError, suggest
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.registry import CheckedDataclass


@dataclass(frozen=True)
class WeightSpec:
    """A tensor of a model: its full name, its axes, and where it stands.

    `role` is one of "embedding", "attention", "cross", "feed", "norm" and "head"; `learned` is False of what is saved
    but never trained; `shared` is the name by which layers of one stack hold it in common, for most none.

    >>> WeightSpec("up", AxisLayout.parse("hidden model"), {"hidden": 3, "model": 5}, "feed").shape
    (3, 5)
    """

    name: str
    layout: AxisLayout
    axis_sizes: Mapping[str, int] = field(hash=False)
    role: str = ""
    trainable: bool = True
    tied_to: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored."""
        return self.layout.shape(self.axis_sizes)

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return self.layout.numel(self.axis_sizes)


def add_prefix(prefix: str, role: str, weights: Iterable[WeightSpec]) -> Iterator[WeightSpec]:
    """The same weights, standing there."""
    return (replace(w, name=f"{prefix}.{w.name}", role=role) for w in weights)


def make_weight(name: str, layout: str, **sizes: int) -> WeightSpec:
    """A learned weight with its axes as text."""
    return WeightSpec(name, AxisLayout.parse(layout), sizes)


@dataclass(frozen=True, repr=False)
class SpecNode(CheckedDataclass):
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
                raise SpecError(f"{name}({key}={said!r}) is unknown; {suggest(said, [word for word in known if word])}")


@dataclass(frozen=True, repr=False)
class NormSpec(SpecNode):
    """kind="layer": (x - mean) / std times a weight plus a bias; "unbiased": without the bias; "bare": with neither, as
    OLMo (2402.00838); "rms": x / rms times a weight; "offset": the same with a weight stored less one, as Gemma's.

    >>> [w.name for w in NormSpec().weights(7)], [w.name for w in NormSpec("rms").weights(7)]
    (['weight', 'bias'], ['weight'])
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": ("layer", "unbiased", "bare", "rms", "offset")}
    kind: str = "layer"
    eps: float = 1e-5

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """What it learns at this width."""
        if self.kind != "bare":
            yield make_weight("weight", "model", model=width)
        if self.kind == "layer":
            yield make_weight("bias", "model", model=width)


@dataclass(frozen=True, repr=False)
class FeedForwardSpec(SpecNode):
    """y = W_down act(W_up x), or W_down (act(W_gate x) * W_up x) when form="gated"; `bias` names those that have one.

    A gated one of Llama-2-7B's sizes, 3 d f:

    >>> sum(w.numel for w in FeedForwardSpec(11008, "silu", form="gated").weights(4096))
    135266304
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": ("plain", "gated")}
    hidden: int
    activation: str = "gelu"
    form: str = "plain"
    bias: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        letters = "".join(name[0] for name in self.matrix_layouts)
        if set(self.bias) - set(letters) or len(set(self.bias)) != len(self.bias):
            raise SpecError(
                f"FeedForwardSpec(bias={self.bias!r}) names unknown biases; use letters of {letters!r}, each once"
            )

    @property
    def matrix_layouts(self) -> dict[str, str]:
        """Its linear maps, as axes."""
        gate = {"gate": "hidden model"} if self.form == "gated" else {}
        return {"up": "hidden model"} | gate | {"down": "model hidden"}

    def weights(self, width: int, num_experts: int = 0) -> Iterator[WeightSpec]:
        """What it learns at this width; one of each for every expert."""
        each, sizes = ("expert ", {"expert": num_experts}) if num_experts else ("", {})
        sizes |= {"model": width, "hidden": self.hidden}
        for name, axes in self.matrix_layouts.items():
            yield make_weight(name, each + axes, **sizes)
            if name[0] in self.bias:
                yield make_weight(f"{name}_bias", each + axes.split()[0], **sizes)

    def matmul_weights(self, width: int) -> Iterator[WeightSpec]:
        """The matrices that a token is multiplied with."""
        yield from (
            make_weight(name, axes, model=width, hidden=self.hidden) for name, axes in self.matrix_layouts.items()
        )

    def active_params(self, width: int, num_tokens: int) -> int:
        """How many of its numbers so many tokens meet: all of them."""
        return sum(w.numel for w in self.weights(width))


@dataclass(frozen=True, repr=False)
class ExpertsSpec(SpecNode):
    """`active` of `count` feed-forwards for each token, chosen by the scores of a router, and one `shared` by all.

    scores="softmax": over all experts, "chosen": over those chosen, "sigmoid": of each alone. bias="learned" adds one
    to the router's scores; "constant" one that only the choice sees and balance moves (DeepSeek-V3, 2412.19437).
    `scale` is what the sum of the chosen is multiplied with.

    >>> [w.name for w in ExpertsSpec(FeedForwardSpec(3), count=4, active=2).weights(7)]
    ['router', 'each.up', 'each.down']
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scores": ("softmax", "chosen", "sigmoid"),
        "bias": ("", "learned", "constant"),
    }
    each: FeedForwardSpec
    count: int
    active: int
    shared: FeedForwardSpec | None = None
    scores: str = "softmax"
    bias: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.count:
            raise SpecError(
                f"ExpertsSpec(active={self.active}) are more than count={self.count}; use at most {self.count}"
            )

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """What it learns at this width."""
        yield make_weight("router", "expert model", expert=self.count, model=width)
        if self.bias:
            bias = make_weight("router_bias", "expert", expert=self.count)
            yield replace(bias, trainable=self.bias == "learned")
        yield from add_prefix("each", "", self.each.weights(width, self.count))
        if self.shared:
            yield from add_prefix("shared", "", self.shared.weights(width))

    def matmul_weights(self, width: int) -> Iterator[WeightSpec]:
        """The matrices that a token is multiplied with: of the experts, those that it chose."""
        yield make_weight("router", "expert model", expert=self.count, model=width)
        for name, axes in self.each.matrix_layouts.items():
            yield make_weight(
                f"each.{name}", f"active {axes}", active=self.active, model=width, hidden=self.each.hidden
            )
        yield from add_prefix("shared", "", self.shared.matmul_weights(width)) if self.shared else ()

    def active_params(self, width: int, num_tokens: int) -> int:
        """How many of its numbers so many tokens meet, if no two choose the same expert while others are idle.

        >>> experts = ExpertsSpec(FeedForwardSpec(3), count=4, active=2)  # 20 numbers of a router, 30 of each expert
        >>> [experts.active_params(5, tokens) for tokens in (0, 1, 2, 3)]
        [20, 80, 140, 140]
        """
        every, one = sum(w.numel for w in self.weights(width)), self.each.active_params(width, num_tokens)
        return every - one * (self.count - min(self.count, num_tokens * self.active))


# --- What enters a stack and what leaves a model -------------------------------------------------------


@dataclass(frozen=True, repr=False)
class PositionSpec(SpecNode):
    """A vector added for each of `length` positions; `skipped` rows of a learned table stand before the first.

    Sinusoidal ones of layout="interleaved" alternate sine and cosine (1706.03762); "halves" puts all sines first.

    >>> (
    ...     [w.shape for w in PositionSpec("learned", 1024, skipped=2).weights(7)],
    ...     list(PositionSpec("sinusoidal").weights(7)),
    ... )
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
            raise SpecError("PositionSpec('learned') need a row for each position; give length=512, say")

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

    >>> [w.name for w in EmbeddingSpec(tokens=11, positions=PositionSpec("learned", 5), types=2).weights(7)]
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
            raise SpecError(f"{length} positions for {met} tokens of an image; give PositionSpec(length={met})")

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
            raise SpecError(f"OutputHeadSpec(name={self.name!r}) is no name of a head; write a word such as 'tokens'")
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
