"""Options of a command as one frozen dataclass that generates its command line.

The docstring of a class is the help of its command: a description, a line `--flag VALUE meaning`
for every field (continued below, further in), and examples. Fields have types and defaults. A field
`top_k` is the option `--top-k`. Options below a heading are for experts: only `--help-all` shows
them. Types and `choices` are checked when an object is created.

>>> @options
... class Example(Options):
...     '''Say what the options are.
...
...     --top-k K  sample from the K likeliest
...     --kind KIND  one or two
...     '''
...
...     command = "example"
...     choices = {"kind": "one two"}
...     top_k: Count | None = None
...     kind: str = "one"
>>> Example.parse(["--top-k", "3"]).top_k
3
>>> Example(top_k=0)
Traceback (most recent call last):
headwise.cli.options.UsageError: --top-k 0 is out of range; give 1 or more
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache, partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, dataclass_transform

from ..report.text import TERMINAL_WIDTH, wrap
from ..util.errors import suggest
from ..util.output_paths import Existing, check_output

HELP_COLUMN = 24  # column in which the explanations start
LIST_OPTIONS = "--list-options"  # for scripts of completion; no help text names it
LAST_FIELDS = (
    "tokenizer",
    "device",
    "dtype",
    "json",
)  # options of many commands, which end the list of a help
PART_FILES = "part_files"  # where the parser keeps --import until it has imported the files
IMPORT_LINES = """
parts of your own:
--import FILE.py  run this Python file first, which defines parts that specs and models use;
    repeatable
"""

# Types of fields; each refuses some values (`NUMBERS` and `CHECKS`).
Count = AtLeastTwo = Natural = int
Positive = Share = NotNegative = float
InputFile = ModelFolder = TokenizerFile = str
TokenCount = int  # also written as 8k, which is 8192
InputFiles = Words = tuple[str, ...]  # several words after one option; other tuples are repeatable


class UsageError(ValueError):
    """Invalid arguments or input; printed as one line, exit code 2."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(cls: type) -> Any:
    """Make an options class a frozen dataclass with keyword-only arguments."""
    return dataclass(frozen=True, kw_only=True)(cls)


