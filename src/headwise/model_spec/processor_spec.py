"""How inputs and outputs of a model are processed: tokenizer, special tokens, labels, pixel scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from ..errors import SpecError, suggest

SPECIAL_TOKEN_RULES = ("text", "read")
TOKENIZER_FIELDS = ("tokenizer", "source_tokenizer")  # fields that are files of their own
ID_FIELDS = ("before", "behind", "begin", "end")


@dataclass(frozen=True)
class ProcessorSpec:
    """Tokenizer, special tokens, class labels and image normalisation of a model.

    The ids `before` and `behind` are put before and after every input text. Generation starts with `begin` in an
    encoder-decoder model, and stops at any id of `end`. `mask` is the id of the mask token. specials="text": the
    spelling of a special token inside a text is tokenized as ordinary text; "read": it becomes the special token.
    `labels` are the names of the classes. Images are resized to `size` (height, width); then `mean` is subtracted from
    each channel, or each feature of frames, and the result divided by `deviation`. `tokenizer` is the JSON text of a
    `tokenizers.Tokenizer`, `source_tokenizer` that of the encoder's input if it differs.

    >>> ProcessorSpec(begin=(1,), end=(2,)).to_dict
    {'begin': [1], 'end': [2]}
    """

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    mask: int | None = None
    specials: str = "text"
    labels: tuple[str, ...] = ()
    size: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    tokenizer: str | None = field(default=None, repr=False)
    source_tokenizer: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ID_FIELDS:
            self._check(name, int, "a tuple of ids, such as (2,)", least=0)
        self._check("labels", str, 'a tuple of strings, such as ("cat", "dog")')
        self._check("size", int, "height and width, such as (28, 28)", least=1)
        for name in ("mean", "deviation"):
            self._check(name, float, "a tuple of floats, one per channel, such as (0.5,)")
        if self.mask is not None and (type(self.mask) is not int or self.mask < 0):
            raise SpecError(f"ProcessorSpec(mask={self.mask!r}) is not an id; give an integer >= 0")
        if self.specials not in SPECIAL_TOKEN_RULES:
            suggestion = suggest(str(self.specials), SPECIAL_TOKEN_RULES)
            raise SpecError(f"ProcessorSpec(specials={self.specials!r}) is unknown; {suggestion}")
        if len(self.size) not in (0, 2):
            raise SpecError(
                f"ProcessorSpec(size={self.size}) is not an image size; give height and width, such as (28, 28)"
            )
        if len(self.mean) != len(self.deviation):
            raise SpecError(
                f"ProcessorSpec has mean={self.mean} but deviation={self.deviation}; give one of each per channel"
            )

    def _check(self, name: str, kind: type, wanted: str, least: int | None = None) -> None:
        values = cast("tuple[Any, ...]", getattr(self, name))
        is_typed = type(values) is tuple and all(type(value) is kind for value in values)
        if not is_typed or (least is not None and any(value < least for value in values)):
            raise SpecError(f"invalid ProcessorSpec({name}={values!r}); give {wanted}")

    @property
    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain values, without the tokenizers."""
        own = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.name not in TOKENIZER_FIELDS}
        changed = {name: value for name, (value, default) in own.items() if value != default}
        return {
            name: list(cast("tuple[Any]", value)) if type(value) is tuple else value for name, value in changed.items()
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ProcessorSpec:
        """Return the spec that `to_dict` describes."""
        known = [f.name for f in fields(ProcessorSpec) if f.name not in TOKENIZER_FIELDS]
        for name in values:
            if name not in known:
                raise SpecError(f"usage has no {name!r}; {suggest(name, known)}")
        lists = {name: cast("list[Any]", value) for name, value in values.items() if isinstance(value, list)}
        arguments: dict[str, Any] = {**values, **{name: tuple(value) for name, value in lists.items()}}
        return ProcessorSpec(**arguments)
