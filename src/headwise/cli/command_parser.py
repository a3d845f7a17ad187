"""The argument parser of all commands: help texts with everyday or all options, and errors that
name a remedy.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import suggest
from ..translation.terminal_text import TERMINAL_WIDTH, wrap
from .options import LIST_OPTIONS, PART_FILES, UsageError

HELP_COLUMN = 24  # column in which the explanations start
COMMANDS_WITHOUT_PARTS = ("demo", "learn")  # read no spec or model of the user
ONE_OR_MORE = (argparse.ONE_OR_MORE, argparse.ZERO_OR_MORE)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Appends `(default: X)` to the help of every option with a default, unless its text already
    has it.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.option_strings and action.nargs != 0
        if (
            not has_default
            or action.default in (None, "", [], argparse.SUPPRESS)
            or "(default:" in (action.help or "")
        ):
            return action.help or ""
        return f"{action.help or ''} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs in ONE_OR_MORE and isinstance(action.metavar, str):
            return f"{action.metavar} ..."
        return super()._format_args(action, default_metavar)


class _PrintHelp(argparse.Action):
    """Prints the help with everyday options, or with all options if `const` is true."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_help_all() if self.const else parser.format_help(), end="")
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """Argument parser of one command: `--help` shows the everyday options, `--help-all` also those
    of expert groups.

    Every command that reads specs or models has the option `--import`: its files are imported while
    arguments are parsed, so no command sees the option. Errors are raised as `UsageError`.
    """

    def __init__(self, command: str, description: str, *examples: str) -> None:
        super().__init__(
            prog=f"headwise {command}",
            description="\n".join(wrap(description, TERMINAL_WIDTH - 2)),
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=_HelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self._positionals.title = "arguments"
        self._expert_groups: list[argparse._ArgumentGroup] = []
        self.register("type", int, _number_parser(int, "a whole number"))
        self.register("type", float, _number_parser(float, "a number"))
        self.add_argument("-h", "--help", action=_PrintHelp, nargs=0, help="show this help")
        self.add_argument(
            "--help-all",
            action=_PrintHelp,
            nargs=0,
            const=True,
            help="show this help with all options",
        )
        if command not in COMMANDS_WITHOUT_PARTS:
            self._add_import_argument()

    def add_expert_group(self, title: str) -> argparse._ArgumentGroup:
        """Add a group of options that only `--help-all` shows."""
        group = self.add_argument_group(title)
        self._expert_groups.append(group)
        return group

    def _add_import_argument(self) -> None:
        self.add_expert_group("parts of your own").add_argument(
            "--import",
            dest=PART_FILES,
            action="append",
            default=argparse.SUPPRESS,
            metavar="FILE.py",
            help=(
                "run this Python file first, which defines parts that specs and models use; "
                "repeatable"
            ),
        )

    @property
    def expert_actions(self) -> list[argparse.Action]:
        """The options that only `--help-all` shows."""
        return [action for group in self._expert_groups for action in group._group_actions]

    def format_help(self) -> str:
        """Return the help with everyday options; its last line names `--help-all`."""
        hidden = [
            *self.expert_actions,
            *(action for action in self._actions if "--help-all" in action.option_strings),
        ]
        help_texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        text = self.format_help_all()
        for action, help_text in zip(hidden, help_texts, strict=True):
            action.help = help_text
        count = len(self.expert_actions)
        more = f"{count} more option{'s' * (count > 1)}" if count else "every option"
        return f"{text}\n{self.prog} --help-all lists {more}\n"

    def format_help_all(self) -> str:
        """Return the help with all options."""
        # The option of every command comes after those of this one.
        self._action_groups.sort(
            key=lambda group: any(action.dest == PART_FILES for action in group._group_actions)
        )
        self.usage = " ".join([self.prog.replace("%", "%%"), *self._required_words(), "[OPTIONS]"])
        return super().format_help()

    def _required_words(self) -> list[str]:
        """Return the positional arguments, and the options that must be given, as the usage line
        shows them.
        """
        forms = {None: "{}", argparse.OPTIONAL: "[{}]", argparse.ZERO_OR_MORE: "[{} ...]"}
        words = [
            forms[action.nargs].format(action.metavar) for action in self._get_positional_actions()
        ]
        required = [action for action in self._get_optional_actions() if action.required]
        return words + [self._with_metavar(action.option_strings[-1]) for action in required]

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse the arguments; raise `UsageError` for an option that does not exist, with the most
        similar one.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.reject_unknown(unknown)
        return parsed

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse the arguments, import the files of `--import`, and return the others with those
        that are unknown.
        """
        if args is not None and [*args] == [LIST_OPTIONS]:
            print("\n".join(name for action in self._actions for name in action.option_strings))
            self.exit()
        parsed, unknown = super().parse_known_args(args, namespace)
        for name in vars(parsed).pop(PART_FILES, []):
            from .. import parts  # noqa: F401 - registers headwise's own parts first, so that their names are taken
            from ..interfaces.external_parts import import_part_file

            import_part_file(name)
        return parsed, unknown

    def reject_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Raise `UsageError` for arguments that the command does not have."""
        option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        names = [name for action in self._actions for name in action.option_strings]
        if option is None:
            remedy = "leave it out, or quote a value with spaces"
            if "--text" in names:
                remedy = f"leave it out, or give a text as --text {unknown[0]!r}"
            self.error(f"unexpected argument {unknown[0]!r}; {remedy}")
        hint = suggest(option, names)
        self.error(
            f"there is no option {option}"
            + (f"; {hint}" if hint.startswith("did you mean") else "")
        )

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`, so that all errors are printed in one form: the option, the fault and
        a remedy.
        """
        required = "the following arguments are required: "
        if message.startswith(required):
            names = [
                self._with_metavar(name) for name in message.removeprefix(required).split(", ")
            ]
            message = f"missing {', '.join(names)}; add {'it' if len(names) == 1 else 'them'}"
        elif match := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL):
            message = self._describe_fault(match[1].split("/")[-1], match[2])
        raise UsageError(
            f"{message}{' See' if message.endswith('?') else '; see'} {self.prog} --help"
        )

    def _describe_fault(self, option: str, fault: str) -> str:
        """Return what is wrong with the value of an option, and what to give instead."""
        if fault.startswith("expected"):
            return f"{option} needs a value; write {self._with_metavar(option)}"
        if fault.startswith("not allowed with argument "):
            other = fault.removeprefix("not allowed with argument ")
            return f"{option} and {other} exclude each other; leave one out"
        if match := re.fullmatch(r"ignored explicit argument (.*)", fault, re.DOTALL):
            return f"{option} takes no value, got {match[1]}; leave the value out"
        if match := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", fault, re.DOTALL):
            return f"{option} {match[1]} is unknown; give one of {match[2]}"
        return f"{option} {fault}"

    def _with_metavar(self, name: str) -> str:
        """Return an option with its value, as in "--out DIR"; a positional argument as it is."""
        action = next((action for action in self._actions if name in action.option_strings), None)
        if action is None:
            return name
        metavar = action.metavar or action.dest.upper()
        return f"{name} {metavar if isinstance(metavar, str) else ' '.join(metavar)}"


def _number_parser(
    kind: Callable[[str], int | float], expected: str
) -> Callable[[str], int | float]:
    """Return a parser of numbers whose error names what is expected."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"needs {expected}, got {text!r}") from None

    return parse
