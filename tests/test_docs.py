"""Every Python block of the documentation runs, and the pages about commands and errors show what
is printed.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.attention import head_axis_ops
from headwise.attention.parts import REGISTRY
from headwise.learn.catalogue import find_entries
from headwise.learn.entry_text import format_entry
from support import layer_cases as cases
from support.small_training import SHORT_RUNS
from support.spec_strategies import REPR_NAMES

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# The code of a Chinese page is that of the English one.
ENGLISH = [
    path for path in sorted((ROOT / "docs").glob("*.md")) if not path.name.endswith(".zh.md")
]
PAGES = {path.name: path for path in ENGLISH if BLOCK.search(path.read_text("utf-8"))}
VARIANT = "adding-a-variant.md"


@contextlib.contextmanager
def ran(page: Path) -> Iterator[ModuleType]:
    """A module made of the page's blocks, in order; the parts it adds are forgotten afterwards."""
    module = ModuleType("page_" + re.sub(r"\W", "_", page.stem))
    registered = dict(REGISTRY)
    sys.modules[module.__name__] = module  # a dataclass looks its own module up
    text = page.read_text()
    try:
        for block in BLOCK.finditer(text):
            # Blank lines in front, so that an error names the line of the page.
            code = "\n" * text[: block.start(1)].count("\n") + block[1]
            exec(compile(code, str(page), "exec", dont_inherit=True), vars(module))
        yield module
    finally:
        for name in set(REGISTRY) - set(registered):
            del REGISTRY[name]
            with contextlib.suppress(AttributeError):
                delattr(hw, name)
        del sys.modules[module.__name__]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_runs(name: str):
    before = set(REGISTRY)
    with contextlib.redirect_stdout(io.StringIO()), ran(PAGES[name]) as module:
        assert vars(module)
    assert set(REGISTRY) == before


@pytest.fixture
def temperature() -> Iterator[ModuleType]:
    """The part that the page adds."""
    with ran(PAGES[VARIANT]) as module:
        yield module


def specs(module: ModuleType) -> list[hw.AttentionSpec]:
    found = list(module.Temperature.examples(cases.base))
    assert found
    return found


def test_its_docstring_is_true(temperature: ModuleType):
    source = next(BLOCK.finditer(PAGES[VARIANT].read_text()))[1]
    checks = [
        test
        for test in doctest.DocTestFinder().find(temperature.Temperature, globs=vars(temperature))
        if test.examples
    ]
    assert checks
    assert all(line.want in source for test in checks for line in test.examples)
    runner = doctest.DocTestRunner(verbose=False)
    assert sum(runner.run(test).failed for test in checks) == 0


def test_the_report_of_the_page_is_the_one_it_prints(temperature: ModuleType):
    """All but the errors, which are rounding, and the exact number of comparisons of each check."""
    shown = re.search(
        r"^```text\n(Temperature\(\): .*?)\n```",
        PAGES[VARIANT].read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert shown is not None
    errors = re.compile(r" +\d\.\de[+-]\d\d")
    assert errors.sub("", shown[1]) == errors.sub("", str(temperature.report))


def test_the_part_of_the_page_is_pruned_and_printed(temperature: ModuleType):
    for spec in specs(temperature):
        layer = cases.layer(spec)
        _, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), [1, 4])
        torch.testing.assert_close(
            weights["temperature.log"], layer.state_dict()["temperature.log"][[1, 4]]
        )
        assert eval(repr(spec), REPR_NAMES | {"Temperature": temperature.Temperature}) == spec


CHINESE = [path.name for path in sorted((ROOT / "docs").glob("*.zh.md"))]


@pytest.mark.parametrize("name", CHINESE)
def test_both_languages_have_the_same_sections_pictures_and_commands(name: str):
    """Headings by level, names of pictures and generated parts, and entries of `headwise learn`, in
    their order.
    """
    structure = re.compile(
        r"^#+ |\]\(img/[^)]+|<!-- generated: [a-z0-9-]+|`headwise learn [C\d][^`]+`", re.MULTILINE
    )
    texts = [
        (ROOT / "docs" / page).read_text("utf-8") for page in (name, name.replace(".zh.md", ".md"))
    ]
    chinese, english = (structure.findall(text) for text in texts)
    assert len(english) > 3
    neutral = [found.removesuffix("-zh").replace("img/zh/", "img/") for found in chinese]
    assert neutral == english


FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LEARN_OUTPUT = re.compile(r"```text\n(\[.\] .*?)\n```", re.DOTALL)  # in the language of its page
TITLE_OF_DOCUMENT = re.compile(r"^(\| `00\d` \|)[^|]*\|", re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)    \S.*\n(?:(?:    .*)?\n)*")
CHINESE_GUIDES = [
    name
    for name in CHINESE
    if INDENTED.search(text := (ROOT / "docs" / name).read_text()) or "```" in text
]


