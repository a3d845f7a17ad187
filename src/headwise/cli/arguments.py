"""What every verb shares: arguments, one spec from a file or a name, and what a terminal can show."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import suggest

if TYPE_CHECKING:
    from ..model_spec import ModelSpec
    from ..spec.attention_spec import AttentionSpec

TERMINAL_WIDTH = 80
BAD_INPUT = 2  # what a command ends with that cannot be meant
# Known here by name, so that help needs no torch; a test holds it to headwise.presets.
PRESETS = [
    "mha",
    "gqa",
    "mqa",
    "mla",
    "moh",
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
PRESETS += ["longformer", "bigbird", "kha", "average"]
MAX_FILE_BYTES = 2**20  # bytes; a spec is a page of text, anything longer is something else
ASCII_FALLBACKS = str.maketrans("█▒·─–—×−→≤≥²…", "#+.---x-><>2.")


class UsageError(ValueError):
    """Something on the command line that cannot be meant."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, and whose help ends with an example."""

    def __init__(self, verb: str, what: str, example: str) -> None:
        super().__init__(
            prog=f"headwise {verb}",
            description=textwrap.fill(what, TERMINAL_WIDTH - 2),
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Hand the complaint on, to be said like every other."""
        raise UsageError(f"{message}; see {self.prog} --help")


def prepare_output() -> None:
    """Let a terminal without our signs show others, instead of failing in the middle of a page."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_page(text: str) -> None:
    """Print a page, in signs that this output can carry."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(ASCII_FALLBACKS)
    print(text)


def supports_style() -> bool:
    """Whether bold and colours can be seen and are wanted."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def print_title(text: str) -> None:
    """Print a heading, in bold where that can be seen and is wanted, with an empty line after it."""
    print_page(f"\x1b[1m{text}\x1b[0m\n" if supports_style() else text + "\n")


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a verb be told of a spec."""
    parser.add_argument(
        "spec", nargs="?", metavar="SPEC", help="a .toml or .json file, the name of a preset, or - for stdin"
    )
    parser.add_argument("--preset", metavar="NAME", help="one of " + ", ".join(PRESETS))
    parser.add_argument("--model", type=int, metavar="WIDTH", help="the width of a preset's model")
    parser.add_argument("--heads", type=int, metavar="COUNT", help="how many heads a preset has")
    add_set_argument(parser)


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    """Let a verb be told to change what it was told of."""
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one thing, as in heads.kv=4, pattern='window(256)', modifiers.0.base=500000",
    )


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Let a verb be asked for JSON."""
    parser.add_argument("--json", action="store_true", help="one JSON document, and nothing else, on stdout")


def parse_spec(given: argparse.Namespace) -> AttentionSpec:
    """The spec that the command line names, changed as it says."""
    if (given.spec is None) == (given.preset is None):
        raise UsageError("name one spec: a .toml or .json file, or --preset NAME with one of " + ", ".join(PRESETS))
    sizes = {name: size for name in ("model", "heads") if (size := getattr(given, name)) is not None}
    spec = _preset_spec(given.preset, sizes) if given.preset is not None else load_named_spec(given.spec, sizes)
    return apply_changes(spec, given.changes)


def apply_changes(spec: AttentionSpec, changes: Sequence[str]) -> AttentionSpec:
    """The spec after every change, as KEY=VALUE."""
    from ..spec import serialization

    return serialization.from_dict(apply_changes_to_dict(serialization.to_dict(spec), changes)) if changes else spec


def apply_changes_to_dict(said: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A description as plain values after every change, as KEY=VALUE."""
    for change in changes:
        _apply_change(said, change)
    return said


def _preset_spec(name: str, sizes: Mapping[str, int]) -> AttentionSpec:
    from ..presets import design

    return design(preset=name, **sizes)


def load_named_spec(name: str, sizes: Mapping[str, int]) -> AttentionSpec:
    """A preset of this name, in these sizes if any are said, or what a file describes."""
    if name in PRESETS:
        return _preset_spec(name, sizes)
    if sizes:
        size, value = next(iter(sizes.items()))
        key = {"heads": "heads.q"}.get(size, size)
        raise UsageError(
            f"--{size} is for presets, and {name} says its own; change it with --set, as in --set {key}={value}"
        )
    path = Path(name)
    if name != "-" and not path.exists():
        looks = bool(path.suffix) or len(path.parts) > 1
        fact = f"there is no file {name!r}" if looks else f"there is no preset or file {name!r}"
        raise UsageError(f"{fact}; {'give a .toml or .json file, or a preset' if looks else suggest(name, PRESETS)}")
    return parse_spec_text(name, read_text(name))


def parse_spec_text(name: str, words: str) -> AttentionSpec:
    """The spec that a text describes; `name` says whose it is."""
    from ..presets import from_json, from_toml

    try:
        json = name.endswith(".json") or words.lstrip().startswith("{")
        return (from_json if json else from_toml)(words)
    except RecursionError:
        raise UsageError(f"{name!r} is nested too deeply to be a spec; print one with headwise spec --toml") from None


def read_text(name: str) -> str:
    """What a file says, or stdin."""
    try:
        raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if name == "-" else _read_bytes(Path(name))
        words = raw.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name!r} is no text; give a .toml or .json file") from None
    if len(raw) > MAX_FILE_BYTES or "\0" in words:
        raise UsageError(f"{name!r} is too long or no text; give a .toml or .json file that describes one spec")
    return words


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise UsageError(f"{str(path)!r} is a folder; give a .toml or .json file in it") from None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}; give a .toml or .json file") from None


def _apply_change(said: dict[str, Any], change: str) -> None:
    """Put one KEY=VALUE into a spec written as plain values."""
    path, equals, words = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {change!r} says nothing; write KEY=VALUE, as in --set heads.kv=4")
    inside: Any = said
    for n, key in enumerate(keys[:-1]):
        inside = _enter_key(inside, key, ".".join(keys[: n + 1]))
    if isinstance(inside, list):
        _enter_key(inside, keys[-1], path)
        inside[int(keys[-1])] = parse_value(words)
    elif isinstance(inside, dict):
        inside[keys[-1]] = parse_value(words)
    else:
        raise UsageError(
            f"--set {change!r}: {'.'.join(keys[:-1])} is {inside!r} and has no {keys[-1]!r}; set it as a whole"
        )


def _enter_key(holder: Any, key: str, path: str) -> Any:
    if isinstance(holder, dict) and key in holder:
        return holder[key]
    if isinstance(holder, list) and key.isdecimal() and int(key) < len(holder):
        return holder[int(key)]
    known = (
        list(holder)
        if isinstance(holder, dict)
        else [str(n) for n in range(len(holder))]
        if isinstance(holder, list)
        else []
    )
    raise UsageError(
        f"--set: the spec has no {path!r}; {suggest(key, known) if known else 'set what holds it as a whole'}"
    )


def parse_value(words: str) -> Any:
    """A number, a list or a table as TOML writes it; anything else is text."""
    try:
        return tomllib.loads(f"value = {words}")["value"]
    except tomllib.TOMLDecodeError:
        return words.strip()


def to_json(data: Any) -> str:
    """One JSON document; signs beyond ASCII are escaped, so that any output can carry it."""
    return json.dumps(data, indent=2)


# --- What a name on the command line stands for --------------------------------------------------------

MAX_CONFIG_BYTES = 2**24  # bytes of a config.json: some name the 21,000 classes of a classifier, twice


def resolve_target(name: str, sizes: Mapping[str, int], changes: Sequence[str]) -> AttentionSpec | ModelSpec:
    """The preset of this name, or what a file or a model's folder describes, after every change.

    `sizes` are for presets. Of a model it is the description that is changed, as `headwise.model_spec` writes it.
    """
    from ..spec.attention_spec import AttentionSpec

    found = _load_target(name, sizes)
    if isinstance(found, AttentionSpec):
        return apply_changes(found, changes)
    if not changes:
        return found
    from .. import model_spec

    return model_spec.from_dict(apply_changes_to_dict(model_spec.to_dict(found), changes))


def short_name(name: str) -> str:
    """A short name for what stands there: a config.json is known by its folder."""
    path = Path(name)
    if name in PRESETS or name == "-":
        return name
    return (path.resolve().parent.name if path.name == "config.json" else path.resolve().stem) or name


def list_spec_keys(found: AttentionSpec | ModelSpec) -> Iterator[str]:
    """Every key of a spec that can be set, "project.overlap"."""
    from ..spec.attention_spec import SLOTS, AttentionSpec

    if isinstance(found, AttentionSpec):
        holders = {"heads": found.heads} | {slot: getattr(found, slot) for slot in SLOTS if slot != "pattern"}
        holders |= {f"modifiers.{n}": modifier for n, modifier in enumerate(found.modifiers)}
        yield from (f"{name}.{field.name}" for name, holder in holders.items() for field in fields(holder))


def _load_target(name: str, sizes: Mapping[str, int]) -> AttentionSpec | ModelSpec:
    if name in PRESETS or (name != "-" and not Path(name).exists()):
        return load_named_spec(name, sizes)
    words = "" if Path(name).is_dir() else read_text(name) if name == "-" else _read_file_start(Path(name))
    model = _load_model(name, words)
    if model is None:
        return parse_spec_text(name, words) if name == "-" and not sizes else load_named_spec(name, sizes)
    if sizes:
        raise UsageError(
            f"--{next(iter(sizes))} is for presets, and {name} is a model with its own sizes; leave it out"
        )
    return model


def _load_model(name: str, words: str) -> ModelSpec | None:
    """The model that a folder or a text describes; None where it speaks of one layer."""
    from .. import families, model_spec
    from ..presets import DEFAULT_CHOICES

    table = _parse_table(words)
    if "stacks" in table:
        return model_spec.from_dict(table, DEFAULT_CHOICES)
    config = words.lstrip().startswith("{") and not _has_spec_keys(table)
    if config or Path(name).is_dir() or Path(name).name == "config.json":
        return families.read_model_spec(table if name == "-" else name)
    return None


def _read_file_start(path: Path) -> str:
    """The start of a file, as far as it is text: what is wrong with the rest its reader will say."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}; give a .toml or .json file") from None


def _parse_table(words: str) -> Mapping[str, Any]:
    """What a text says by keys; nothing where it is no such text."""
    try:
        said = (json.loads if words.lstrip().startswith("{") else tomllib.loads)(words)
    except (ValueError, RecursionError):  # its reader will say so
        return {}
    return said if isinstance(said, dict) else {}


def _has_spec_keys(table: Mapping[str, Any]) -> bool:
    """Whether these are keys of a spec and not of a config; a text without any may be either, but for a model's."""
    return not table or "heads" in table or ("model" in table and "model_type" not in table)


# --- A whole model on the command line -----------------------------------------------------------------

MODEL_KEYS = {".json": ("model_type", "architectures"), ".toml": ("stacks", "format")}  # keys that no spec has


def load_model_description(name: str | None) -> ModelSpec | None:
    """The model that this folder, config.json or TOML file describes; None of anything else."""
    path = Path(name or "-")
    if not path.is_dir() and not set(_read_keys(path)) & set(MODEL_KEYS.get(path.suffix, ())):
        return None
    from ..families import read_model_spec

    return read_model_spec(path)


def _read_keys(path: Path) -> dict[str, Any]:
    """The keys of a file, none of one that is something else: who reads specs will say what is wrong with it."""
    if path.suffix not in MODEL_KEYS or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        said = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def print_model_page(model: ModelSpec, given: argparse.Namespace) -> str:
    """What was asked of a model: its text, its table as a document, or its table."""
    from ..model_spec import ModelTable, to_dict, to_toml

    for option, value in (("--set", given.changes), ("--model", given.model), ("--heads", given.heads)):
        if value:
            raise UsageError(f"{option} is for one spec, and {given.spec} describes a whole model; change the file")
    if given.toml:
        return to_toml(model).rstrip()
    return (
        to_json({"model": to_dict(model), "table": ModelTable(model).to_dict}) if given.json else str(ModelTable(model))
    )
