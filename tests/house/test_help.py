"""The help texts of all commands: short, with defaults by one rule, examples, and every option in
--help-all.
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from headwise import cli
from headwise.cli import train
from headwise.cli.options import CommandParser, help_entries
from headwise.training import Recipe

MAX_LINES, MAX_COLUMNS = 40, 80
COMMANDS = [*cli.COMMANDS, "prune --sweep"]


class ParserBuiltError(SystemExit):
    """Carries the parser of a command out of its main function."""

    def __init__(self, parser: CommandParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def build_parser(command: str) -> CommandParser:
    """The parser of a command."""

    def stop(self: CommandParser, *_: object) -> None:
        raise ParserBuiltError(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommandParser, "parse_known_args", stop)
        with pytest.raises(ParserBuiltError) as caught:
            cli.main(command.split())
    return caught.value.parser


@pytest.fixture(params=COMMANDS)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CommandParser:
    """The parser of each command, at 80 columns."""
    monkeypatch.setenv("COLUMNS", str(MAX_COLUMNS))
    return build_parser(request.param)


def options(parser: CommandParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def lists(text: str, option: str) -> bool:
    """Whether a help text has an entry for the option."""
    return re.search(rf"^  (-h, )?{re.escape(option)}(\s|$)", text, re.MULTILINE) is not None


def test_help_is_short(parser: CommandParser):
    lines = parser.format_everyday_help().splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, [*lines, *parser.format_help().splitlines()])) <= MAX_COLUMNS


def test_help_of_all_commands_is_short(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
    assert [line.split()[0] for line in lines[5 : 5 + len(cli.COMMANDS)]] == list(cli.COMMANDS)
    assert sum(line.startswith("  headwise ") for line in lines) == 2
    assert "--help-all" in lines[-1]


def test_help_all_lists_every_option(parser: CommandParser):
    text = parser.format_help()
    assert [
        action.option_strings
        for action in options(parser)
        if not lists(text, action.option_strings[-1])
    ] == []
    assert "--help" in parser.format_everyday_help()
    assert "--help-all" in parser.format_everyday_help().splitlines()[-1]


def test_help_hides_expert_options_only(parser: CommandParser):
    entries = help_entries(parser.options)
    text = parser.format_everyday_help()
    for action in options(parser):
        entry = entries.get(action.dest)
        is_hidden = action.option_strings[-1] in ("--help-all", "--import")
        is_expert = is_hidden or (entry is not None and entry.group != "")
        assert lists(text, action.option_strings[-1]) != is_expert, action.option_strings


def test_defaults_are_shown_by_one_rule(parser: CommandParser):
    defaults = {each.name: each.default for each in fields(parser.options)}
    for action in parser._actions:
        default = defaults.get(action.dest)
        stated = re.findall(r"\(default: ([^)]+)\)$", action.help or "")
        assert len(re.findall("default", action.help or "")) == len(stated)
        if default in (None, "", (), MISSING) or default is False:
            continue
        assert stated == [str(default)], action.option_strings


# Options of which exactly one is needed, or which add to a task or a Python process; --out is
# needed but for --dry-run.
WITHOUT_DEFAULT = (
    *("--data", "--task", "--conllu", "--set", "--import"),
    *("--keep", "--heads", "--budget", "--kv", "--to", "--out"),
)


@pytest.mark.parametrize("parser", ["prune", "prune --sweep", "convert"], indirect=True)
def test_every_option_of_surgery_states_its_default(parser: CommandParser):
    text = parser.format_help()
    entries = re.split(
        r"^  (?=-)", re.sub(r"\n\n.*?:$", "", text, flags=re.MULTILINE), flags=re.MULTILINE
    )
    for action in options(parser):
        name = action.option_strings[-1]
        if action.nargs == 0 or action.required or name in WITHOUT_DEFAULT:
            continue
        [entry] = [entry for entry in entries if re.match(rf"{name}\s", entry)]
        assert "(default: " in " ".join(entry.split()), name


def test_defaults_of_a_recipe_are_those_of_the_library():
    for name in train.RECIPE_FIELDS:
        text = help_entries(train.TrainOptions)[name].text
        assert text.endswith(f"(default: {getattr(Recipe(), name)})"), name


def test_two_examples_parse(parser: CommandParser):
    examples = [
        line.strip() for line in (parser.epilog or "").splitlines() if line.startswith("  ")
    ]
    assert len(examples) == 2
    for example in examples:
        assert example.startswith(f"headwise {parser.prog.split()[1]}")
        words = shlex.split(example.partition(" < ")[0])[2:]
        assert parser.parse_known_args(words)[1] == []


ROOT = Path(__file__).resolve().parents[2]
TYPED = re.compile(r"^(?:    )?(?:\$ )?headwise ([a-z]+(?: .*)?)$", re.MULTILINE)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_commands_of_the_documents_have_options_that_exist(command: str):
    """Except those of docs/errors.md, which are wrong on purpose; files of
    --import are left out.
    """
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [
        page.read_text("utf-8").replace("\\\n", " ") for page in pages if page.name != "errors.md"
    ]
    lines = sorted(
        {line for text in texts for line in TYPED.findall(text) if line.split()[0] == command}
    )
    assert lines
    for line in lines:
        words = shlex.split(re.sub(r" --import \S+| [<>|#] .*| \.\.\.", "", line))[1:]
        parser = build_parser("prune --sweep" if "--sweep" in words else command)
        assert parser.parse_known_args(words)[1] == [], line
