"""Shared by all commands: specs and models named on the command line, and output."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import suggest
from ..escaping import escape_page
from ..learn.language import SAMPLE
from .options import Options, UsageError, options

if TYPE_CHECKING:
    from ..model_spec import ModelSpec
    from ..output_paths import Existing
    from ..spec.attention_spec import AttentionSpec

BAD_INPUT = 2  # exit code for invalid arguments or input
# The names are repeated here so that --help need not import torch; a test compares them with
# headwise.presets.
PRESETS = [
    "mha",
    "gqa",
    "mqa",
    "mla",
    "moh",
    "moh_vit",
    "dcmha",
    "mohsa",
    "collaborative",
    "talking",
    "diff",
    "diff2",
    "entmax",
    "linear",
    "performer",
]
PRESETS += ["longformer", "longformer_dilated", "streaming_retrieval", "bigbird", "kha", "average"]
DESCRIPTION_SUFFIXES = (".toml", ".json")  # specs and models without weights
MAX_FILE_BYTES = 2**20  # largest spec file that is read; a spec is about a page of text
LOCALE_NAMES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides
ASCII_FALLBACKS = str.maketrans("█▒·─–—×−→≤≥²…", "#+.---x-><>2.")


def prepare_output() -> None:
    """Make stdout and stderr replace characters that they cannot encode, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_page(text: str) -> None:
    """Print a page; on a terminal, control characters are shown as codes. Without UTF-8, lines
    become ASCII.
    """
    if sys.stdout.isatty():
        text = escape_page(text)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(ASCII_FALLBACKS)
        if not text.isascii():
            _note_replaced_characters(sys.stdout.encoding or "ascii")
    print(text)


_noted_encodings = set[str]()


def _note_replaced_characters(encoding: str) -> None:
    """Say once why characters are missing."""
    if encoding in _noted_encodings:
        return
    _noted_encodings.add(encoding)
    print_note(
        f"headwise: characters that {encoding} does not have are shown as ?; set "
        "PYTHONIOENCODING=utf-8"
    )


