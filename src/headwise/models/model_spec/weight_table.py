"""Table of a model's tensors with axes, shape and size; repeated layers are listed once."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...attention.spec.attention_spec import AttentionSpec
from .components import WeightSpec
from .model import ApproximateAttention, BlockSpec, ModelSpec, StackSpec, find_repeats

PAGE_WIDTH = 80
NAME_COLUMN = 31
AXES_COLUMN = 18  # columns of a tensor's name and of its axes

WeightRow = dict[str, Any]  # one tensor: name inside its layer or head, axes, shape, learned
RowsByPlace = dict[str, list[WeightRow]]


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
        return "\n".join(_text_lines(self.to_dict))

    @property
    def to_dict(self) -> dict[str, Any]:
        """Stacks with their repeated layers, heads and tied weights, as plain values."""
        model = self.model
        weights = list(model.weights())
        rows: RowsByPlace = defaultdict(list)
        for w in weights:
            first, second, rest = w.name.split(".", 2)
            rows[f"{first}.{second}"].append(_make_row(rest, w))
        heads = [{"name": head.name, "tensors": rows[f"head.{head.name}"]} for head in model.heads]
        return {
            "name": model.name,
            "kind": model.kind,
            "parameters": sum(w.numel for w in weights if w.trainable),
            "constants": sum(w.numel for w in weights if not w.trainable),
            "stacks": [_stack_to_dict(stack, rows) for stack in model.stacks],
            "heads": heads,
            "ties": model.tied_weights(),
            "notes": [*(part.reason for part in model.beyond), *model.notes],
        }


def _make_row(name: str, weight: WeightSpec) -> WeightRow:
    shape = list(weight.shape)
    return {"name": name, "axes": str(weight.layout), "shape": shape, "learned": weight.trainable}


def _stack_to_dict(stack: StackSpec, places: RowsByPlace) -> dict[str, Any]:
    layers = [(block, places[f"{stack.name}.{n}"]) for n, block in enumerate(stack.layers)]
    runs: list[dict[str, Any]] = []
    start = 0
    for times, pattern in find_repeats(layers):
        each = [{"what": _describe_block(block), "tensors": rows} for block, rows in pattern]
        learned = [row for _, rows in pattern for row in rows if row["learned"]]
        parameters = times * sum(math.prod(row["shape"]) for row in learned)
        runs.append({"start": start, "times": times, "parameters": parameters, "each": each})
        start += times * len(pattern)
    return {
        "name": stack.name,
        "model": stack.model,
        "embedding": places[f"{stack.name}.embedding"],
        "layers": runs,
        "norm": places[f"{stack.name}.norm"],
    }


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


# --- As text --------------------------------------------------------------------------------------


def _text_lines(table: dict[str, Any]) -> Iterator[str]:
    yield from _wrap(f"{table['name']}: {table['kind']}", "")
    for stack in table["stacks"]:
        yield from ("", f"{stack['name']}, {stack['model']} wide")
        yield from _row_lines("embedding.", stack["embedding"], 2)
        for run in stack["layers"]:
            yield from _run_lines(run)
        yield from _row_lines("norm.", stack["norm"], 2)
    for head in table["heads"]:
        rows = head["tensors"]
        yield from ("", f"head {head['name']}" + ("" if rows else ", no tensors of its own"))
        yield from _row_lines("", rows, 2)
    yield ""
    yield from (f"{reader} is {owner}" for reader, owner in table["ties"].items())
    if table["constants"]:
        yield _totals_line("constants, never trained", [table["constants"]])
    yield _totals_line("total", [table["parameters"]])
    for note in table["notes"]:
        yield from _wrap(note, "note: ")


def _run_lines(run: dict[str, Any]) -> Iterator[str]:
    """Lines of repeated layers, with the trained parameters of one repeat and of all."""
    start = run["start"]
    times = run["times"]
    total = run["parameters"]
    end = start + times * len(run["each"]) - 1
    label = f"layer {start}" if end == start else f"layers {start} to {end}"
    if times > 1:
        yield _totals_line(f"  {label}, {times} x", [total // times, total])
    else:
        yield _totals_line(f"  {label}", [total])
    for layer in run["each"]:
        yield from _wrap(layer["what"], "    ")
        yield from _row_lines("", layer["tensors"], 4)


def _totals_line(name: str, sums: Sequence[int]) -> str:
    columns = "".join(f"{count:>17,}" for count in sums)
    return f"{name}{columns:>{max(PAGE_WIDTH - len(name), 0)}}"


def _row_lines(prefix: str, rows: Iterable[WeightRow], indent: int) -> Iterator[str]:
    for row in rows:
        name = f"{'':<{indent}}{prefix}{row['name']}"
        shape = " x ".join(map(str, row["shape"])) + ("" if row["learned"] else ", constant")
        line = f"{name:<{NAME_COLUMN}} {row['axes']:<{AXES_COLUMN}} {shape}"
        count = f"  {math.prod(row['shape']):,}"
        if len(line) + len(count) > PAGE_WIDTH:
            yield name
            line = f"{'':<{indent + 4}}{row['axes']}  {shape}"
        yield line + f"{count:>{PAGE_WIDTH - len(line)}}"


def _wrap(text: str, before: str) -> list[str]:
    return textwrap.wrap(
        text, PAGE_WIDTH, initial_indent=before, subsequent_indent=" " * len(before)
    )
