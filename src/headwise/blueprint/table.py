"""A model as a table: what repeats once, every tensor with its axes, shape and how many numbers it holds."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..spec import AttentionSpec
from .model import Model
from .pieces import Weight
from .stack import Block, Nearly, Stack, repeats

WIDTH = 80
NAME, AXES = 31, 18  # columns of a tensor's name and of its axes


class Row(NamedTuple):
    """One tensor, by the name it has where it stands."""

    name: str
    axes: str
    shape: tuple[int, ...]
    learned: bool

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"name": self.name, "axes": self.axes, "shape": list(self.shape), "learned": self.learned}


class Layers(NamedTuple):
    """A pattern of layers, so many times in a row from layer `start` on: what each is, and its tensors."""

    start: int
    times: int
    each: tuple[tuple[str, tuple[Row, ...]], ...]

    @property
    def where(self) -> str:
        """Which layers, in words."""
        end = self.start + self.times * len(self.each) - 1
        return f"layer {self.start}" if end == self.start else f"layers {self.start} to {end}"

    @property
    def learned(self) -> int:
        """The learned numbers of all of them."""
        return self.times * sum(learned(rows) for _, rows in self.each)


@dataclass(frozen=True)
class Table:
    """A model, to be printed or handed on as plain `data`.

    >>> from headwise.families import read
    >>> told = Table(read({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11}))
    >>> [line.split() for line in str(told).splitlines() if line.startswith(("  layers", "total"))]
    [['layers', '0', 'to', '1,', '2', 'x', '872', '1,744'], ['total', '10,040']]
    """

    model: Model

    def __str__(self) -> str:
        return "\n".join(_page(self.model))

    @property
    def data(self) -> dict[str, Any]:
        """Every stack, what repeats in it, every head and every tie, as plain values."""
        model, rows = self.model, _by_place(self.model.weights())
        every = [row for own in rows.values() for row in own]
        return {
            "name": model.name,
            "kind": model.kind,
            "parameters": learned(every),
            "constants": sum(row.numel for row in every) - learned(every),
            "stacks": [_stack_data(stack, rows) for stack in model.stacks],
            "heads": [{"name": head.name, "tensors": _plain(rows[f"head.{head.name}"])} for head in model.heads],
            "ties": model.ties(),
            "notes": [*(one.reason for one in model.beyond), *model.notes],
        }


Places = dict[str, list[Row]]


def learned(rows: Iterable[Row]) -> int:
    """How many numbers of these tensors are trained."""
    return sum(row.numel for row in rows if row.learned)


def _by_place(weights: Iterable[Weight]) -> Places:
    """Tensors by the first two words of their names, "decoder.3", under the rest."""
    places: Places = defaultdict(list)
    for w in weights:
        first, second, rest = w.name.split(".", 2)
        places[f"{first}.{second}"].append(Row(rest, str(w.layout), w.shape, w.learned))
    return places


def repeated(stack: Stack, places: Places) -> list[Layers]:
    """What repeats in a stack: layers that are described alike and hold tensors alike."""
    layers = [(block, tuple(places[f"{stack.name}.{depth}"])) for depth, block in enumerate(stack.layers)]
    found: list[Layers] = []
    start = 0
    for times, pattern in repeats(layers):
        found.append(Layers(start, times, tuple((_what(block), own) for block, own in pattern)))
        start += times * len(pattern)
    return found


def _what(block: Block) -> str:
    """A layer in a line."""
    said = [f"{name} {_heads(spec)}" for name, spec in block.specs.items()]
    if isinstance(block.attention, Nearly):
        said.append(f"nearly: {block.attention.reason}")
    said += [f"{name} one vector" for name in block.still]
    if block.form == "merged":
        said.append("merged with a mean of the past")
    return "; ".join([*said, f"{block.norm.kind} norm, {block.placement}"])


def _heads(spec: AttentionSpec) -> str:
    heads = spec.heads
    kv = "" if heads.kv == heads.q else f" on {heads.kv}"
    return f"{heads.q} x {heads.dim}{kv}, {spec.pattern.text}"


def _plain(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [row.data for row in rows]


def _stack_data(stack: Stack, places: Places) -> dict[str, Any]:
    return {
        "name": stack.name,
        "model": stack.model,
        "embedding": _plain(places[f"{stack.name}.embedding"]),
        "layers": [
            {
                "start": run.start,
                "times": run.times,
                "parameters": run.learned,
                "each": [{"what": what, "tensors": _plain(rows)} for what, rows in run.each],
            }
            for run in repeated(stack, places)
        ],
        "norm": _plain(places[f"{stack.name}.norm"]),
    }


# --- as text -------------------------------------------------------------------------------------------


def _page(model: Model) -> Iterator[str]:
    places = _by_place(model.weights())
    every = [row for own in places.values() for row in own]
    yield from _wrapped(f"{model.name}: {model.kind}", "")
    for stack in model.stacks:
        yield from ("", f"{stack.name}, {stack.model} wide")
        yield from _rows("embedding", places[f"{stack.name}.embedding"], 2)
        for run in repeated(stack, places):
            yield from _run(run)
        yield from _rows("norm", places[f"{stack.name}.norm"], 2)
    for head in model.heads:
        rows = places[f"head.{head.name}"]
        yield from ("", f"head {head.name}" + ("" if rows else ", no tensors of its own"))
        yield from _rows("", rows, 2)
    yield ""
    yield from (f"{reader} is {owner}" for reader, owner in model.ties().items())
    constants = sum(row.numel for row in every) - learned(every)
    if constants:
        yield _sums("constants, never trained", [constants])
    yield _sums("total", [learned(every)])
    for note in (*(one.reason for one in model.beyond), *model.notes):
        yield from _wrapped(note, "note: ")


def _run(run: Layers) -> Iterator[str]:
    """A pattern of layers, with the learned numbers of one round and of all."""
    many = f", {run.times} x" if run.times > 1 else ""
    yield _sums(f"  {run.where}{many}", [run.learned // run.times, run.learned] if many else [run.learned])
    for what, rows in run.each:
        yield from _wrapped(what, "    ")
        yield from _rows("", rows, 4)


def _sums(name: str, sums: Sequence[int]) -> str:
    said = "".join(f"{count:>17,}" for count in sums)
    return f"{name}{said:>{max(WIDTH - len(name), 0)}}"


def _rows(under: str, rows: Iterable[Row], indent: int) -> Iterator[str]:
    for row in rows:
        name = " " * indent + (f"{under}.{row.name}" if under else row.name)
        shape = " x ".join(map(str, row.shape)) + ("" if row.learned else ", constant")
        said, count = f"{name:<{NAME}} {row.axes:<{AXES}} {shape}", f"  {row.numel:,}"
        if len(said) + len(count) > WIDTH:
            yield name
            said = f"{'':<{indent + 4}}{row.axes}  {shape}"
        yield said + f"{count:>{WIDTH - len(said)}}"


def _wrapped(text: str, before: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=before, subsequent_indent=" " * len(before))