@options
class Options:
    """Base class for command options. Its tables refer to fields.

    `names`: fields with another option name. `choices`: names that a field accepts. `needs`: fields
    required by another field. `excludes`: mutually exclusive fields. `outputs`: the kind of file or
    folder to write. "module:NAME" is a constant of headwise.
    """

    command: ClassVar[str]
    names: ClassVar[Mapping[str, str]] = {}
    choices: ClassVar[Mapping[str, str]] = {}
    needs: ClassVar[Mapping[str, str]] = {}
    excludes: ClassVar[Sequence[str]] = ()
    outputs: ClassVar[Mapping[str, str]] = {}
    imports_parts: ClassVar[bool] = True  # False if the command reads no spec or model of the user

    def __post_init__(self) -> None:
        set_options = self.options_set
        for each in fields(self):
            if each.name in set_options:
                flag = set_options[each.name]
                value = getattr(self, each.name)
                choices = _collect(type(self), "choices").get(each.name, "").split()
                for item in value if isinstance(value, tuple) else (value,):
                    if item is not None:
                        check_value(_kind(each), flag, item)
                    if item is not None and choices:
                        check_choice(flag, item, choices)
        for name, needed in _collect(type(self), "needs").items():
            for other in needed.split() if name in set_options else ():
                self.require(name, other)
        for names in self.excludes:
            flags = [set_options[name] for name in names.split() if name in set_options]
            if len(flags) > 1:
                raise UsageError(f"{flags[0]} and {flags[1]} exclude each other; leave one out")
        self.check()
        for name, kind in _collect(type(self), "outputs").items():
            if name in set_options:
                check_output(getattr(self, name), look_up(kind), self.existing)

    def check(self) -> None:
        """Refuse incompatible options."""

    def require(self, name: str, other: str) -> None:
        """Refuse a field that needs another field."""
        if other not in self.options_set:
            entries = help_entries(type(self))
            flag = entries[name].flag
            needed = entries[other]
            remedy = f"add {needed.flag} {needed.metavar}".rstrip()
            raise UsageError(f"{flag} needs {needed.flag}; {remedy}, or leave {flag} out")

    @property
    def options_set(self) -> dict[str, str]:
        """Return the options that differ from their defaults, as {field: option}."""
        flags = help_entries(type(self))
        return {
            each.name: flags[each.name].flag
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }

    @property
    def existing(self) -> Existing:
        """How to treat earlier output; commands without --overwrite continue it."""
        overwrite = vars(self).get("overwrite")
        if overwrite is None:
            return "continue"
        return "overwrite" if overwrite else "refuse"

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Parse command-line words into options."""
        return cls(**vars(CommandParser(cls).parse_args(argv)))


def _collect(cls: type[Options], name: str) -> dict[str, str]:
    """Merge the tables with this name from a class and its bases."""
    table: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        table |= vars(base).get(name, {})
    return table


# --- Help texts -----------------------------------------------------------------------------------


class HelpEntry(NamedTuple):
    """Help text of an option, read from a docstring: `--flag METAVAR  text`, below a heading or
    "".
    """

    flag: str
    metavar: str
    text: str
    group: str


@cache
def help_entries(cls: type[Options]) -> dict[str, HelpEntry]:
    """Return the entries of a class and its bases, by field."""
    names = _collect(cls, "names")
    entries: dict[str, HelpEntry] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, Options):
            continue
        for entry in parse_entries(_docstring_parts(base)[1]):
            name = entry.flag.lstrip("-").lower().replace("-", "_")
            entries[names.get(entry.flag, name)] = entry
    return entries


def _docstring_parts(cls: type) -> tuple[str, str, list[str]]:
    """Split a docstring into description, option lines, and examples."""
    text, _, examples = (inspect.cleandoc(cls.__doc__ or "")).partition("\n\nexamples:\n")
    description, _, lines = text.partition("\n\n")
    return " ".join(description.split()), lines, examples.splitlines()


def parse_entries(text: str) -> list[HelpEntry]:
    """Parse the entries in docstring lines.

    >>> parse_entries("--a N  one\\n    two\\n\\nmore:\\n--b  three")[1]
    HelpEntry(flag='--b', metavar='', text='three', group='more')
    """
    entries: list[HelpEntry] = []
    group = ""
    for line in text.splitlines():
        if line.startswith(" "):
            last = entries[-1]
            entries[-1] = last._replace(text=f"{last.text} {line.strip()}")
        elif line.endswith(":") and "  " not in line:
            group = line[:-1]
        elif line:
            term, _, help_text = line.partition("  ")
            flag, _, metavar = term.partition(" ")
            entries.append(HelpEntry(flag, metavar, help_text.strip(), group))
    return entries


# --- Checks of one value --------------------------------------------------------------------------


def parse_tokens(word: str) -> int:
    """Return a number of tokens; k is 1024.

    >>> parse_tokens("8k"), parse_tokens("100")
    (8192, 100)
    """
    return int(word[:-1]) * 1024 if word[-1:] in ("k", "K") else int(word)


class NumberKind(NamedTuple):
    """Kind of number that an option accepts: parser, test, and description."""

    parse: Callable[[str], int | float]
    accepts: Callable[[float], bool]
    text: str


NUMBERS: Mapping[str, NumberKind] = {
    "int": NumberKind(int, lambda value: True, ""),
    "Count": NumberKind(int, lambda value: value >= 1, "1 or more"),
    "TokenCount": NumberKind(parse_tokens, lambda value: True, ""),
    "AtLeastTwo": NumberKind(int, lambda value: value >= 2, "2 or more"),
    "Natural": NumberKind(int, lambda value: value >= 0, "0 or more"),
    "float": NumberKind(float, lambda value: True, ""),
    "NotNegative": NumberKind(float, lambda value: 0 <= value < math.inf, "0 or more"),
    "Positive": NumberKind(float, lambda value: 0 < value < math.inf, "a number above 0"),
    "Share": NumberKind(float, lambda value: 0 < value <= 1, "a number above 0, and at most 1"),
}
CHECKS = {  # functions of `arguments`, which imports this module
    "InputFile": "check_input_file",
    "InputFiles": "check_input_file",
    "ModelFolder": "check_model_path",
    "TokenizerFile": "check_tokenizer",
}


def check_value(kind: str, flag: str, value: Any) -> None:
    """Raise UsageError for a value that this kind of option does not accept."""
    if kind in CHECKS:
        look_up(f"cli.arguments:{CHECKS[kind]}")(flag, value)
    elif kind in NUMBERS and not NUMBERS[kind].accepts(value):
        raise UsageError(f"{flag} {value:g} is out of range; give {NUMBERS[kind].text}")


def check_choice(flag: str, value: str, names: Sequence[str]) -> None:
    """Refuse an unknown name and suggest the most similar one. "module:NAMES" refers to a constant
    with names.
    """
    choices: list[str] = []
    for name in names:
        choices += look_up(name) if ":" in name else [name]
    if value not in choices:
        raise UsageError(f"{flag} {value!r} is unknown; {suggest(value, choices)}")


def look_up(name: str) -> Any:
    """Return the constant "module:NAME" of headwise."""
    module, _, constant = name.partition(":")
    return getattr(import_module(f"headwise.{module}"), constant)


# --- The parser -----------------------------------------------------------------------------------


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs in ("+", "*") and isinstance(action.metavar, str):
            return f"{action.metavar} ..."
        return super()._format_args(action, default_metavar)


class CommandParser(argparse.ArgumentParser):
    """Parser for the options of one command. Errors are raised as `UsageError`.

    Without `expert`, it has only the everyday options of `--help`.
    """

    def __init__(self, options: type[Options], *, expert: bool = True) -> None:
        description, _, examples = _docstring_parts(options)
        super().__init__(
            prog=f"headwise {options.command}",
            description="\n".join(wrap(description, TERMINAL_WIDTH - 2)),
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=_HelpFormatter,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.options = options
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action="store_true", help="show this help")
        if expert:
            help_all = "show this help with all options"
            self.add_argument("--help-all", action="store_true", help=help_all)
        entries = help_entries(options)
        groups: dict[str, Any] = {"": self}
        last = {name: number for number, name in enumerate(LAST_FIELDS)}
        for each in sorted(fields(options), key=lambda each: last.get(each.name, -1)):
            entry = entries[each.name]
            if expert or not entry.group:
                if entry.group not in groups:
                    groups[entry.group] = self.add_argument_group(entry.group)
                _add_field(groups[entry.group], each, entry)
        if options.imports_parts and expert:
            (entry,) = parse_entries(IMPORT_LINES)
            self.add_argument_group(entry.group).add_argument(
                entry.flag,
                dest=PART_FILES,
                action="append",
                metavar=entry.metavar,
                help=entry.text,
            )
        forms = {None: "{}", "?": "[{}]", "*": "[{} ...]"}
        words = [
            forms[action.nargs].format(action.metavar) for action in self._get_positional_actions()
        ]
        required = [action for action in self._get_optional_actions() if action.required]
        words += [self._with_metavar(action.option_strings[-1]) for action in required]
        self.usage = " ".join([self.prog, *words, "[OPTIONS]"])

    def format_everyday_help(self) -> str:
        """Return the help with everyday options; its last line names `--help-all`."""
        parser = CommandParser(self.options, expert=False)
        count = len(self._actions) - len(parser._actions) - 1  # --help-all is one of them
        more = f"{count} more option{'s' * (count > 1)}" if count else "every option"
        return f"{parser.format_help()}\n{self.prog} --help-all lists {more}\n"

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse the arguments. Raises `UsageError` for an unknown option, with the most similar
        one.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.reject_unknown(unknown)
        return parsed

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse the arguments, import the files of `--import`, and return known and unknown
        arguments.
        """
        words = list(args or ())
        if words == [LIST_OPTIONS]:
            print("\n".join(name for action in self._actions for name in action.option_strings))
            self.exit()
        before = words[: words.index("--")] if "--" in words else words
        for word in before:
            if word in ("-h", "--help", "--help-all"):
                is_all = word == "--help-all"
                print(self.format_help() if is_all else self.format_everyday_help(), end="")
                self.exit()
        parsed, unknown = super().parse_known_args(words, namespace)
        for name, value in vars(parsed).items():
            if isinstance(value, list) and name != PART_FILES:
                setattr(parsed, name, tuple(value))
        for name in vars(parsed).pop(PART_FILES, []):
            from ..attention import parts  # noqa: F401 - registers our own parts before others
            from ..attention.interfaces.part import import_part_file

            import_part_file(name)
        return parsed, unknown

    def reject_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Raise `UsageError` for unknown arguments."""
        option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        names = [name for action in self._actions for name in action.option_strings]
        if option is None:
            remedy = "leave it out, or quote a value with spaces"
            if "--text" in names:
                remedy = f"leave it out, or give a text as --text {unknown[0]!r}"
            self.error(f"unexpected argument {unknown[0]!r}; {remedy}")
        hint = suggest(option, names)
        is_similar = hint.startswith("did you mean")
        self.error(f"there is no option {option}" + (f"; {hint}" if is_similar else ""))

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` for an argparse error: the option, the fault, a remedy."""
        required = "the following arguments are required: "
        if message.startswith(required):
            names = message.removeprefix(required).split(", ")
            listed = ", ".join(map(self._with_metavar, names))
            message = f"missing {listed}; add {'it' if len(names) == 1 else 'them'}"
        elif match := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL):
            message = self._describe_fault(match[1].split("/")[-1], match[2])
        joint = " See" if message.endswith("?") else "; see"
        raise UsageError(f"{message}{joint} {self.prog} --help")

    def _describe_fault(self, option: str, fault: str) -> str:
        if fault.startswith("expected"):
            return f"{option} needs a value; write {self._with_metavar(option)}"
        if match := re.fullmatch(r"ignored explicit argument (.*)", fault, re.DOTALL):
            return f"{option} takes no value, got {match[1]}; leave the value out"
        return f"{option} {fault}"

    def _with_metavar(self, name: str) -> str:
        """Return an option with its value, as in "--out DIR"; a positional argument unchanged."""
        action = next((action for action in self._actions if name in action.option_strings), None)
        if action is None:
            return name
        metavar = action.metavar or ""
        return f"{name} {metavar if isinstance(metavar, str) else ' '.join(metavar)}"


