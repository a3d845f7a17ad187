"""Table of a model's tensors with axes, shape and size; repeated layers are listed once."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...attention.spec.attention_spec import AttentionSpec
from .components import WeightSpec
from .model import ApproximateAttention, BlockSpec, ModelSpec, StackSpec, find_repeats

PAGE_WIDTH = 80
NAME_COLUMN = 31
AXES_COLUMN = 18  # columns of a tensor's name and of its axes


class WeightRow(NamedTuple):
    """One tensor, by its name inside its layer, embedding, norm or head."""

    name: str
    axes: str
    shape: tuple[int, ...]
    learned: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        return {
            "name": self.name,
            "axes": self.axes,
            "shape": list(self.shape),
            "learned": self.learned,
        }


class RepeatedLayers(NamedTuple):
    """A pattern of layers that occurs `repeats` times from layer `start` on: (description, tensors)
    of each layer.
    """

    start: int
    repeats: int
    layers: tuple[tuple[str, tuple[WeightRow, ...]], ...]

    @property
    def label(self) -> str:
        """The range of layers as text, such as "layers 0 to 11"."""
        end = self.start + self.repeats * len(self.layers) - 1
        return f"layer {self.start}" if end == self.start else f"layers {self.start} to {end}"

    @property
    def num_trainable(self) -> int:
        """The number of trained parameters of all repeats."""
        return self.repeats * sum(count_trainable(rows) for _, rows in self.layers)


@dataclass(frozen=True)
class ModelTable:
    """Table of a model: `print` shows it as text, `to_dict` returns it as plain values.

    >>> from headwise.models.families import read_model_spec
    >>> table = ModelTable(
    ...     read_model_spec(
    ...         {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    ...     )
    ... )
    >>> [line.split() for line in str(table).splitlines() if line.startswith(("  layers", "total"))]
    [['layers', '0', 'to', '1,', '2', 'x', '872', '1,744'], ['total', '10,040']]
    """

    model: ModelSpec

    def __str__(self) -> str:
        return "\n".join(_page_lines(self.model))

    @property
    def to_dict(self) -> dict[str, Any]:
        """Stacks with their repeated layers, heads and tied weights, as plain values."""
        model = self.model
        rows = _group_by_place(self.model.weights())
        all_rows = [row for place_rows in rows.values() for row in place_rows]
        return {
            "name": model.name,
            "kind": model.kind,
            "parameters": count_trainable(all_rows),
            "constants": sum(row.numel for row in all_rows) - count_trainable(all_rows),
            "stacks": [_stack_to_dict(stack, rows) for stack in model.stacks],
            "heads": [
                {"name": head.name, "tensors": _rows_to_dicts(rows[f"head.{head.name}"])}
                for head in model.heads
            ],
            "ties": model.tied_weights(),
            "notes": [*(part.reason for part in model.beyond), *model.notes],
        }


RowsByPlace = dict[str, list[WeightRow]]


def count_trainable(rows: Iterable[WeightRow]) -> int:
    """Return the number of trained parameters in these tensors."""
    return sum(row.numel for row in rows if row.learned)


def _group_by_place(weights: Iterable[WeightSpec]) -> RowsByPlace:
    """Group tensors by the first two words of their names, such as "decoder.3"; rows keep the rest
    of the name.
    """
    places: RowsByPlace = defaultdict(list)
    for w in weights:
        first, second, rest = w.name.split(".", 2)
        places[f"{first}.{second}"].append(WeightRow(rest, str(w.layout), w.shape, w.trainable))
    return places


def group_layers(stack: StackSpec, places: RowsByPlace) -> list[RepeatedLayers]:
    """Group the layers of a stack into repeated patterns with equal specs and equal tensors."""
    layers = [
        (block, tuple(places[f"{stack.name}.{depth}"])) for depth, block in enumerate(stack.layers)
    ]
    runs: list[RepeatedLayers] = []
    start = 0
    for times, pattern in find_repeats(layers):
        runs.append(
            RepeatedLayers(
                start, times, tuple((_describe_block(block), rows) for block, rows in pattern)
            )
        )
        start += times * len(pattern)
    return runs


def _describe_block(block: BlockSpec) -> str:
    """Describe a layer in one line."""
    phrases = [block.mixer.text] if block.mixer else []
    phrases += [f"{name} {_describe_heads(spec)}" for name, spec in block.attention_specs.items()]
    if isinstance(block.attention, ApproximateAttention):
        phrases.append(f"approximately: {block.attention.reason}")
    phrases += [f"{name} one vector" for name in block.constant_sublayers]
    if block.form == "merged":
        phrases.append("merged with the mean over past tokens")
    return "; ".join([*phrases, f"{block.norm.kind} norm, {block.placement}"])


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
                "each": [
                    {"what": text, "tensors": _rows_to_dicts(rows)} for text, rows in run.layers
                ],
            }
            for run in group_layers(stack, places)
        ],
        "norm": _rows_to_dicts(places[f"{stack.name}.norm"]),
    }


# --- As text --------------------------------------------------------------------------------------


def _page_lines(model: ModelSpec) -> Iterator[str]:
    places = _group_by_place(model.weights())
    all_rows = [row for place_rows in places.values() for row in place_rows]
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
    constants = sum(row.numel for row in all_rows) - count_trainable(all_rows)
    if constants:
        yield _totals_line("constants, never trained", [constants])
    yield _totals_line("total", [count_trainable(all_rows)])
    for note in (*(part.reason for part in model.beyond), *model.notes):
        yield from _wrap(note, "note: ")


def _run_lines(run: RepeatedLayers) -> Iterator[str]:
    """Lines of repeated layers, with the trained parameters of one repeat and of all."""
    repeats = f", {run.repeats} x" if run.repeats > 1 else ""
    yield _totals_line(
        f"  {run.label}{repeats}",
        [run.num_trainable // run.repeats, run.num_trainable] if repeats else [run.num_trainable],
    )
    for text, rows in run.layers:
        yield from _wrap(text, "    ")
        yield from _row_lines("", rows, 4)


def _totals_line(name: str, sums: Sequence[int]) -> str:
    columns = "".join(f"{count:>17,}" for count in sums)
    return f"{name}{columns:>{max(PAGE_WIDTH - len(name), 0)}}"


def _row_lines(prefix: str, rows: Iterable[WeightRow], indent: int) -> Iterator[str]:
    for row in rows:
        name = " " * indent + (f"{prefix}.{row.name}" if prefix else row.name)
        shape = " x ".join(map(str, row.shape)) + ("" if row.learned else ", constant")
        line = f"{name:<{NAME_COLUMN}} {row.axes:<{AXES_COLUMN}} {shape}"
        count = f"  {row.numel:,}"
        if len(line) + len(count) > PAGE_WIDTH:
            yield name
            line = f"{'':<{indent + 4}}{row.axes}  {shape}"
        yield line + f"{count:>{PAGE_WIDTH - len(line)}}"


def _wrap(text: str, before: str) -> list[str]:
    return textwrap.wrap(
        text, PAGE_WIDTH, initial_indent=before, subsequent_indent=" " * len(before)
    )
