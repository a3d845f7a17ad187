"""A model as a table: what repeats once, every tensor with its axes, shape and how many numbers it holds."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..spec.attention_spec import AttentionSpec
from .components import WeightSpec
from .model import ApproximateAttention, BlockSpec, ModelSpec, StackSpec, find_repeats

PAGE_WIDTH = 80
NAME_COLUMN, AXES_COLUMN = 31, 18  # columns of a tensor's name and of its axes


class WeightRow(NamedTuple):
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
    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"name": self.name, "axes": self.axes, "shape": list(self.shape), "learned": self.learned}


class RepeatedLayers(NamedTuple):
    """A pattern of layers, so many times in a row from layer `start` on: what each is, and its tensors."""

    start: int
    repeats: int
    layers: tuple[tuple[str, tuple[WeightRow, ...]], ...]

    @property
    def label(self) -> str:
        """Which layers, in words."""
        end = self.start + self.repeats * len(self.layers) - 1
        return f"layer {self.start}" if end == self.start else f"layers {self.start} to {end}"

    @property
    def num_trainable(self) -> int:
        """The learned numbers of all of them."""
        return self.repeats * sum(count_trainable(rows) for _, rows in self.layers)


@dataclass(frozen=True)
class ModelTable:
    """A model, to be printed or handed on as plain `data`.

    >>> from headwise.families import read_model_spec
    >>> told = ModelTable(
    ...     read_model_spec({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11})
    ... )
    >>> [line.split() for line in str(told).splitlines() if line.startswith(("  layers", "total"))]
    [['layers', '0', 'to', '1,', '2', 'x', '872', '1,744'], ['total', '10,040']]
    """

    model: ModelSpec

    def __str__(self) -> str:
        return "\n".join(_page_lines(self.model))

    @property
    def to_dict(self) -> dict[str, Any]:
        """Every stack, what repeats in it, every head and every tie, as plain values."""
        model, rows = self.model, _group_by_place(self.model.weights())
        every = [row for own in rows.values() for row in own]
        return {
            "name": model.name,
            "kind": model.kind,
            "parameters": count_trainable(every),
            "constants": sum(row.numel for row in every) - count_trainable(every),
            "stacks": [_stack_to_dict(stack, rows) for stack in model.stacks],
            "heads": [
                {"name": head.name, "tensors": _rows_to_dicts(rows[f"head.{head.name}"])} for head in model.heads
            ],
            "ties": model.tied_weights(),
            "notes": [*(one.reason for one in model.beyond), *model.notes],
        }


RowsByPlace = dict[str, list[WeightRow]]


def count_trainable(rows: Iterable[WeightRow]) -> int:
    """How many numbers of these tensors are trained."""
    return sum(row.numel for row in rows if row.learned)


def _group_by_place(weights: Iterable[WeightSpec]) -> RowsByPlace:
    """Tensors by the first two words of their names, "decoder.3", under the rest."""
    places: RowsByPlace = defaultdict(list)
    for w in weights:
        first, second, rest = w.name.split(".", 2)
        places[f"{first}.{second}"].append(WeightRow(rest, str(w.layout), w.shape, w.trainable))
    return places


def group_layers(stack: StackSpec, places: RowsByPlace) -> list[RepeatedLayers]:
    """What repeats in a stack: layers that are described alike and hold tensors alike."""
    layers = [(block, tuple(places[f"{stack.name}.{depth}"])) for depth, block in enumerate(stack.layers)]
    found: list[RepeatedLayers] = []
    start = 0
    for times, pattern in find_repeats(layers):
        found.append(RepeatedLayers(start, times, tuple((_describe_block(block), own) for block, own in pattern)))
        start += times * len(pattern)
    return found


def _describe_block(block: BlockSpec) -> str:
    """A layer in a line."""
    said = [f"{name} {_describe_heads(spec)}" for name, spec in block.attention_specs.items()]
    if isinstance(block.attention, ApproximateAttention):
        said.append(f"nearly: {block.attention.reason}")
    said += [f"{name} one vector" for name in block.still]
    if block.form == "merged":
        said.append("merged with a mean of the past")
    return "; ".join([*said, f"{block.norm.kind} norm, {block.placement}"])


def _describe_heads(spec: AttentionSpec) -> str:
    heads = spec.heads
    kv = "" if heads.kv == heads.q else f" on {heads.kv}"
    return f"{heads.q} x {heads.dim}{kv}, {spec.pattern.text}"


def _rows_to_dicts(rows: Iterable[WeightRow]) -> list[dict[str, Any]]:
    return [row.to_dict for row in rows]


def _stack_to_dict(stack: StackSpec, places: RowsByPlace) -> dict[str, Any]:
    return {
        "name": stack.name,
        "model": stack.model,
        "embedding": _rows_to_dicts(places[f"{stack.name}.embedding"]),
        "layers": [
            {
                "start": run.start,
                "times": run.repeats,
                "parameters": run.num_trainable,
                "each": [{"what": what, "tensors": _rows_to_dicts(rows)} for what, rows in run.layers],
            }
            for run in group_layers(stack, places)
        ],
        "norm": _rows_to_dicts(places[f"{stack.name}.norm"]),
    }


# --- as text -------------------------------------------------------------------------------------------


def _page_lines(model: ModelSpec) -> Iterator[str]:
    places = _group_by_place(model.weights())
    every = [row for own in places.values() for row in own]
    yield from _wrap(f"{model.name}: {model.kind}", "")
    for stack in model.stacks:
        yield from ("", f"{stack.name}, {stack.model} wide")
        yield from _row_lines("embedding", places[f"{stack.name}.embedding"], 2)
        for run in group_layers(stack, places):
            yield from _run_lines(run)
        yield from _row_lines("norm", places[f"{stack.name}.norm"], 2)
    for head in model.heads:
        rows = places[f"head.{head.name}"]
        yield from ("", f"head {head.name}" + ("" if rows else ", no tensors of its own"))
        yield from _row_lines("", rows, 2)
    yield ""
    yield from (f"{reader} is {owner}" for reader, owner in model.tied_weights().items())
    constants = sum(row.numel for row in every) - count_trainable(every)
    if constants:
        yield _totals_line("constants, never trained", [constants])
    yield _totals_line("total", [count_trainable(every)])
    for note in (*(one.reason for one in model.beyond), *model.notes):
        yield from _wrap(note, "note: ")


def _run_lines(run: RepeatedLayers) -> Iterator[str]:
    """A pattern of layers, with the learned numbers of one round and of all."""
    many = f", {run.repeats} x" if run.repeats > 1 else ""
    yield _totals_line(
        f"  {run.label}{many}", [run.num_trainable // run.repeats, run.num_trainable] if many else [run.num_trainable]
    )
    for what, rows in run.layers:
        yield from _wrap(what, "    ")
        yield from _row_lines("", rows, 4)


def _totals_line(name: str, sums: Sequence[int]) -> str:
    said = "".join(f"{count:>17,}" for count in sums)
    return f"{name}{said:>{max(PAGE_WIDTH - len(name), 0)}}"


def _row_lines(under: str, rows: Iterable[WeightRow], indent: int) -> Iterator[str]:
    for row in rows:
        name = " " * indent + (f"{under}.{row.name}" if under else row.name)
        shape = " x ".join(map(str, row.shape)) + ("" if row.learned else ", constant")
        said, count = f"{name:<{NAME_COLUMN}} {row.axes:<{AXES_COLUMN}} {shape}", f"  {row.numel:,}"
        if len(said) + len(count) > PAGE_WIDTH:
            yield name
            said = f"{'':<{indent + 4}}{row.axes}  {shape}"
        yield said + f"{count:>{PAGE_WIDTH - len(said)}}"


def _wrap(text: str, before: str) -> list[str]:
    return textwrap.wrap(text, PAGE_WIDTH, initial_indent=before, subsequent_indent=" " * len(before))
