"""A config.json read key by key: what is missing is what transformers would take, what is wrong is said in one line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from ..errors import SpecError, nearest

HEADS = 1 << 16  # of these there are lists, one item for each: a larger number is a slip
CHANNELS = 1 << 16
FOREIGN = ("auto_map", "trust_remote_code", "custom_pipelines")  # would run code that came with the weights
# transformers' names of activations, and ours.
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    **{name: name for name in ("relu", "relu2", "relu6", "tanh", "sigmoid", "mish", "quick_gelu", "linear")},
}


class Config:
    """The keys of one config; `notes` gather what the description of the model does not say.

    Keys may be given several names, of which the first that is there counts.
    """

    def __init__(self, said: Mapping[str, Any], where: str = "config.json") -> None:
        self.said, self.where, self.notes, self.name = said, where, list[str](), ""

    def wrong(self, fact: str, remedy: str) -> NoReturn:
        """The one line that says what is wrong here."""
        raise SpecError(f"{self.where}: {fact}; {remedy}")

    def get(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        """The name and value of the first key that is there."""
        found = [name for name in names if name in self.said]
        return (found[0], self.said[found[0]]) if found else (names[0], default)

    def size(self, *names: str, default: int, least: int = 1, most: int | None = None) -> int:
        """A whole number."""
        name, value = self.get(names, default)
        if type(value) is not int:
            self.wrong(f"{name} = {value!r} is no whole number", f"give one of at least {least}")
        if value < least or (most is not None and value > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            self.wrong(f"{name} = {value} is no size of a model", f"give one {bounds}")
        return value

    def maybe(self, *names: str, default: int | None = None, most: int | None = None) -> int | None:
        """A whole number, or None where the key is null or missing."""
        return None if self.get(names, default)[1] is None else self.size(*names, default=default or 1, most=most)

    def number(self, *names: str, default: float) -> float:
        """A positive number."""
        name, value = self.get(names, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.wrong(f"{name} = {value!r} is no positive number", f"give one such as {default}")
        return float(value)

    def maybe_number(self, name: str) -> float | None:
        """A positive number, or None where the key is null or missing."""
        return None if self.said.get(name) is None else self.number(name, default=1.0)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null counts as missing."""
        value = self.said.get(name)
        if value is not None and not isinstance(value, bool):
            self.wrong(f"{name} = {value!r} is neither true nor false", "give one of them")
        return default if value is None else value

    def word(self, name: str, default: str, known: Iterable[str]) -> str:
        """One of a few words."""
        value, known = self.said.get(name, default), list(known)
        if value not in known:
            self.wrong(f"{name} = {value!r} is not known", nearest(str(value), known))
        return value

    def words(self, name: str, known: Iterable[str]) -> list[str] | None:
        """A list of such words, or None where the key is null or missing."""
        value, known = self.said.get(name), list(known)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            self.wrong(f"{name} = {value!r} is no list", f"list words such as {known[0]!r}")
        told: list[Any] = list(cast("Sequence[Any]", value))
        for word in told:
            if word not in known:
                self.wrong(f"{name} names {word!r}", nearest(str(word), known))
        return told

    def items(self, name: str) -> list[Any] | None:
        """A list of anything, or None where the key is null or missing."""
        value = self.said.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            self.wrong(f"{name} = {value!r} is no list", "write it as one, or leave it out")
        return None if value is None else [*cast("Sequence[Any]", value)]

    def table(self, *names: str) -> Config | None:
        """A table inside, or None where the key is null or missing."""
        name, value = self.get(names, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.wrong(f"{name} = {value!r} is no table", f"write {name} = {{...}} or leave it out")
        inner = Config(cast("Mapping[str, Any]", value), f"{self.where}: {name}")
        inner.notes = self.notes
        return inner

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """One size for both sides, or a list of two: height and width."""
        value = self.said.get(name, default)
        both: list[Any] = [value] * 2 if not isinstance(value, (list, tuple)) else list(cast("list[Any]", value))
        if len(both) != 2 or any(type(side) is not int or side < 1 for side in both):
            self.wrong(f"{name} = {value!r} is neither a size nor two", f"give {default}, or height and width")
        return both[0], both[1]

    def activation(self, name: str, default: str) -> str:
        """An activation by our word for it."""
        return ACTIVATIONS[self.word(name, default, ACTIVATIONS)]

    def layers(self, *names: str, default: int) -> int:
        """How many layers a stack has."""
        return self.size(*names, default=default, most=10_000)

    def heads(self, *names: str, default: int) -> int:
        """How many heads."""
        return self.size(*names, default=default, most=HEADS)

    def width(self, *names: str, default: int) -> int:
        """How wide a head is, where that is a number of its own."""
        return self.size(*names, default=default, most=CHANNELS)

    def dim(self, model: int, heads: int, *names: str, default: int | None = None) -> int:
        """How wide a head is: as said, or the model's width divided among them."""
        told = self.maybe(*names, default=default, most=CHANNELS) if names else None
        if told is None and model % heads:
            add = f", or add {names[0]}" if names else ""
            self.wrong(f"a hidden size of {model} does not divide among {heads} heads", f"give a multiple{add}")
        if told is None and model // heads > CHANNELS:
            self.wrong(f"{model} / {heads} = {model // heads} channels are no head", f"give at most {CHANNELS}")
        return model // heads if told is None else told

    def grouped(self, heads: int, *, default: int | None = None) -> int:
        """How many key-value heads: all, unless said."""
        name = "num_key_value_heads"
        kv = self.maybe(name, default=default, most=HEADS) or heads
        if heads % kv:
            self.wrong(f"num_attention_heads = {heads} do not share {name} = {kv} evenly", "give a divisor")
        return kv

    def refuse(self, name: str, usual: Any, why: str) -> None:
        """A key that may only have its usual value."""
        if self.said.get(name, usual) not in (usual, None):
            self.wrong(f"{name} = {self.said[name]!r} {why}", f"give {usual!r} or leave it out")

    def note(self, text: str) -> None:
        """Keep something that the description does not say."""
        if text not in self.notes:
            self.notes.append(text)
