"""The help texts of all commands: short, with defaults by one rule, examples, and every option in
--help-all.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from headwise import cli
from headwise.cli import train
from headwise.cli.command_parser import CommandParser
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
    lines = parser.format_help().splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, [*lines, *parser.format_help_all().splitlines()])) <= MAX_COLUMNS


def test_help_of_all_commands_is_short(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
    assert [line.split()[0] for line in lines[5 : 5 + len(cli.COMMANDS)]] == list(cli.COMMANDS)
    assert sum(line.startswith("  headwise ") for line in lines) == 2
    assert "--help-all" in lines[-1]


def test_help_all_lists_every_option(parser: CommandParser):
    text = parser.format_help_all()
    assert [
        action.option_strings
        for action in options(parser)
        if not lists(text, action.option_strings[-1])
    ] == []
    assert "--help" in parser.format_help()
    assert "--help-all" in parser.format_help().splitlines()[-1]


def test_help_hides_expert_options_only(parser: CommandParser):
    text = parser.format_help()
    for action in options(parser):
        is_expert = action in parser.expert_actions or "--help-all" in action.option_strings
        assert lists(text, action.option_strings[-1]) != is_expert, action.option_strings


def test_defaults_are_shown_by_one_rule(parser: CommandParser):
    text = " ".join(parser.format_help_all().split())
    for action in options(parser):
        if action.nargs == 0 or action.default in (None, "", [], argparse.SUPPRESS):
            continue
        entry = re.search(rf" {action.option_strings[-1]} .*?\(default: ([^)]*)\)", text)
        assert entry is not None, action.option_strings
        assert entry[1] == str(action.default), action.option_strings
    for action in parser._actions:
        assert len(re.findall("default", action.help or "")) == len(
            re.findall(r"\(default: [^)]+\)$", action.help or "")
        )


# Options of which exactly one is needed, or which add to a task or a Python process.
WITHOUT_DEFAULT = (
    *("--data", "--task", "--conllu", "--set", "--import"),
    *("--keep", "--heads", "--budget", "--drop", "--plan", "--kv", "--to"),
)


@pytest.mark.parametrize("parser", ["prune", "prune --sweep", "convert"], indirect=True)
def test_every_option_of_surgery_states_its_default(parser: CommandParser):
    text = parser.format_help_all()
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
    for name, option in (train.EVERYDAY_OPTIONS | train.EXPERT_OPTIONS).items():
        assert option.help.endswith(f"(default: {getattr(Recipe(), option.field)})"), name


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


WRONG = {
    "unknown option": (
        ["walk", "mha", "--bach", "3"],
        "there is no option --bach; did you mean '--batch'? See",
    ),
    "not a number": (["walk", "mha", "--batch", "x"], "--batch needs a whole number, got 'x'; see"),
    "not a float": (
        ["trace", "a.trace", "--min-weight", "x"],
        "--min-weight needs a number, got 'x'; see",
    ),
    "no value": (["cost", "gqa", "--batch"], "--batch needs a value; write --batch ROWS; see"),
    "no choice": (
        ["cost", "gqa", "--match", "size"],
        "--match 'size' is unknown; give one of 'params', 'flops', 'kv'",
    ),
    "missing option": (["train", "dates"], "missing --out DIR; add it; see headwise train --help"),
    "missing two": (["prune"], "missing MODEL, --out DIR; add them; see"),
    "both": (
        ["spec", "gqa", "--toml", "--json"],
        "--json and --toml exclude each other; leave one out; see",
    ),
    "a value": (
        ["spec", "gqa", "--json=3"],
        "--json takes no value, got '3'; leave the value out; see",
    ),
    "one word more": (
        ["sites", "a", "b"],
        "unexpected argument 'b'; leave it out, or quote a value with spaces; see",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_name_the_option_and_a_remedy(
    case: str, capsys: pytest.CaptureFixture[str]
):
    argv, message = WRONG[case]
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
