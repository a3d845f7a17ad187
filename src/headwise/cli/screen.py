"""What every verb shares: arguments, one spec from a file or a name, and what a terminal can show."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import nearest

if TYPE_CHECKING:
    from ..spec import AttentionSpec

WIDTH = 80
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
LARGEST = 2**20  # bytes; a spec is a page of text, anything longer is something else
ASCII = str.maketrans("█▒·─–—×−→≤≥²…", "#+.---x-><>2.")


class Wrong(ValueError):
    """Something on the command line that cannot be meant."""


class Arguments(argparse.ArgumentParser):
    """A parser whose complaint is one line, and whose help ends with an example."""

    def __init__(self, verb: str, what: str, example: str) -> None:
        super().__init__(
            prog=f"headwise {verb}",
            description=textwrap.fill(what, WIDTH - 2),
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Hand the complaint on, to be said like every other."""
        raise Wrong(f"{message}; see {self.prog} --help")


def prepare() -> None:
    """Let a terminal without our signs show others, instead of failing in the middle of a page."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def show(text: str) -> None:
    """Print a page, in signs that this output can carry."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(ASCII)
    print(text)


def in_colour() -> bool:
    """Whether bold and colours can be seen and are wanted."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def title(text: str) -> None:
    """Print a heading, in bold where that can be seen and is wanted, with an empty line after it."""
    show(f"\x1b[1m{text}\x1b[0m\n" if in_colour() else text + "\n")


def take_spec(parser: argparse.ArgumentParser) -> None:
    """Let a verb be told of a spec."""
    parser.add_argument(
        "spec", nargs="?", metavar="SPEC", help="a .toml or .json file, the name of a preset, or - for stdin"
    )
    parser.add_argument("--preset", metavar="NAME", help="one of " + ", ".join(PRESETS))
    parser.add_argument("--model", type=int, metavar="WIDTH", help="the width of a preset's model")
    parser.add_argument("--heads", type=int, metavar="COUNT", help="how many heads a preset has")
    take_changes(parser)


def take_changes(parser: argparse.ArgumentParser) -> None:
    """Let a verb be told to change what it was told of."""
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE",
        help="change one thing, as in heads.kv=4, pattern='window(256)', modifiers.0.base=500000",
    )  # fmt: skip


def take_form(parser: argparse._ActionsContainer) -> None:
    """Let a verb be asked for JSON."""
    parser.add_argument("--json", action="store_true", help="one JSON document, and nothing else, on stdout")


def spec_of(given: argparse.Namespace) -> AttentionSpec:
    """The spec that the command line names, changed as it says."""
    if (given.spec is None) == (given.preset is None):
        raise Wrong("name one spec: a .toml or .json file, or --preset NAME with one of " + ", ".join(PRESETS))
    sizes = {name: size for name in ("model", "heads") if (size := getattr(given, name)) is not None}
    spec = _preset(given.preset, sizes) if given.preset is not None else named_spec(given.spec, sizes)
    return changed(spec, given.changes)


def changed(spec: AttentionSpec, changes: Sequence[str]) -> AttentionSpec:
    """The spec after every change, as KEY=VALUE."""
    from .. import text

    return text.from_dict(after(text.to_dict(spec), changes)) if changes else spec


def after(said: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A description as plain values after every change, as KEY=VALUE."""
    for change in changes:
        _change(said, change)
    return said


def _preset(name: str, sizes: Mapping[str, int]) -> AttentionSpec:
    from ..presets import design

    return design(preset=name, **sizes)


def named_spec(name: str, sizes: Mapping[str, int]) -> AttentionSpec:
    """A preset of this name, in these sizes if any are said, or what a file describes."""
    if name in PRESETS:
        return _preset(name, sizes)
    if sizes:
        size, value = next(iter(sizes.items()))
        key = {"heads": "heads.q"}.get(size, size)
        raise Wrong(
            f"--{size} is for presets, and {name} says its own; change it with --set, as in --set {key}={value}"
        )
    path = Path(name)
    if name != "-" and not path.exists():
        looks = bool(path.suffix) or len(path.parts) > 1
        fact = f"there is no file {name!r}" if looks else f"there is no preset or file {name!r}"
        raise Wrong(f"{fact}; {'give a .toml or .json file, or a preset' if looks else nearest(name, PRESETS)}")
    return spec_of_words(name, words_of(name))


def spec_of_words(name: str, words: str) -> AttentionSpec:
    """The spec that a text describes; `name` says whose it is."""
    from ..presets import from_json, from_toml

    try:
        json = name.endswith(".json") or words.lstrip().startswith("{")
        return (from_json if json else from_toml)(words)
    except RecursionError:
        raise Wrong(f"{name!r} is nested too deeply to be a spec; print one with headwise spec --toml") from None


def words_of(name: str) -> str:
    """What a file says, or stdin."""
    try:
        raw = sys.stdin.buffer.read(LARGEST + 1) if name == "-" else _bytes(Path(name))
        words = raw.decode()
    except UnicodeDecodeError:
        raise Wrong(f"{name!r} is no text; give a .toml or .json file") from None
    if len(raw) > LARGEST or "\0" in words:
        raise Wrong(f"{name!r} is too long or no text; give a .toml or .json file that describes one spec")
    return words


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST + 1)
    except IsADirectoryError:
        raise Wrong(f"{str(path)!r} is a folder; give a .toml or .json file in it") from None
    except OSError as error:
        raise Wrong(f"{str(path)!r} cannot be read: {error.strerror}; give a .toml or .json file") from None


def _change(said: dict[str, Any], change: str) -> None:
    """Put one KEY=VALUE into a spec written as plain values."""
    path, equals, words = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise Wrong(f"--set {change!r} says nothing; write KEY=VALUE, as in --set heads.kv=4")
    inside: Any = said
    for n, key in enumerate(keys[:-1]):
        inside = _inside(inside, key, ".".join(keys[: n + 1]))
    if isinstance(inside, list):
        _inside(inside, keys[-1], path)
        inside[int(keys[-1])] = value_of(words)
    elif isinstance(inside, dict):
        inside[keys[-1]] = value_of(words)
    else:
        raise Wrong(f"--set {change!r}: {'.'.join(keys[:-1])} is {inside!r} and has no {keys[-1]!r}; set it as a whole")


def _inside(holder: Any, key: str, path: str) -> Any:
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
    raise Wrong(f"--set: the spec has no {path!r}; {nearest(key, known) if known else 'set what holds it as a whole'}")


def value_of(words: str) -> Any:
    """A number, a list or a table as TOML writes it; anything else is text."""
    try:
        return tomllib.loads(f"value = {words}")["value"]
    except tomllib.TOMLDecodeError:
        return words.strip()


def document(data: Any) -> str:
    """One JSON document; signs beyond ASCII are escaped, so that any output can carry it."""
    return json.dumps(data, indent=2)
