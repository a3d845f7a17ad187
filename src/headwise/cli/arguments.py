"""Shared by all commands: output, and parsing of specs and models from the command line."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..learn.language import SAMPLE
from ..util.errors import suggest
from ..util.escaping import escape_page
from ..util.model_names import NAME_KINDS, is_gguf_file, label_model, parse_factory, parse_hub_id
from ..util.size_limits import MAX_CONFIG_BYTES
from .options import Options, TokenizerFile, UsageError, options

if TYPE_CHECKING:
    from torch import nn

    from ..attention.spec.attention_spec import AttentionSpec
    from ..costs.components import SpecOrModel
    from ..costs.counted_model import CountedModel
    from ..models.model_spec import ModelSpec

TargetT = TypeVar("TargetT")
BAD_INPUT = 2  # exit code for invalid arguments or input
# The names are repeated here so that --help need not import torch; a test compares them with
# headwise.attention.presets.
PRESET_NAMES = (
    "mha gqa mqa mla gla mlra gta tpa mfa mea iha moh moh_vit moa switchhead dcmha mohsa "
    "collaborative talking diff diff2 entmax linear performer longformer longformer_dilated "
    "streaming_retrieval bigbird kha gated sinks ssmax softpick stick_breaking forgetting "
    "selective cope mta average"
)
PRESETS = PRESET_NAMES.split()
DESCRIPTION_SUFFIXES = (".toml", ".json")  # specs and models without weights
MAX_FILE_BYTES = 2**20  # largest spec file that is read; a spec is about a page of text
LOCALE_NAMES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides
ASCII_FALLBACKS = str.maketrans("█▒·─–—×−→≤≥²…", "#+.---x-><>2.")


def print_page(text: str) -> None:
    """Print a page; on a terminal, control characters are shown as codes. Without UTF-8, lines
    become ASCII.
    """
    if sys.stdout.isatty():
        text = escape_page(text)
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(ASCII_FALLBACKS)
        if not text.isascii() and encoding not in _noted_encodings:
            _noted_encodings.add(encoding)
            print_note(
                f"headwise: characters that {encoding} does not have are shown as ?; set "
                "PYTHONIOENCODING=utf-8"
            )
    print(text)


_noted_encodings = set[str]()


def print_note(text: object) -> None:
    """Print text to stderr; on a terminal, control characters are shown as codes."""
    line = str(text)
    print(escape_page(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def supports_style() -> bool:
    """True if stdout is a terminal that shows bold and colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def print_title(text: str) -> None:
    """Print a heading and an empty line, in bold if the terminal supports it."""
    print_page(f"\x1b[1m{text}\x1b[0m\n" if supports_style() else text + "\n")


def print_result(args: Any, result: Any, data: Any = None) -> None:
    """Print a result as text, or with --json its data as one document."""
    if args.json:
        print_page(to_json(result.data if data is None else data))
    else:
        print_page(str(result))