def print_note(text: object) -> None:
    """Print text to stderr; on a terminal, control characters are shown as codes."""
    line = str(text)
    print(escape_page(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def supports_style() -> bool:
    """Whether stdout is a terminal that shows bold and colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def print_title(text: str) -> None:
    """Print a heading and an empty line, in bold if the terminal supports it."""
    print_page(f"\x1b[1m{text}\x1b[0m\n" if supports_style() else text + "\n")


@options
class SpecOptions(Options):
    """Options that name a spec and change it.

    SPEC  a .toml or .json file, a preset, or - for stdin
    --preset NAME  one of mha, gqa, mqa, mla, moh, moh_vit, dcmha, mohsa, collaborative, talking,
        diff, diff2, entmax, linear, performer, longformer, longformer_dilated,
        streaming_retrieval, bigbird, kha, average
    --model WIDTH  model width of the preset
    --heads COUNT  number of query heads of the preset
    --set KEY=VALUE  change a field, as in heads.kv=4 or pattern='window(256)'; repeatable
    """

    names = {"--set": "changes"}
    spec: str | None = None
    preset: str | None = None
    model: int | None = None
    heads: int | None = None
    changes: tuple[str, ...] = ()

    def refuse_changes(self, remedy: str) -> None:
        """Refuse options for one spec if `spec` is a whole model."""
        for name in ("changes", "model", "heads"):
            if name in self.options_set:
                raise UsageError(
                    f"{self.options_set[name]} is for one spec, and {self.spec} describes a whole "
                    f"model; {remedy}"
                )


def check_engine(engine: str, address: str) -> None:
    """Refuse the address of a Ray cluster that is not used."""
    if address and engine != "ray":
        raise UsageError(f"--address {address} belongs to --engine ray; give both, or leave it out")


def terminal_language(option: str | None) -> str:
    """Return the language that `--lang` names, else that of the locale; English, with a note, if
    the encoding of stdout has no Chinese characters.
    """
    locale = next(filter(None, map(os.environ.get, LOCALE_NAMES)), "")
    language = option or ("zh" if locale.lower().startswith("zh") else "en")
    if language == "en":
        return language
    encoding = sys.stdout.encoding or "utf-8"
    try:
        SAMPLE.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        fact = f"headwise: the encoding of stdout, {encoding}, has no Chinese characters"
        print_note(f"{fact}, so texts are in English; set PYTHONIOENCODING=utf-8")
        return "en"
    return language


def existing_mode(args: Any) -> Existing:
    """How `check_output` treats an earlier output, by --overwrite."""
    return "overwrite" if args.overwrite else "refuse"


def parse_spec(args: Any) -> AttentionSpec:
    """Return the spec named by SPEC or --preset, after every --set."""
    if (args.spec is None) == (args.preset is None):
        raise UsageError(
            "give exactly one spec: a .toml or .json file, or --preset NAME with one of "
            + ", ".join(PRESETS)
        )
    sizes = {name: size for name in ("model", "heads") if (size := getattr(args, name)) is not None}
    spec = (
        _preset_spec(args.preset, sizes)
        if args.preset is not None
        else load_named_spec(args.spec, sizes)
    )
    return apply_changes(spec, args.changes)


def apply_changes(spec: AttentionSpec, changes: Sequence[str]) -> AttentionSpec:
    """Return the spec after `changes`, each as KEY=VALUE."""
    from ..spec import serialization

    return (
        serialization.from_dict(apply_changes_to_dict(serialization.to_dict(spec), changes))
        if changes
        else spec
    )


def apply_changes_to_dict(table: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Apply `changes`, each as KEY=VALUE, to a spec as plain values; changes
    and returns `table`.
    """
    for change in changes:
        _apply_change(table, change)
    return table


def _preset_spec(name: str, sizes: Mapping[str, int]) -> AttentionSpec:
    from ..presets import design

    return design(preset=name, **sizes)


def load_named_spec(name: str, sizes: Mapping[str, int]) -> AttentionSpec:
    """Return the preset of this name, in these sizes if there are any, or the spec in the file of
    this name.
    """
    if name in PRESETS:
        return _preset_spec(name, sizes)
    if sizes:
        size, value = next(iter(sizes.items()))
        key = {"heads": "heads.q"}.get(size, size)
        raise UsageError(
            f"--{size} is for presets, and {name} has its own {size}; change it with --set, as in "
            f"--set {key}={value}"
        )
    path = Path(name)
    if name != "-" and not path.exists():
        from ..families.published_models import PUBLISHED_MODELS

        if name in PUBLISHED_MODELS:
            raise UsageError(
                f"{name} is a whole model, and one layer is needed; give a .toml or .json file, "
                "or a preset"
            )
        is_path = bool(path.suffix) or len(path.parts) > 1
        fact = (
            f"there is no file {name!r}"
            if is_path
            else f"there is no preset, file or folder {name!r}"
        )
        names = [*PRESETS, *PUBLISHED_MODELS]
        raise UsageError(
            f"{fact}; {'give a .toml or .json file, or a preset' if is_path else suggest(name, names)}"
        )
    return parse_spec_text(name, read_text(name))


def parse_spec_text(name: str, text: str) -> AttentionSpec:
    """Parse a spec from TOML or JSON; `name` is the file it came from, for messages."""
    from ..presets import from_json, from_toml

    json = name.endswith(".json") or text.lstrip().startswith("{")
    return (from_json if json else from_toml)(text)


def read_text(name: str) -> str:
    """Return the text of a file, or of stdin for "-"."""
    try:
        raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if name == "-" else _read_bytes(Path(name))
        text = raw.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name!r} is not a text file; give a .toml or .json file") from None
    if len(raw) > MAX_FILE_BYTES or "\0" in text:
        raise UsageError(
            f"{name!r} is too long or not text; give a .toml or .json file that describes one spec"
        )
    return text


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise UsageError(f"{str(path)!r} is a folder; give a .toml or .json file in it") from None
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be read: {error.strerror}; give a .toml or .json file"
        ) from None


