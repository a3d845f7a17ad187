"""Specs of norms, embeddings, output heads and the processing of inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, cast

from ...attention.interfaces.core_types import AxisLayout
from ...attention.interfaces.part import CheckedDataclass
from ...attention.spec.attention_spec import AttentionSpec
from ...attention.spec.serialization import to_dict as spec_to_dict
from ...util.errors import SpecError, suggest
from ...util.size_limits import MAX_WIDTH, check_size

# --- Processing of inputs and outputs -------------------------------------------------------------


TOKENIZER_FIELDS = ("tokenizer", "source_tokenizer")  # fields that are stored as separate files
ID_FIELDS = ("prefix_ids", "suffix_ids", "bos", "eos")


@dataclass(frozen=True)
class ProcessorSpec:
    """Tokenizer, special tokens, class labels and image normalisation of a model.

    `prefix_ids` and `suffix_ids` surround every input text. Generation starts with `bos` in an
    encoder-decoder model, and stops at any id of `eos`. `mask` is the id of the mask token. With
    `parse_special`, the spelling of a special token inside a text becomes that token; else it is
    tokenized as ordinary text. `labels` are the names of the classes. Images are
    resized to `size` (height, width); then `mean` is subtracted from each channel, or each feature
    of frames, and the result divided by `std`. `tokenizer` is the JSON text of a
    `tokenizers.Tokenizer`; `source_tokenizer` tokenizes the encoder's input if it differs.

    >>> ProcessorSpec(bos=(1,), eos=(2,)).to_dict
    {'bos': [1], 'eos': [2]}
    """

    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    mask: int | None = None
    parse_special: bool = False
    labels: tuple[str, ...] = ()
    size: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokenizer: str | None = field(default=None, repr=False)
    source_tokenizer: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ID_FIELDS:
            self._check(name, int, "a tuple of ids, such as (2,)", least=0)
        self._check("labels", str, 'a tuple of strings, such as ("cat", "dog")')
        self._check("size", int, "height and width, such as (28, 28)", least=1)
        for name in ("mean", "std"):
            self._check(name, float, "a tuple of floats, one per channel, such as (0.5,)")
        if self.mask is not None and (type(self.mask) is not int or self.mask < 0):
            raise SpecError(f"ProcessorSpec(mask={self.mask!r}) is not an id; give an integer >= 0")
        if type(self.parse_special) is not bool:
            raise SpecError(
                f"ProcessorSpec(parse_special={self.parse_special!r}) is not a bool; use True or "
                "False"
            )
        if len(self.size) not in (0, 2):
            raise SpecError(
                f"ProcessorSpec(size={self.size}) is not an image size; give height and width, "
                "such as (28, 28)"
            )
        if len(self.mean) != len(self.std):
            raise SpecError(
                f"ProcessorSpec has mean={self.mean} but std={self.std}; give one of "
                "each per channel"
            )

    def _check(self, name: str, kind: type, expected: str, least: int | None = None) -> None:
        values = cast("tuple[Any, ...]", getattr(self, name))
        is_typed = type(values) is tuple and all(type(value) is kind for value in values)
        if not is_typed or (least is not None and any(value < least for value in values)):
            raise SpecError(f"invalid ProcessorSpec({name}={values!r}); give {expected}")

    @property
    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain values, without the tokenizers."""
        own = {
            f.name: (getattr(self, f.name), f.default)
            for f in fields(self)
            if f.name not in TOKENIZER_FIELDS
        }
        changed = {name: value for name, (value, default) in own.items() if value != default}
        return {
            name: list(cast("tuple[Any]", value)) if type(value) is tuple else value
            for name, value in changed.items()
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ProcessorSpec:
        """Return the spec that `to_dict` describes."""
        field_names = [f.name for f in fields(ProcessorSpec) if f.name not in TOKENIZER_FIELDS]
        for name in values:
            if name not in field_names:
                raise SpecError(f"usage has no {name!r}; {suggest(name, field_names)}")
        lists = {
            name: cast("list[Any]", value)
            for name, value in values.items()
            if isinstance(value, list)
        }
        arguments: dict[str, Any] = {
            **values,
            **{name: tuple(value) for name, value in lists.items()},
        }
        return ProcessorSpec(**arguments)


# --- Layers, embeddings and output heads ----------------------------------------------------------


@dataclass(frozen=True)
class WeightSpec:
    """A tensor of a model: its full name, its axes and their sizes, and its role.

    `role` is one of "embedding", "mixer", "attention", "cross", "feed", "norm" and "head".
    `trainable` is False for tensors that are saved but never trained. `tied_to` is a name under
    which layers of one stack share the tensor, or empty.

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
        """The shape in which the tensor is stored."""
        return self.layout.shape(self.axis_sizes)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.layout.numel(self.axis_sizes)


def add_prefix(prefix: str, role: str, weights: Iterable[WeightSpec]) -> Iterator[WeightSpec]:
    """Prepend `prefix` to the names of these weights and set their role."""
    return (replace(w, name=f"{prefix}.{w.name}", role=role) for w in weights)


def make_weight(name: str, layout: str, **sizes: int) -> WeightSpec:
    """Return a trainable weight with the axes that `layout` names, such as "hidden model"."""
    return WeightSpec(name, AxisLayout.parse(layout), sizes)


@dataclass(frozen=True, repr=False)
class SpecNode(CheckedDataclass):
    """Base class of specs, which checks fields: valid choices, integers >= 1 (>= 0 if the default
    is 0), floats > 0.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for field_ in fields(self):
            value = getattr(self, field_.name)
            least = 0 if field_.default == 0 else 1
            if isinstance(value, int) and value < least:
                raise SpecError(
                    f"{name}({field_.name}={value!r}) is too small; give {field_.name}={least} or "
                    "more"
                )
            if field_.name == "model" and isinstance(value, int):
                check_size(f"{name}.model", value, MAX_WIDTH)
            if isinstance(value, float) and not value > 0:
                raise SpecError(
                    f"{name}({field_.name}={value!r}) is not positive; leave it out or give more "
                    "than 0"
                )
        for key, allowed in self.choices.items():
            if getattr(self, key) not in allowed:
                choice = getattr(self, key)
                suggestion = suggest(choice, [word for word in allowed if word])
                raise SpecError(f"{name}({key}={choice!r}) is unknown; {suggestion}")


def to_plain(value: Any) -> Any:
    """Return a spec as plain values; fields that equal their defaults are left out."""
    if isinstance(value, AttentionSpec):
        return spec_to_dict(value)
    if isinstance(value, SpecNode):
        plain = dict[str, Any]()
        for field_ in fields(value):
            item = getattr(value, field_.name)
            if field_.default is MISSING or item != field_.default:
                plain[field_.name] = to_plain(item)
        return plain
    if isinstance(value, tuple):
        return [to_plain(item) for item in cast("tuple[Any, ...]", value)]
    return value


@dataclass(frozen=True, repr=False)
class NormSpec(SpecNode):
    """kind="layer": (x - mean) / std times a weight plus a bias; "layer_no_bias": without the bias;
    "layer_no_affine": with neither, as OLMo (2402.00838); "rms": x / rms times a weight;
    "rms_unit_offset": x / rms times (1 + weight), as in Gemma.

    >>> [w.name for w in NormSpec().weights(7)], [w.name for w in NormSpec("rms").weights(7)]
    (['weight', 'bias'], ['weight'])
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "kind": ("layer", "layer_no_bias", "layer_no_affine", "rms", "rms_unit_offset")
    }
    kind: str = "layer"
    eps: float = 1e-5

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width."""
        if self.kind != "layer_no_affine":
            yield make_weight("weight", "model", model=width)
        if self.kind == "layer":
            yield make_weight("bias", "model", model=width)


# --- Embeddings and output heads ------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class PositionSpec(SpecNode):
    """Absolute position embeddings, kind="learned" (a table of `length` rows) or "sinusoidal".

    The first `skipped` rows of a learned table are unused, as in OPT. Sinusoidal embeddings with
    layout="interleaved" alternate sines and cosines (1706.03762); "halves" puts all sines first.

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
            raise SpecError(
                "PositionSpec('learned') needs a row for each position; give length, such as "
                "length=512"
            )

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the table of learned positions; sinusoidal positions have no weights."""
        if self.kind == "learned" and self.length:
            yield make_weight(
                "positions", "position model", position=self.length + self.skipped, model=width
            )


@dataclass(frozen=True, repr=False)
class PatchSpec(SpecNode):
    """Linear embedding of an image of rows x columns patches, each of high x wide pixels and
    `channels` channels.

    bias="none" omits the bias.

    >>> sum(
    ...     w.numel
    ...     for w in PatchSpec(
    ...         rows=14, columns=14, patch_height=16, patch_width=16, channels=3
    ...     ).weights(768)
    ... )
    590592
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"bias": ("learned", "none")}
    rows: int
    columns: int
    patch_height: int
    patch_width: int
    channels: int = 3
    bias: str = "learned"

    @property
    def num_patches(self) -> int:
        """The number of tokens per image."""
        return self.rows * self.columns

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the matrix applied to each patch, and its bias."""
        sizes = {
            "model": width,
            "channel": self.channels,
            "high": self.patch_height,
            "wide": self.patch_width,
        }
        yield make_weight("patches", "model channel high wide", **sizes)
        if self.bias == "learned":
            yield make_weight("patches_bias", "model", model=width)


@dataclass(frozen=True, repr=False)
class EmbeddingSpec(SpecNode):
    """Input embedding: a table of `tokens` or a linear embedding of `patches`, plus positions and
    token types.

    `first` learned vectors, such as a [CLS] token, precede the patches. Embeddings are multiplied
    by `scale` before positions and types are added; `norm` is applied last. `table` names the stack
    that provides the token table; empty means a separate table.

    >>> [
    ...     w.name
    ...     for w in EmbeddingSpec(
    ...         tokens=11, positions=PositionSpec("learned", 5), types=2
    ...     ).weights(7)
    ... ]
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
            raise SpecError(
                f"{self!r} must embed either tokens or patches; give exactly one of tokens= and "
                "patches="
            )
        length = self.positions.length if self.positions else None
        if self.patches and length is not None and length != self.first + self.patches.num_patches:
            num_tokens = self.first + self.patches.num_patches
            remedy = f"give PositionSpec(length={num_tokens})"
            raise SpecError(f"{length} positions for {num_tokens} tokens of an image; {remedy}")

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width, except a token table that another stack owns."""
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
        """Yield the matrix that each patch is multiplied with; table look-ups need no
        multiplication.
        """
        if self.patches:
            yield next(self.patches.weights(width))


@dataclass(frozen=True, repr=False)
class HeadTransformSpec(SpecNode):
    """First steps of an output head: a linear layer with bias to `hidden` channels, an activation,
    an optional norm.
    """

    hidden: int
    activation: str = "tanh"
    norm: NormSpec | None = None

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width."""
        yield make_weight("transform", "hidden model", hidden=self.hidden, model=width)
        yield make_weight("transform_bias", "hidden", hidden=self.hidden)
        yield from (
            add_prefix("transform_norm", "", self.norm.weights(self.hidden)) if self.norm else ()
        )


@dataclass(frozen=True, repr=False)
class OutputHeadSpec(SpecNode):
    """Output head: `outputs` numbers for each token, or for the first token, the last or their mean
    (`at`).

    `table` names the stack that ties its token table to the head's weight. outputs=0 returns the
    result of `transform`. Hidden states are multiplied by `scale` before the linear layer; `cap` is
    the soft cap of its outputs, cap * tanh(y / cap) (Gemma 2).

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
            raise SpecError(
                f"OutputHeadSpec(name={self.name!r}) is not a valid name; write an identifier "
                "such as 'tokens'"
            )
        if not self.outputs and not self.transform:
            raise SpecError(f"{self!r} has no output; give outputs= or transform=")

    def weights(self, model: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width, except a token table that a stack owns."""
        yield from self.transform.weights(model) if self.transform else ()
        width = self.transform.hidden if self.transform else model
        if self.outputs and not self.table:
            yield make_weight("weight", "output hidden", output=self.outputs, hidden=width)
        if self.outputs and self.bias:
            yield replace(
                make_weight("bias", "output", output=self.outputs), trainable=self.bias == "learned"
            )

    def matmul_weights(self, model: int) -> Iterator[WeightSpec]:
        """Yield the matrices that each token is multiplied with, including a tied token table."""
        if self.transform:
            yield make_weight(
                "transform", "hidden model", hidden=self.transform.hidden, model=model
            )
        if self.outputs:
            width = self.transform.hidden if self.transform else model
            yield make_weight("weight", "output hidden", output=self.outputs, hidden=width)
