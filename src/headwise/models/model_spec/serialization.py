"""Model specs as dictionaries, TOML and JSON, the manifest of a saved model, and the record of
surgery.

Reading back what was written gives an equal spec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

from ...attention.interfaces.part import ExternalPart, find_external_parts
from ...attention.spec import serialization
from ...attention.spec.attention_spec import AttentionSpec, from_dict as read_attention
from ...util.errors import SpecError, suggest
from ...util.files import read_text_file
from ...util.size_limits import parse_json, parse_toml
from .components import TOKENIZER_FIELDS, ProcessorSpec, SpecNode, to_plain
from .model import ModelSpec

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

    Tokenizers are files of their own, so they are not part of the manifest's text. The text also
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
        ...     ProcessorSpec(end=(50256,)),
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
    return (
        ModelManifest.from_toml(text, source).model
        if "format" in table
        else from_dict(table, defaults)
    )


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
    in the weight files, and `unused_tensors` names tensors that are no longer used.
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
        if not isinstance(unused_tensors, list) or (described is None) != (
            table["kind"] != "resized"
        ):
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