def _apply_change(table: dict[str, Any], change: str) -> None:
    """Set KEY=VALUE in a spec as plain values."""
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {change!r} is not KEY=VALUE; write it as in --set heads.kv=4")
    parent: Any = table
    for n, key in enumerate(keys[:-1]):
        parent = _enter_key(parent, key, ".".join(keys[: n + 1]))
    if isinstance(parent, list):
        _enter_key(parent, keys[-1], path)
        parent[int(keys[-1])] = parse_value(text)
    elif isinstance(parent, dict):
        parent[keys[-1]] = parse_value(text)
    else:
        raise UsageError(
            f"--set {change!r}: {'.'.join(keys[:-1])} is {parent!r} without a field {keys[-1]!r}; "
            "set the parent"
        )


def _enter_key(parent: Any, key: str, path: str) -> Any:
    if isinstance(parent, dict) and key in parent:
        return parent[key]
    if isinstance(parent, list) and key.isdecimal() and int(key) < len(parent):
        return parent[int(key)]
    field_names = (
        list(parent)
        if isinstance(parent, dict)
        else [str(n) for n in range(len(parent))]
        if isinstance(parent, list)
        else []
    )
    raise UsageError(
        f"--set: the spec has no {path!r}; "
        f"{suggest(key, field_names) if field_names else 'set its parent instead'}"
    )


def parse_value(text: str) -> Any:
    """Parse a TOML value (number, list, table, string); anything else is returned as a string,
    except tables.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text.lstrip().startswith(("{", "[{")):
            example = "--set 'modifiers=[{part = \"Rotary\"}]'"
            raise UsageError(
                f"{text.strip()} is no TOML value; quote it so that its quotes stay, as in "
                f"{example}"
            ) from None
        return text.strip()


BYTE_UNITS = {"b": 1} | {f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", 1)}
BYTE_UNITS |= {f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)}


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as "80 GB" or "5.38 GiB".

    >>> parse_bytes("80 GB"), parse_bytes("1.5GiB")
    (80000000000, 1610612736)
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    if not match:
        raise UsageError(f"cannot read {text!r} as bytes; write it as in '80 GB' or '5.38 GiB'")
    unit = match[2].lower() or "b"
    if unit not in BYTE_UNITS:
        raise UsageError(f"{text!r} has the unknown unit {match[2]!r}; {suggest(unit, BYTE_UNITS)}")
    count = int(Fraction(match[1]) * BYTE_UNITS[unit])
    if not 1 <= count <= 2**62:
        raise UsageError(f"memory must be from 1 to 2^62 bytes, got {text!r}")
    return count


def parse_assignments(changes: Sequence[str], example: str) -> dict[str, Any]:
    """Return the keys and values of `--set`, each as KEY=VALUE."""
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {change!r} is not KEY=VALUE; write it as in {example}")
        values[key.strip()] = parse_value(text)
    return values


def to_json(data: Any) -> str:
    """Serialise to JSON in ASCII, so that any output encoding can carry it."""
    return json.dumps(data, indent=2)


# --- Specs and models named on the command line ---------------------------------------------------

MAX_CONFIG_BYTES = 2**24  # largest config.json that is read: some list 21,000 class names, twice


def resolve_target(
    name: str, sizes: Mapping[str, int], changes: Sequence[str]
) -> AttentionSpec | ModelSpec:
    """Return the preset, or the spec or model that a file or folder describes, after `changes`.

    `sizes` apply to presets only. For a model, `changes` apply to its ModelSpec as plain values.
    """
    from ..spec.attention_spec import AttentionSpec

    target = _load_target(name, sizes)
    if isinstance(target, AttentionSpec):
        return apply_changes(target, changes)
    if not changes:
        return target
    from .. import model_spec

    return model_spec.from_dict(apply_changes_to_dict(model_spec.to_dict(target), changes))


def short_name(name: str) -> str:
    """Return a short label of a target: the stem of its path, and for a config.json the name of its
    folder.
    """
    path = Path(name)
    if name in PRESETS or name == "-":
        return name
    return (
        path.resolve().parent.name if path.name == "config.json" else path.resolve().stem
    ) or name


def list_spec_keys(target: AttentionSpec | ModelSpec) -> Iterator[str]:
    """Yield every key of a spec that --set accepts, such as "project.overlap"."""
    from ..spec.attention_spec import SLOTS, AttentionSpec

    if isinstance(target, AttentionSpec):
        parts = {"heads": target.heads} | {
            slot: getattr(target, slot) for slot in SLOTS if slot != "pattern"
        }
        parts |= {f"modifiers.{n}": modifier for n, modifier in enumerate(target.modifiers)}
        yield from (
            f"{name}.{field.name}" for name, part in parts.items() for field in fields(part)
        )


def _load_target(name: str, sizes: Mapping[str, int]) -> AttentionSpec | ModelSpec:
    is_published = is_published_model(Path(name))
    if not is_published and (name in PRESETS or (name != "-" and not Path(name).exists())):
        return load_named_spec(name, sizes)
    text = (
        ""
        if is_published or Path(name).is_dir()
        else read_text(name)
        if name == "-"
        else _read_file_start(Path(name))
    )
    model = _load_model(name, text)
    if model is None:
        return (
            parse_spec_text(name, text)
            if name == "-" and not sizes
            else load_named_spec(name, sizes)
        )
    if sizes:
        raise UsageError(
            f"--{next(iter(sizes))} is for presets, and {name} is a model with its own sizes; "
            "leave it out"
        )
    return model


def _load_model(name: str, text: str) -> ModelSpec | None:
    """Return the model that a folder or a text describes, or None if it
    describes a single layer.
    """
    from .. import families, model_spec
    from ..presets import DEFAULT_CHOICES

    table = _parse_table(text)
    if "stacks" in table:
        return model_spec.from_dict(table, DEFAULT_CHOICES)
    is_config = text.lstrip().startswith("{") and not _has_spec_keys(table)
    if (
        is_config
        or Path(name).is_dir()
        or Path(name).name == "config.json"
        or is_published_model(Path(name))
    ):
        return families.read_model_spec(table if name == "-" else name)
    return None


def _read_file_start(path: Path) -> str:
    """Return the start of a file as text; `load_named_spec` reports files that are too long or not
    text.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be read: {error.strerror}; give a .toml or .json file"
        ) from None


