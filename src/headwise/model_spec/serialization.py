"""Models as text: one dictionary form, written as TOML or JSON, read back as the same model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

from ..errors import SpecError, suggest
from ..spec import serialization
from ..spec.attention_spec import AttentionSpec
from .components import SpecNode
from .model import ModelSpec
from .processor_spec import TOKENIZER_FIELDS, ProcessorSpec

SpecDefaults = Mapping[str, Any] | None


def to_dict(model: ModelSpec) -> dict[str, Any]:
    """A model as plain values; what equals its default is left out."""
    return _to_plain(model)


def from_dict(values: Mapping[str, Any], defaults: SpecDefaults = None) -> ModelSpec:
    """The model that a dictionary describes; `usual` fills the choices that its specs do not make."""
    return _read_node("model", serialization.check_table("model", values), [ModelSpec], defaults)


def to_json(model: ModelSpec) -> str:
    """One JSON document."""
    return json.dumps(to_dict(model), indent=2)


def from_json(text: str, defaults: SpecDefaults = None) -> ModelSpec:
    """The model that a JSON document describes."""
    return from_dict(_parse("JSON", json.loads, text), defaults)


def to_toml(model: ModelSpec) -> str:
    """One TOML document."""
    return dump_toml(to_dict(model))


def dump_toml(values: dict[str, Any]) -> str:
    """Plain values as TOML: what holds tables under a heading, the rest in one line.

    >>> print(dump_toml({"format": 1, "model": {"name": "small", "stacks": [{"model": 8}]}}), end="")
    format = 1
    <BLANKLINE>
    [model]
    name = "small"
    <BLANKLINE>
    [[model.stacks]]
    model = 8
    """
    return "\n".join(_toml_lines("", values)).strip() + "\n"


def from_toml(text: str, defaults: SpecDefaults = None) -> ModelSpec:
    """The model that a TOML document describes."""
    return from_dict(_parse("TOML", tomllib.loads, text), defaults)


def _parse(name: str, loads: Callable[[str], Any], said: str) -> Any:
    try:
        return loads(said)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise SpecError(f"this is not {name}: {error}; write what to_{name.lower()} gives") from None


def _to_plain(value: Any) -> Any:
    if isinstance(value, AttentionSpec):
        return serialization.to_dict(value)
    if isinstance(value, SpecNode):
        own = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
        return {name: _to_plain(said) for name, said, usual in own if usual is MISSING or said != usual}
    return [_to_plain(item) for item in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value


def _read_value(where: str, said: Any, kind: Any, usual: SpecDefaults) -> Any:
    """The value that plain ones stand for, where the type of its field is known."""
    kinds: tuple[Any, ...] = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if isinstance(said, Mapping):
        table = dict(cast("Mapping[str, Any]", said))
        made = [k for k in kinds if isinstance(k, type) and issubclass(k, (SpecNode, AttentionSpec))]
        return _read_node(where, table, made, usual)
    if isinstance(said, (list, tuple)):
        items = [get_args(k)[0] for k in kinds if get_origin(k) is tuple]
        item = items[0] if items else object
        return tuple(_read_value(f"{where}[{n}]", one, item, usual) for n, one in enumerate(cast("list[Any]", said)))
    return said


def _read_node(where: str, table: dict[str, Any], kinds: list[type], usual: SpecDefaults) -> Any:
    """An object of the first of these kinds that has all these names."""
    if not kinds:
        raise SpecError(f"{where} = {table!r} is a table; give a plain value")
    fit = [kind for kind in kinds if set(table) <= {f.name for f in fields(kind)}]
    if not fit:
        known = {f.name for kind in kinds for f in fields(kind)}
        wrong = next((name for name in table if name not in known), next(iter(table)))
        raise SpecError(f"{where} has no {wrong!r}; {suggest(wrong, known)}")
    if fit[0] is AttentionSpec:
        return serialization.from_dict(table, usual)
    hints = get_type_hints(fit[0])
    if missing := [f.name for f in fields(fit[0]) if f.default is MISSING and f.name not in table]:
        raise SpecError(f"{where} says nothing of {missing[0]}; add {missing[0]} = ...")
    return fit[0](**{name: _read_value(f"{where}.{name}", value, hints[name], usual) for name, value in table.items()})


def _toml_lines(path: str, table: dict[str, Any]) -> list[str]:
    plain = {name: value for name, value in table.items() if not _needs_heading(value)}
    lines = [f"{name} = {serialization.format_toml(value)}" for name, value in plain.items()]
    for name, value in table.items():
        inner = f"{path}.{name}" if path else name
        head = f"[[{inner}]]" if isinstance(value, list) else f"[{inner}]"
        for row in _as_list(value) if name not in plain else ():
            lines += ["", head, *_toml_lines(inner, row)]
    return lines


def _needs_heading(value: Any) -> bool:
    """Whether it needs a heading of its own: a table with tables in it, or a list of tables."""
    if isinstance(value, dict):
        return any(isinstance(item, (dict, list)) for item in cast("dict[str, Any]", value).values())
    return bool(value) and all(isinstance(item, dict) for item in _as_list(value))


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


# --- The file that says what a folder with a model in it holds -----------------------------------------

MANIFEST_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "headwise.toml", "model.safetensors", "tokenizer.json"
CHECKED_FILES = (WEIGHTS_FILE, *(f"{name}.json" for name in TOKENIZER_FIELDS))
MANIFEST_FORMAT = 1  # of the folder; a reader refuses what it does not know


class ModelManifest(NamedTuple):
    """A description, the SHA-256 of each file beside it, by name, and how the model is used.

    The documents of a usage are such files, and not in the text.
    """

    model: ModelSpec
    checksums: Mapping[str, str]
    usage: ProcessorSpec = ProcessorSpec()

    def __str__(self) -> str:
        files = [{"name": name, "sha256": checksum} for name, checksum in self.checksums.items()]
        usage = {"usage": self.usage.to_dict} if self.usage.to_dict else {}
        return dump_toml({"format": MANIFEST_FORMAT, "files": files, **usage, "model": to_dict(self.model)})

    @staticmethod
    def from_toml(text: str, source: str) -> ModelManifest:
        """Read what `str` gives; `where` names the file in what is said of it.

        >>> from headwise.families import read_model_spec
        >>> told = ModelManifest(
        ...     read_model_spec({"model_type": "gpt2"}), {WEIGHTS_FILE: "00ff"}, ProcessorSpec(end=(50256,))
        ... )
        >>> ModelManifest.from_toml(str(told), "here") == told
        True
        """
        said = _parse_toml(text, source)
        if said.get("format") != MANIFEST_FORMAT:
            found = said.get("format")
            raise SpecError(
                f"{source} says format = {found!r}; this version reads format = {MANIFEST_FORMAT}, no other"
            )
        if set(said) - {"usage"} != {"format", "files", "model"}:
            raise SpecError(
                f"{source} holds {', '.join(said)}; it must hold format, files and model, as hw.save writes"
            )
        checksums = dict(_read_checksum(row, source) for row in _as_rows(said["files"]))
        return ModelManifest(from_dict(said["model"]), checksums, _read_processor(said.get("usage", {}), source))


def read_model_toml(text: str, source: str, defaults: Mapping[str, Any]) -> ModelSpec:
    """The model that a TOML document describes, bare or in a manifest."""
    said = _parse_toml(text, source)
    return ModelManifest.from_toml(text, source).model if "format" in said else from_dict(said, defaults)


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise SpecError(f"{where} is not TOML: {error}; give a file as hw.save or to_toml writes it") from None


def _read_processor(said: Any, where: str) -> ProcessorSpec:
    if not isinstance(said, dict):
        raise SpecError(f"{where}: usage = {said!r} is no table; save the model again")
    try:
        return ProcessorSpec.from_dict(cast("dict[str, Any]", said))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _as_rows(said: Any) -> list[Any]:
    return cast("list[Any]", said) if isinstance(said, list) else [said]


def _read_checksum(row: Any, where: str) -> tuple[str, str]:
    table = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    name, checksum = table.get("name"), table.get("sha256")
    if name not in CHECKED_FILES or not isinstance(checksum, str):
        raise SpecError(
            f"{where}: files = {row!r} is none of {', '.join(CHECKED_FILES)} with a checksum; save the model again"
        )
    return str(name), checksum


# --- heads.json ----------------------------------------------------------------------------------------

RECORD_FILE = "heads.json"
RECORD_FORMAT = 1  # of the file; a reader refuses what it does not know
RECORD_KINDS = ("ours", "transformers", "resized")


class SurgeryRecord(NamedTuple):
    """What heads.json says: the kind of folder it lies in, and the SHA-256 of each file beside it, by name.

    A "resized" folder has the tensors of transformers in shapes that its config.json cannot say: `model` describes
    them, `constants` are numbers of attentions that files do not hold, `besides` names tensors that mean nothing now.
    """

    kind: str
    sentence: str
    done: Mapping[str, Any]
    source: Mapping[str, str]
    files: Mapping[str, str]
    model: ModelSpec | None = None
    constants: Mapping[str, Any] = {}
    besides: tuple[str, ...] = ()

    @staticmethod
    def from_file(path: Path) -> SurgeryRecord:
        """Read the file."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SpecError(f"{path} cannot be read: {error}; copy the folder again") from None
        told = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        if told.get("format") != RECORD_FORMAT:
            raise SpecError(f"{path} says format = {told.get('format')!r}; this version reads format = {RECORD_FORMAT}")
        if told.get("kind") not in RECORD_KINDS:
            raise SpecError(
                f"{path} says kind = {told.get('kind')!r}, none of {', '.join(RECORD_KINDS)}; copy the folder again"
            )
        tables = {name: _read_table(path, told, name) for name in ("done", "source", "files", "constants")}
        besides, described = told.get("besides", []), told.get("model")
        if not isinstance(besides, list) or (described is None) != (told["kind"] != "resized"):
            raise SpecError(f"{path} does not say what a folder of kind {told['kind']!r} holds; copy the folder again")
        model = None if described is None else from_dict(_read_table(path, told, "model"))
        return SurgeryRecord(
            told["kind"],
            str(told.get("sentence", "")),
            **tables,
            model=model,
            besides=tuple(str(one) for one in cast("list[Any]", besides)),
        )


def _read_table(path: Path, said: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = said.get(name, {})
    if not isinstance(found, dict):
        raise SpecError(f"{path}: {name} = {found!r} is no table; copy the folder again")
    return cast("dict[str, Any]", found)


def find_record(folder: Path) -> SurgeryRecord | None:
    """What the heads.json of a folder says; None where there is none."""
    path = folder / RECORD_FILE
    return SurgeryRecord.from_file(path) if path.is_file() else None