def terminal_language(option: str | None) -> str:
    """Return the language of `--lang`, or else of the locale. Falls back to English, with a note,
    if stdout's encoding has no Chinese characters.
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


# --- Specs and models named on the command line ---------------------------------------------------


@options
class SpecOptions(Options):
    """Options that name a spec and change it.

    SPEC  a preset (mha, gqa, mqa, mla, gla, mlra, gta, tpa, mfa, mea, iha, moh, moh_vit, moa,
        switchhead, dcmha, mohsa, collaborative, talking, diff, diff2, entmax, linear, performer,
        longformer, longformer_dilated, streaming_retrieval, bigbird, kha, gated, sinks, ssmax,
        softpick, stick_breaking, forgetting, selective, cope, mta, average), a .toml, .json or
        .gguf file, a folder, a Hub id (org/name), or - for stdin
    --model WIDTH  model width of the preset
    --heads COUNT  number of query heads of the preset
    --set KEY=VALUE  change a field, as in heads.kv=4 or pattern='window(256)'; repeatable
    """

    names = {"--set": "changes"}
    spec: str
    model: int | None = None
    heads: int | None = None
    changes: tuple[str, ...] = ()

    def resolve(self) -> AttentionSpec | ModelSpec:
        """Return the spec or model named by SPEC, with its sizes and changes."""
        return resolve_target(self.spec, {"model": self.model, "heads": self.heads}, self.changes)


def resolve_target(
    name: str, sizes: Mapping[str, int | None], changes: Sequence[str]
) -> AttentionSpec | ModelSpec:
    """Return the preset, or the spec or model that a file or folder describes, after `changes`.

    `sizes` apply to presets only. `changes` apply to the spec or model as plain values.
    """
    from ..models import families

    return _resolve(name, sizes, changes, families.read_model_spec)


def resolve_cost_target(
    name: str,
    sizes: Mapping[str, int | None],
    changes: Sequence[str],
    spec_options: Sequence[str],
) -> SpecOrModel:
    """Return what `resolve_target` does, or a model that headwise has no reader for, unless options
    that need a spec were given.
    """

    def read_model(source: Any) -> ModelSpec | CountedModel:
        from ..hub.cost_targets import describe_model

        return describe_model(source, spec_options)

    return _resolve(name, sizes, changes, read_model)


def _resolve(
    name: str,
    sizes: Mapping[str, int | None],
    changes: Sequence[str],
    read_model: Callable[[Any], TargetT],
) -> AttentionSpec | ModelSpec | TargetT:
    from ..attention.spec import attention_spec, serialization
    from ..attention.spec.attention_spec import AttentionSpec
    from ..models import model_spec
    from ..models.model_spec import ModelSpec

    chosen_sizes = {size: number for size, number in sizes.items() if number is not None}
    target = _load_target(name, chosen_sizes, read_model)
    if not changes:
        return target
    assert isinstance(target, AttentionSpec | ModelSpec)  # others have no changes
    is_layer = isinstance(target, AttentionSpec)
    table = serialization.to_dict(target) if is_layer else model_spec.to_dict(target)
    for change in changes:
        _apply_change(table, change)
    return attention_spec.from_dict(table) if is_layer else model_spec.from_dict(table)


def _load_target(
    name: str, sizes: Mapping[str, int], read_model: Callable[[Any], TargetT]
) -> AttentionSpec | ModelSpec | TargetT:
    from ..attention.presets import DEFAULT_CHOICES, design, from_json, from_toml
    from ..models import model_spec

    if name in PRESETS:
        return design(preset=name, **sizes)
    path = Path(name)
    is_gguf = is_gguf_file(path)
    is_folder = (
        is_gguf or is_published_model(path) or path.is_dir() or parse_hub_id(name) is not None
    )
    is_model = is_folder or path.name == "config.json"
    text = "" if is_model and path.name != "config.json" else _read_text(name)
    table = _parse_table(text)
    is_json = text.lstrip().startswith("{")
    is_spec = "heads" in table or ("model" in table and "model_type" not in table)
    is_model = is_model or "stacks" in table or (is_json and bool(table) and not is_spec)
    if sizes:
        size, value = next(iter(sizes.items()))
        key = {"heads": "heads.q"}.get(size, size)
        remedy = "leave it out" if is_model else f"change it with --set, as in --set {key}={value}"
        raise UsageError(f"--{size} is for presets, and {name} has its own {size}; {remedy}")
    if is_gguf:
        from ..hub.gguf_files import read_gguf_config

        return read_model(read_gguf_config(path))
    if "stacks" in table:
        return model_spec.from_dict(table, DEFAULT_CHOICES)
    if is_model:
        return read_model(table if name == "-" else name)
    return (from_json if is_json or name.endswith(".json") else from_toml)(text)


def _read_text(name: str) -> str:
    """Return the text of a file, or of stdin for "-"."""
    limit = MAX_CONFIG_BYTES if name.endswith(".json") else MAX_FILE_BYTES
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(limit + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(limit + 1)
        text = raw.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name!r} is not a text file; give a .toml or .json file") from None
    except FileNotFoundError:
        from ..models.families import PUBLISHED_MODELS

        if Path(name).suffix or len(Path(name).parts) > 1:
            fact = f"there is no file {name!r}; give a .toml or .json file, a preset, or a Hub id"
        else:
            suggestion = suggest(name, [*PRESETS, *PUBLISHED_MODELS])
            fact = f"there is no preset, file or folder {name!r}; {suggestion}"
        raise UsageError(fact) from None
    except OSError as error:
        fact = f"{name!r} cannot be read: {error.strerror}"
        raise UsageError(f"{fact}; give a .toml or .json file") from None
    if len(raw) > limit or "\0" in text:
        fact = f"{name!r} is too long or not text"
        raise UsageError(f"{fact}; give a .toml or .json file that describes one spec")
    return text


def _parse_table(text: str) -> dict[str, Any]:
    """Parse JSON or TOML into a table; empty if the text is neither (its parser reports that)."""
    try:
        table = (json.loads if text.lstrip().startswith("{") else tomllib.loads)(text)
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def read_description(path: Path) -> dict[str, Any]:
    """Return the table in a JSON or TOML file; empty if it cannot be read."""
    if path.suffix not in DESCRIPTION_SUFFIXES or not path.is_file():
        return {}
    try:
        return _parse_table(_read_text(str(path)))
    except UsageError:
        return {}


def is_published_model(path: Path) -> bool:
    """True if a name refers to a published model, not to a preset, file or folder."""
    if path.exists() or path.name != str(path) or path.name in PRESETS:
        return False
    from ..models.families import PUBLISHED_MODELS

    return path.name in PUBLISHED_MODELS


def short_name(name: str) -> str:
    """Return a short label of a target: the stem of its path, or the folder of a config.json."""
    path = Path(name).resolve()
    if name in PRESETS or name == "-":
        return name
    if parse_hub_id(name) is not None:
        return label_model(name)
    return (path.parent.name if path.name == "config.json" else path.stem) or name


# --- `--set KEY=VALUE` ----------------------------------------------------------------------------


def _apply_change(table: dict[str, Any], change: str) -> None:
    """Set KEY=VALUE in a spec as plain values."""
    path, equals, text = change.partition("=")
    *parents, last = path.strip().split(".")
    if not equals or not all([*parents, last]):
        raise UsageError(f"--set {change!r} is not KEY=VALUE; write it as in --set heads.kv=4")
    parent: Any = table
    for n, key in enumerate(parents):
        parent = parent[_find_key(parent, key, ".".join(parents[: n + 1]))]
    if isinstance(parent, dict):
        parent[last] = parse_value(text)
    elif isinstance(parent, list):
        parent[_find_key(parent, last, path)] = parse_value(text)
    else:
        fact = f"{'.'.join(parents)} is {parent!r} without a field {last!r}"
        raise UsageError(f"--set {change!r}: {fact}; set the parent")


def _find_key(parent: Any, key: str, path: str) -> Any:
    """Return the key or index of a table or list. Raises UsageError if it is missing."""
    keys = dict(parent) if isinstance(parent, dict) else {}
    if isinstance(parent, list):
        keys = {str(n): n for n in range(len(parent))}
    if key not in keys:
        remedy = suggest(key, keys) if keys else "set its parent instead"
        raise UsageError(f"--set: the spec has no {path!r}; {remedy}")
    return keys[key] if isinstance(parent, list) else key


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


CONFIG_FILE = "config.json"
MANIFEST_FILE = "headwise.toml"  # as in headwise.models.model_spec, which imports torch


def check_model_path(_: str, name: str) -> None:
    """Raise unless `name` is a folder with a model, a file that may hold one, or a Hub id; specs
    and presets have no weights.
    """
    path = Path(name)
    if path.is_dir():
        if not any((path / file).is_file() for file in (MANIFEST_FILE, CONFIG_FILE)):
            fact = f"{name} contains neither {MANIFEST_FILE} nor {CONFIG_FILE}"
            raise UsageError(f"{fact}; give a folder with a model")
        return
    remedy = f"train a model with it: headwise train TASK --model {name} --out DIR"
    if not path.exists():
        if name in PRESETS:
            raise UsageError(f"{name} is a preset, without weights; {remedy}")
        factory = parse_factory(name)
        if factory is not None:
            check_input_file("MODEL", str(factory.file))
        elif parse_hub_id(name) is None:
            raise UsageError(f"there is no folder or file {name!r}; give {NAME_KINDS}")
        return
    if path.suffix == ".py":
        raise UsageError(
            f"{name} is Python code, not a model; give a folder with a model, and parts by "
            f"--import {name}"
        )
    if path.suffix in DESCRIPTION_SUFFIXES:
        keys = read_description(path)
        if "heads" in keys or "stacks" in keys:
            what = "a model" if "stacks" in keys else "one attention layer"
            raise UsageError(f"{name} describes {what}, without weights; {remedy}")
        raise UsageError(f"{name} is no model; give the folder of one")


def check_input_file(option: str, name: str) -> None:
    """Raise unless a file of texts or settings exists and can be read."""
    path = Path(name)
    where = f" for {option}" if option.startswith("-") else ""  # else a positional argument
    if path.is_dir():
        raise UsageError(f"{option} {name} is a folder; give a file")
    if not path.exists():
        raise UsageError(f"there is no file {name!r}{where}; give one that exists")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{option} {name} cannot be read; give a file that you may read")
    if path.is_file() and not path.stat().st_size:
        raise UsageError(f"{option} {name} is empty; give a file with text")


def check_tokenizer(option: str, name: str) -> None:
    """Raise unless --tokenizer is a file or folder, a Hub id, or "bytes"."""
    if name != "bytes" and not Path(name).exists() and parse_hub_id(name) is None:
        remedy = "give a tokenizer.json or its folder, a Hub id, or bytes"
        raise UsageError(f"there is no file {name!r} for {option}; {remedy}")


def check_text_model(model: str, option: str, remedy: str) -> None:
    """Raise if a config.json shows that a model reads images, and `option` gives it text."""
    config = read_description(Path(model) / CONFIG_FILE)
    if "patch_size" in config and not {"vocab_size", "text_config"} & set(config):
        raise UsageError(f"{model} reads images, and {option} gives text; {remedy}")


# --- Device and number format of a model ----------------------------------------------------------

ModelT = TypeVar("ModelT")


@options
class DeviceOptions(Options):
    """Options for the device that a command computes on.

    --device NAME  auto, cpu, cuda, cuda:1, mps, ... (default: auto)
    """

    device: str | None = "auto"


@options
class LoadingOptions(DeviceOptions):
    """Options for the device and the number format of a model that is loaded.

    --dtype NAME  number format, such as bf16 (default: as saved)
    """

    choices = {"dtype": "kernels.devices:DTYPES"}
    dtype: str | None = None

    @property
    def loading(self) -> dict[str, Any]:
        """Return the arguments of `hw.load`; "auto" leaves a model where a function placed it."""
        return {"device": "auto" if self.device is None else self.device, "dtype": self.dtype}


@options
class TokenizerOptions(LoadingOptions):
    """Options for a model that reads texts.

    --tokenizer NAME  a file, folder, Hub id or bytes (default: the model's)
    """

    tokenizer: TokenizerFile | None = None


def attach_named_tokenizer(model: nn.Module, args: TokenizerOptions) -> nn.Module:
    """Attach the tokenizer of --tokenizer, and return the model; raise if it reads texts and has
    none.
    """
    from ..hub.transformers_loading import attach_tokenizer, has_tokenizer, takes_tokens

    if args.tokenizer is not None:
        attach_tokenizer(model, args.tokenizer)
    elif not vars(args).get("task") and takes_tokens(model) and not has_tokenizer(model):
        name = vars(args).get("model") or vars(args).get("target")
        raise UsageError(f"{name} has no tokenizer; give --tokenizer NAME, or --tokenizer bytes")
    return model


def load_on_device(load: Callable[..., ModelT], name: str, args: LoadingOptions) -> ModelT:
    """Load a model to the device and in the dtype of the options, and print where it runs."""
    from ..kernels.devices import Placement

    Placement.resolve(**args.loading)  # refuses a device that is not there before a download
    model = load(name, **args.loading)
    announce_placement(name, args)
    return model


def announce_placement(name: str, args: LoadingOptions) -> None:
    """Print where a model runs, unless it is the CPU and the dtype of its file. Raises SpecError if
    this machine lacks the device or the dtype.
    """
    from ..kernels.devices import AS_SAVED, Placement

    placement = Placement.resolve(**args.loading)
    if placement != AS_SAVED:
        print_note(f"headwise: {name} runs on {placement}")