def _parse_table(text: str) -> Mapping[str, Any]:
    """Parse JSON or TOML into a table; empty if the text is neither."""
    try:
        table = (json.loads if text.lstrip().startswith("{") else tomllib.loads)(text)
    except (ValueError, RecursionError):  # the spec parser reports the error
        return {}
    return table if isinstance(table, dict) else {}


def _has_spec_keys(table: Mapping[str, Any]) -> bool:
    """Whether a JSON table is a spec and not a config.json; a table without
    keys counts as a spec.
    """
    return not table or "heads" in table or ("model" in table and "model_type" not in table)


# --- Whole models: `headwise spec MODEL` ----------------------------------------------------------

MODEL_KEYS = {
    ".json": ("model_type", "architectures"),
    ".toml": ("stacks", "format"),
}  # keys that only models have


def load_model_description(name: str | None) -> ModelSpec | None:
    """Return the model that a folder, config.json, TOML file or published name describes; None for
    anything else.
    """
    path = Path(name or "-")
    if (
        not is_published_model(path)
        and not path.is_dir()
        and not set(read_description_keys(path)) & set(MODEL_KEYS.get(path.suffix, ()))
    ):
        return None
    from ..families import read_model_spec

    return read_model_spec(path)


def is_published_model(path: Path) -> bool:
    """Whether a name is that of a published model, and not of a preset, file or folder."""
    if path.exists() or path.name != str(path) or path.name in PRESETS:
        return False
    from ..families.published_models import PUBLISHED_MODELS

    return path.name in PUBLISHED_MODELS


def is_manifest_or_config(path: Path) -> bool:
    """Whether a file describes the model whose weights are beside it."""
    return bool(set(read_description_keys(path)) & {"format", *MODEL_KEYS[".json"]})


def read_description_keys(path: Path) -> dict[str, Any]:
    """Return the table in a JSON or TOML file; empty if it cannot be read (the spec parser reports
    why).
    """
    if path.suffix not in MODEL_KEYS or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def format_model_page(model: ModelSpec, args: Any) -> str:
    """Format a model in the requested form: as TOML, as JSON, or as a table of its tensors."""
    from ..model_spec import ModelTable, to_dict, to_toml

    args.refuse_changes("change the file")
    if args.toml:
        return to_toml(model).rstrip()
    return (
        to_json({"model": to_dict(model), "table": ModelTable(model).to_dict})
        if args.json
        else str(ModelTable(model))
    )
