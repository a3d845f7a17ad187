"""Model specs as dictionaries, TOML and JSON, the manifest of a saved model, the record of
surgery, and the table of its tensors.

Reading back what was written gives an equal spec.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

from ...attention.interfaces.part import ExternalPart, find_external_parts
from ...attention.spec import serialization
from ...attention.spec.attention_spec import AttentionSpec, from_dict as read_attention
from ...report.data import Column, Table, Value
from ...report.render import to_text
from ...util.errors import SpecError, suggest
from ...util.files import read_text_file
from ...util.size_limits import parse_json, parse_toml
from .components import TOKENIZER_FIELDS, ProcessorSpec, SpecNode, to_plain
from .model import BlockSpec, ModelSpec, StackSpec, find_repeats

SpecDefaults = Mapping[str, Any] | None


def to_dict(model: ModelSpec) -> dict[str, Any]:
    """Return a model spec as plain values; fields that equal their defaults are left out."""
    return to_plain(model)


def from_dict(values: Mapping[str, Any], defaults: SpecDefaults = None) -> ModelSpec:
    """Return the model spec of a dictionary; `defaults` fills fields that its attention specs leave
    out.
    """
    return _read_node("model", serialization.check_table("model", values), [ModelSpec], defaults)


def to_json(model: ModelSpec) -> str:
    """Return a model spec as a JSON document."""
    return json.dumps(to_dict(model), indent=2)


def from_json(text: str, defaults: SpecDefaults = None) -> ModelSpec:
    """Return the model spec of a JSON document."""
    return from_dict(parse_json("this", text, "write what to_json gives"), defaults)


def to_toml(model: ModelSpec) -> str:
    """Return a model spec as a TOML document."""
    return serialization.dump_toml(to_dict(model))


def from_toml(text: str, defaults: SpecDefaults = None) -> ModelSpec:
    """Return the model spec of a TOML document."""
    return from_dict(parse_toml("this", text, "write what to_toml gives"), defaults)


def _read_value(where: str, value: Any, kind: Any, defaults: SpecDefaults) -> Any:
    """Convert plain values to the type of their field, `kind`."""
    kinds: tuple[Any, ...] = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if isinstance(value, Mapping):
        table = dict(cast("Mapping[str, Any]", value))
        node_kinds = [
            k for k in kinds if isinstance(k, type) and issubclass(k, (SpecNode, AttentionSpec))
        ]
        return _read_node(where, table, node_kinds, defaults)
    if isinstance(value, (list, tuple)):
        item_kinds = [get_args(k)[0] for k in kinds if get_origin(k) is tuple]
        item_kind = item_kinds[0] if item_kinds else object
        items = enumerate(cast("list[Any]", value))
        return tuple(_read_value(f"{where}[{n}]", item, item_kind, defaults) for n, item in items)
    return value


def _read_node(where: str, table: dict[str, Any], kinds: list[type], defaults: SpecDefaults) -> Any:
    """Build an object of the first of these classes that has all fields of the table."""
    if not kinds:
        raise SpecError(f"{where} = {table!r} is a table; give a plain value")
    names_by_kind = {kind: {f.name for f in fields(kind)} for kind in kinds}
    fitting = [kind for kind, names in names_by_kind.items() if set(table) <= names]
    if not fitting:
        field_names = set[str]().union(*names_by_kind.values())
        wrong = next((name for name in table if name not in field_names), next(iter(table)))
        raise SpecError(f"{where} has no {wrong!r}; {suggest(wrong, field_names)}")
    if fitting[0] is AttentionSpec:
        return read_attention(table, defaults)
    hints = get_type_hints(fitting[0])
    missing = [f.name for f in fields(fitting[0]) if f.default is MISSING and f.name not in table]
    if missing:
        raise SpecError(f"{where} lacks {missing[0]}; add {missing[0]} = ...")
    return fitting[0](
        **{
            name: _read_value(f"{where}.{name}", value, hints[name], defaults)
            for name, value in table.items()
        }
    )


Difference = tuple[str, str, str]  # path in two trees, value in one, value in the other


def compare_trees(where: str, one: Any, other: Any, missing: str) -> Iterator[Difference]:
    """Yield the differences of two trees of plain values, below the path `where`; `missing` stands
    for a value that only the other has.

    >>> trees = {"recipe": {"lr": 0.1, "seed": 3}}, {"recipe": {"lr": 0.2, "seed": 3}}
    >>> list(compare_trees("", *trees, "not set"))
    [('recipe.lr', '0.1', '0.2')]
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        first = cast("Mapping[str, Any]", one)
        second = cast("Mapping[str, Any]", other)
        for key in [*first, *(key for key in second if key not in first)]:
            inner = f"{where}.{key}" if where else key
            if key in first and key in second:
                yield from compare_trees(inner, first[key], second[key], missing)
            else:
                value = repr(first[key]) if key in first else missing
                yield inner, value, repr(second[key]) if key in second else missing
    elif isinstance(one, list) and isinstance(other, list):
        items = cast("list[Any]", one)
        others = cast("list[Any]", other)
        for n, (item, another) in enumerate(zip(items, others, strict=False)):
            yield from compare_trees(f"{where}.{n}", item, another, missing)
        if len(items) != len(others):
            yield f"the number of {where}", str(len(items)), str(len(others))
    elif one != other:
        yield where, f"{one!r}", f"{other!r}"