def _kind(each: Field[Any]) -> str:
    """Return the name of the type of a field, without None."""
    return str(each.type).removesuffix(" | None")


def _add_field(group: Any, each: Field[Any], entry: HelpEntry) -> None:
    """Add the option or argument of a field to a parser or one of its groups."""
    kind = _kind(each)
    is_off = each.default is False or each.default in (None, "", (), MISSING)
    text = entry.text.replace("%", "%%")
    if not is_off and "(default:" not in text:
        text = f"{text} (default: {each.default})"
    is_required = each.default is MISSING
    if kind == "bool":
        group.add_argument(entry.flag, dest=each.name, action="store_true", help=text)
        return
    if not entry.flag.startswith("-"):
        nargs = "*" if kind.startswith("tuple") else None if is_required else "?"
        group.add_argument(each.name, metavar=entry.flag, help=text, nargs=nargs)
        return
    words = tuple(entry.metavar.split())
    settings: dict[str, Any] = {"metavar": words[0] if len(words) == 1 else words}
    if kind in ("Words", "InputFiles"):
        settings["nargs"] = len(words) if len(words) > 1 else "+"
    elif kind.startswith("tuple"):
        settings["action"] = "append"
    elif entry.metavar.startswith("["):  # [SIDE=both]: the option alone means both
        metavar, _, const = entry.metavar.strip("[]").partition("=")
        settings |= {"metavar": metavar, "nargs": "?", "const": const}
    settings["type"] = partial(_parse_number, NUMBERS[kind].parse) if kind in NUMBERS else str
    group.add_argument(entry.flag, dest=each.name, help=text, required=is_required, **settings)


def _parse_number(kind: Callable[[str], int | float], word: str) -> int | float:
    try:
        return kind(word)
    except ValueError:
        expected = "a number" if kind is float else "a whole number"
        raise argparse.ArgumentTypeError(f"needs {expected}, got {word!r}") from None