def content_of_guide(name: str) -> dict[str, list[str]]:
    """Everything on a page that does not depend on its language."""
    text = (ROOT / "docs" / name).read_text("utf-8")
    prose = INDENTED.sub("", FENCED.sub("", text))
    links = re.findall(r"\]\(([^)]+)", prose)
    blocks = [*FENCED.findall(text), *INDENTED.findall(text)]
    return {
        "code": [
            re.sub("--lang (en|zh)", "--lang", block.strip())
            for block in blocks
            if not LEARN_OUTPUT.match(block)
        ],
        "code in sentences": sorted(
            {" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose)}
        ),
        "figures": sorted(
            re.findall(
                r"\d[\d.,]*\d|\d", TITLE_OF_DOCUMENT.sub(r"\1", re.sub(r"\]\(.*?\)", "", prose))
            )
        ),
        "links": sorted(
            re.sub(r"(\.zh)?\.md(#.*)?|^#.*", ".md", link).replace("img/zh/", "img/")
            for link in links
        ),
        "cells by row": [
            str(row.replace("\\|", "").count("|"))
            for row in re.findall(r"^\|.*", prose, re.MULTILINE)
        ],
    }


def test_guides_exist_in_chinese():
    guides = {"commands", "heads", "surgery", "cost", "training", "view", "generation"}
    guides |= {"learn", "how-to"}
    assert {f"{guide}.zh.md" for guide in guides} <= set(CHINESE_GUIDES)


@pytest.mark.parametrize(("name", "language"), [("learn.md", "en"), ("learn.zh.md", "zh")])
def test_the_sample_of_learn_is_what_the_command_prints(name: str, language: str):
    sample = LEARN_OUTPUT.search((ROOT / "docs" / name).read_text("utf-8"))
    (entry,) = find_entries("C1.1")
    assert sample is not None
    assert sample[1] == format_entry(entry, entry.check(), language)


@pytest.mark.parametrize("name", CHINESE_GUIDES)
def test_chinese_guides_have_the_commands_code_figures_and_links_of_the_english_ones(name: str):
    english = content_of_guide(name.replace(".zh.md", ".md"))
    for kind, found in content_of_guide(name).items():
        assert found == english[kind], kind


# --- commands -------------------------------------------------------------------------------------

COMMANDS_PAGE = (ROOT / "docs" / "commands.md").read_text("utf-8")
ERRORS_PAGE = (ROOT / "docs" / "errors.md").read_text("utf-8")
# Arguments that make a command of the session short; the other arguments stay as they are.
SHORT = SHORT_RUNS | {
    "demo": ["--quick"],
    "heads": ["--limit", "4"],
    "prune": ["--limit", "4", "--seconds", "0.05"],
    "convert": ["--limit", "4", "--seconds", "0.05"],
}


def run_headwise(line: str) -> tuple[int, str, str]:
    """Exit code and output of a line `headwise COMMAND ...`, in this process; stdout may go to a
    file.
    """
    words, _, target = line.partition(" > ")
    argv = shlex.split(words)[1:]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv + SHORT.get(argv[0], []))
    if target:
        Path(target).write_text(out.getvalue())
    return code, out.getvalue(), err.getvalue()


def test_the_session_has_a_section_for_every_command():
    sections = re.split(r"^### (.+)\n", COMMANDS_PAGE, flags=re.MULTILINE)
    assert sorted(sections[1::2]) == sorted(cli.COMMANDS)
    for command, text in zip(sections[1::2], sections[2::2], strict=True):
        assert f"\nheadwise {command}" in text, command


@pytest.mark.lengthy
def test_every_command_of_the_session_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each line of a text block is a line that the commands before it print."""
    shutil.copy(ROOT / "examples" / "windows.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = ""
    for language, block in re.findall(
        r"^```(sh|text)\n(.*?)^```", COMMANDS_PAGE, re.DOTALL | re.MULTILINE
    ):
        if language == "text":
            assert set(block.splitlines()) <= set(printed.splitlines())
            continue
        for line in block.splitlines():
            code, printed, err = run_headwise(line)
            assert code == 0, f"{line}: {err}"
            assert printed, line
    for name in (
        "runs/dates",
        "runs/pruned/VERIFICATION.md",
        "runs/grouped/VERIFICATION.md",
        "dates.html",
        "runs/windows/report",
    ):
        assert Path(name).exists(), name


def test_the_refusals_of_the_page_are_those_of_the_commands():
    transcript = re.search(r"^```console\n(.*?)^```", ERRORS_PAGE, re.DOTALL | re.MULTILINE)
    assert transcript is not None
    lines = transcript[1].splitlines()
    assert len(lines) >= 8
    for typed, shown in zip(lines[::2], lines[1::2], strict=True):
        assert run_headwise(typed.removeprefix("$ ")) == (2, "", f"{shown}\n")


def test_the_exceptions_of_the_page_are_those_of_the_library():
    from headwise.util import errors

    rows = re.findall(
        r"^\| `(?:hw|headwise\.util\.errors)\.(\w+)` \| `(\w+)`", ERRORS_PAGE, re.MULTILINE
    )
    classes = {
        name: one
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, Exception)
    }
    assert dict(rows) == {name: one.__bases__[0].__name__ for name, one in classes.items()}
    public = re.findall(r"^\| `hw\.(\w+)`", ERRORS_PAGE, re.MULTILINE)
    assert all(getattr(hw, name) is classes[name] for name in public)


VERDICTS = tomllib.loads((ROOT / "docs" / "findings" / "verdicts.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", VERDICTS)
def test_the_page_of_a_study_has_its_verdict(name: str):
    page = (ROOT / "docs" / "findings" / f"study-{name}.md").read_text("utf-8")
    assert " ".join(VERDICTS[name].split()) in " ".join(page.split())