# --- The manifest of a saved model ----------------------------------------------------------------

MANIFEST_FILE = "headwise.toml"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CHECKED_FILES = (WEIGHTS_FILE, *(f"{name}.json" for name in TOKENIZER_FIELDS))
MANIFEST_FORMAT = 1  # version of the folder format; readers refuse other versions
TOML_REMEDY = "give a file as hw.save or to_toml writes it"


class ModelManifest(NamedTuple):
    """Contents of headwise.toml: the model spec, the SHA-256 of each file in the folder by name,
    and the processor.

    Tokenizers are separate files, so they are not part of the manifest's text. The text also
    lists the parts of the model that are not headwise's own, with module and file, because the
    folder contains no code.
    """

    model: ModelSpec
    checksums: Mapping[str, str]
    usage: ProcessorSpec = ProcessorSpec()

    def __str__(self) -> str:
        files = [{"name": name, "sha256": checksum} for name, checksum in self.checksums.items()]
        usage = {"usage": self.usage.to_dict} if self.usage.to_dict else {}
        rows = [external._asdict() for external in find_external_parts(self.model)]
        parts = {"parts": rows} if rows else {}
        return serialization.dump_toml(
            {
                "format": MANIFEST_FORMAT,
                "files": files,
                **usage,
                **parts,
                "model": to_dict(self.model),
            }
        )

    @staticmethod
    def from_toml(text: str, source: str) -> ModelManifest:
        """Return the manifest that `str(manifest)` wrote; `source` names the file in error
        messages.

        >>> from headwise.models.families import read_model_spec
        >>> manifest = ModelManifest(
        ...     read_model_spec({"model_type": "gpt2"}),
        ...     {WEIGHTS_FILE: "00ff"},
        ...     ProcessorSpec(eos=(50256,)),
        ... )
        >>> ModelManifest.from_toml(str(manifest), "here") == manifest
        True
        """
        table = parse_toml(source, text, TOML_REMEDY)
        if table.get("format") != MANIFEST_FORMAT:
            file_format = table.get("format")
            raise SpecError(
                f"{source} has format = {file_format!r}; this version reads format = "
                f"{MANIFEST_FORMAT} only"
            )
        if set(table) - {"usage", "parts"} != {"format", "files", "model"}:
            raise SpecError(
                f"{source} holds {', '.join(table)}; it must hold format, files and model, as "
                "hw.save writes"
            )
        checksums = dict(_read_checksum(row, source) for row in _as_rows(table["files"]))
        for row in _as_rows(table.get("parts", [])):
            ExternalPart.from_dict(row, source).check_registered(source)
        return ModelManifest(
            from_dict(table["model"]), checksums, _read_processor(table.get("usage", {}), source)
        )


