"""How a model is spoken to and understood: what its tensors do not say."""

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
    """What begins and ends a text, what classes are called, how pixels were brought to scale, and the tokenizer.

    Ids stand `before` and `behind` every text that is read. An answer begins with `begin` where a second stack writes
    it, and any of `end` ends it. `mask` stands for a token that is to be filled in. specials="text": a special token
    that stands in a text is text; "read": it is the token. `labels` are the names of classes. Images are brought to
    `size`, high and wide, and of every channel, or of every feature of frames, `mean` is taken off and the rest
    divided by `deviation`. `tokenizer` and `source_tokenizer`, where what is read has one of its own, are documents of
    a `tokenizers.Tokenizer`.

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
            self._check(name, int, "ids, such as (2,)", least=0)
        self._check("labels", str, 'names, such as ("cat", "dog")')
        self._check("size", int, "high and wide, such as (28, 28)", least=1)
        for name in ("mean", "deviation"):
            self._check(name, float, "a number for each channel, such as (0.5,)")
        if self.mask is not None and (type(self.mask) is not int or self.mask < 0):
            raise SpecError(f"Usage(mask={self.mask!r}) is no id; give a whole number of 0 or more")
        if self.specials not in SPECIAL_TOKEN_RULES:
            raise SpecError(
                f"Usage(specials={self.specials!r}) is unknown; {suggest(str(self.specials), SPECIAL_TOKEN_RULES)}"
            )
        if len(self.size) not in (0, 2):
            raise SpecError(f"Usage(size={self.size}) is none of an image; give high and wide, such as (28, 28)")
        if len(self.mean) != len(self.deviation):
            raise SpecError(f"Usage has mean={self.mean} but deviation={self.deviation}; give one for each channel")

    def _check(self, name: str, kind: type, wanted: str, least: int | None = None) -> None:
        told = cast("tuple[Any, ...]", getattr(self, name))
        right = type(told) is tuple and all(type(one) is kind for one in told)
        if not right or (least is not None and any(one < least for one in told)):
            raise SpecError(f"Usage({name}={told!r}) does not hold {wanted}")

    @property
    def to_dict(self) -> dict[str, Any]:
        """What is said, as plain values, without the documents."""
        own = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.name not in TOKENIZER_FIELDS}
        said = {name: value for name, (value, usual) in own.items() if value != usual}
        return {
            name: list(cast("tuple[Any]", value)) if type(value) is tuple else value for name, value in said.items()
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ProcessorSpec:
        """Read what `table` gives."""
        known = [f.name for f in fields(ProcessorSpec) if f.name not in TOKENIZER_FIELDS]
        for name in values:
            if name not in known:
                raise SpecError(f"usage has no {name!r}; {suggest(name, known)}")
        lists = {name: cast("list[Any]", value) for name, value in values.items() if isinstance(value, list)}
        told: dict[str, Any] = {**values, **{name: tuple(value) for name, value in lists.items()}}
        return ProcessorSpec(**told)
