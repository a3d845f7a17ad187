"""Table of a model's tensors with axes, shape and size; repeated layers are listed once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...report.data import Column, Table, Value
from ...report.render import to_text
from .model import ApproximateAttention, BlockSpec, ModelSpec, StackSpec, find_repeats

MAX_WIDTH = 120  # columns of the table as text

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
        return _to_text(self.to_dict)

    @property
    def to_dict(self) -> dict[str, Any]:
        """Stacks with their repeated layers, heads and tied weights, as plain values."""
        model = self.model
        weights = list(model.weights())
        rows: RowsByPlace = defaultdict(list)
        for w in weights:
            first, second, rest = w.name.split(".", 2)
            row = {"name": rest, "axes": str(w.layout), "shape": list(w.shape)}
            rows[f"{first}.{second}"].append(row | {"learned": w.trainable})
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


def _stack_to_dict(stack: StackSpec, places: RowsByPlace) -> dict[str, Any]:
    layers = [(block, places[f"{stack.name}.{n}"]) for n, block in enumerate(stack.layers)]
    runs: list[dict[str, Any]] = []
    start = 0
    for times, pattern in find_repeats(layers):
        each = [{"what": _describe_block(block), "tensors": rows} for block, rows in pattern]
        tensors = chain.from_iterable(rows for _, rows in pattern)
        parameters = times * sum(math.prod(row["shape"]) for row in tensors if row["learned"])
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
    for name, spec in block.attention_specs.items():
        heads = spec.heads
        kv = "" if heads.kv == heads.q else f" on {heads.kv}"
        phrases.append(f"{name} {heads.q} x {heads.dim}{kv}, {spec.pattern.text}")
    if isinstance(block.attention, ApproximateAttention):
        phrases.append(f"approximately: {block.attention.reason}")
    phrases += [f"{name} one vector" for name in block.constant_sublayers]
    if block.form == "merged":
        phrases.append("merged with the mean over past tokens")
    return "; ".join([*phrases, f"{block.norm.kind} norm, {block.placement}"])


# --- As text --------------------------------------------------------------------------------------


def _to_text(table: dict[str, Any]) -> str:
    rows = list[Sequence[Value]]()
    notes = list[str]()
    for stack in table["stacks"]:
        rows.append((f"{stack['name']}, {stack['model']} wide", "", "", ""))
        rows += _text_rows("  embedding.", stack["embedding"])
        for run in stack["layers"]:
            times = run["times"]
            label = f"layer {run['start']}"
            if times * len(run["each"]) > 1:
                label = f"layers {run['start']} to {run['start'] + times * len(run['each']) - 1}"
            if times > 1:
                label += f", {times} x {run['parameters'] // times:,}"
            rows.append((f"  {label}", "", "", run["parameters"]))
            for layer in run["each"]:
                notes.append(f"{stack['name']}, {label.partition(',')[0]}: {layer['what']}")
                rows += _text_rows("    ", layer["tensors"])
        rows += _text_rows("  norm.", stack["norm"])
    for head in table["heads"]:
        rows.append((f"head {head['name']}", "", "", ""))
        rows += _text_rows("  ", head["tensors"])
    rows += [(f"{reader} is {owner}", "", "", "") for reader, owner in table["ties"].items()]
    if table["constants"]:
        rows.append(("constants, never trained", "", "", table["constants"]))
    rows.append(("total", "", "", table["parameters"]))
    title = f"{table['name']}: {table['kind']}"
    columns = ("tensor", "axes", "shape", Column("numbers", align="right"))
    return to_text(Table(title, columns, rows, notes + table["notes"]), width=MAX_WIDTH)


def _text_rows(prefix: str, rows: Iterable[WeightRow]) -> Iterator[Sequence[Value]]:
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) + ("" if row["learned"] else ", constant")
        yield f"{prefix}{row['name']}", row["axes"], shape, math.prod(row["shape"])