def read_model_toml(text: str, source: str, defaults: Mapping[str, Any]) -> ModelSpec:
    """Return the model spec of a TOML document: a bare spec or a manifest."""
    table = parse_toml(source, text, TOML_REMEDY)
    if "format" in table:
        return ModelManifest.from_toml(text, source).model
    return from_dict(table, defaults)


def _read_processor(values: Any, where: str) -> ProcessorSpec:
    if not isinstance(values, dict):
        raise SpecError(f"{where}: usage = {values!r} is not a table; save the model again")
    try:
        return ProcessorSpec.from_dict(cast("dict[str, Any]", values))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _as_rows(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _read_checksum(row: Any, where: str) -> tuple[str, str]:
    table = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    name = table.get("name")
    checksum = table.get("sha256")
    if name not in CHECKED_FILES or not isinstance(checksum, str):
        raise SpecError(
            f"{where}: files = {row!r} is none of {', '.join(CHECKED_FILES)} with a checksum; "
            "save the model again"
        )
    return str(name), checksum


# --- The record of surgery, heads.json ------------------------------------------------------------

RECORD_FILE = "heads.json"
RECORD_FORMAT = 1  # version of the file format; readers refuse other versions
RECORD_KINDS = ("ours", "transformers", "resized")


class SurgeryRecord(NamedTuple):
    """Contents of heads.json: the kind of folder, what surgery did, and the SHA-256 of each file by
    name.

    A "resized" folder holds the tensors of a transformers model in shapes that its config.json
    cannot express: `model` describes them, `constants` are values of attentions that are not stored
    in the weight files, and `unused_tensors` names tensors that the model does not use any more.
    """

    kind: str
    sentence: str
    change: Mapping[str, Any]
    source: Mapping[str, str]
    files: Mapping[str, str]
    model: ModelSpec | None = None
    constants: Mapping[str, Any] = {}
    unused_tensors: tuple[str, ...] = ()

    @staticmethod
    def from_file(path: Path) -> SurgeryRecord:
        """Read a heads.json file."""
        document = parse_json(str(path), read_text_file(path), "copy the folder again")
        table = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        if table.get("format") != RECORD_FORMAT:
            raise SpecError(
                f"{path} has format = {table.get('format')!r}; this version reads format = "
                f"{RECORD_FORMAT}"
            )
        if table.get("kind") not in RECORD_KINDS:
            raise SpecError(
                f"{path} has kind = {table.get('kind')!r}, not one of {', '.join(RECORD_KINDS)}; "
                "copy the folder again"
            )
        tables = {
            name: _read_table(path, table, name)
            for name in ("change", "source", "files", "constants")
        }
        unused_tensors = table.get("unused_tensors", [])
        described = table.get("model")
        is_resized = table["kind"] == "resized"
        is_described = described is not None or (is_resized and "modules" in table)
        if not isinstance(unused_tensors, list) or is_described != is_resized:
            raise SpecError(
                f"{path} lacks fields of a folder of kind {table['kind']!r}; copy the folder again"
            )
        model = None if described is None else from_dict(_read_table(path, table, "model"))
        return SurgeryRecord(
            table["kind"],
            str(table.get("sentence", "")),
            **tables,
            model=model,
            unused_tensors=tuple(str(name) for name in cast("list[Any]", unused_tensors)),
        )


def _read_table(path: Path, table: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, dict):
        raise SpecError(f"{path}: {name} = {value!r} is not a table; copy the folder again")
    return cast("dict[str, Any]", value)


def find_record(folder: Path) -> SurgeryRecord | None:
    """Return the record of surgery in a folder; None if it has no heads.json."""
    path = folder / RECORD_FILE
    return SurgeryRecord.from_file(path) if path.is_file() else None


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
            "notes": list(model.notes),
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
