"""docs/comparison.md: every mark of headwise has evidence that exists, and the marks of the tools
add up.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from headwise import cli
from support.refusals import refused_cases
from support.syntax_trees import syntax_nodes

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "feature-comparison.toml"
PAGE = ROOT / "docs" / "comparison.md"
FEATURES = [
    row for group in tomllib.loads(DATA.read_text("utf-8"))["groups"] for row in group["rows"]
]
EVIDENCE = sorted({one for row in FEATURES for one in row["evidence"]})
COMMANDS = [one for one in EVIDENCE if one.startswith("headwise ")]
TESTS = [one for one in EVIDENCE if one not in COMMANDS]


@pytest.fixture
def measured_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import measured_pages

    return measured_pages


def defined_tests(path: Path) -> set[str]:
    """Names of the test functions at the top of a file."""
    module = syntax_nodes(path.read_text("utf-8"))[0]
    assert isinstance(module, ast.Module)
    return {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_there_are_62_features_and_18_tools(measured_pages: ModuleType):
    comparison = measured_pages.load_comparison()
    assert [feature.number for feature in comparison.features] == list(range(1, 63))
    assert len({feature.name for feature in comparison.features}) == 62
    assert len(comparison.groups) == 7
    assert len({tool.name for tool in comparison.tools}) == 18
    assert all(
        re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", tool.address)
        for tool in comparison.tools
    )
    assert all(tool.version for tool in comparison.tools)


def test_every_mark_of_another_tool_has_a_source(measured_pages: ModuleType):
    """Marks belong to tools, and each tool names what its marks were read from."""
    sources = {tool.code: tool.basis for tool in measured_pages.load_comparison().tools}
    marked = {code for row in FEATURES for code in (*row["yes"], *row["partial"])}
    assert marked == set(sources)
    assert [
        code
        for code, basis in sources.items()
        if not re.search(r"\b(source|repository|issues|https://)", basis)
    ] == []


@pytest.mark.parametrize("name", TESTS)
def test_named_tests_exist(name: str):
    path, _, function = name.partition("::")
    assert function in defined_tests(ROOT / path)


@pytest.mark.parametrize("command", COMMANDS)
def test_named_commands_and_options_exist(command: str, capsys: pytest.CaptureFixture[str]):
    _, verb, *options = command.split()
    assert verb in cli.COMMANDS
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help-all"])
    assert ended.value.code == 0
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert set(options) <= set(listed)


def test_no_yes_without_a_test_and_no_gap_without_a_reason():
    without = [
        row["number"]
        for row in FEATURES
        if row["ours"] == "yes" and not set(row["evidence"]) & set(TESTS)
    ]
    assert without == []
    assert [
        row["number"] for row in FEATURES if (row["ours"] == "yes") == bool(row.get("missing"))
    ] == []
    assert {row["ours"] for row in FEATURES} <= {"yes", "partial", "no"}


def test_the_page_is_fresh_and_linked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_docs

    assert build_docs.generate(PAGE) == PAGE.read_text("utf-8")
    assert "(docs/comparison.md)" in (ROOT / "README.md").read_text("utf-8")
    assert "(comparison.md)" in (ROOT / "docs" / "view.md").read_text("utf-8")


ROW = {
    "number": 1,
    "feature": "a",
    "ours": "yes",
    "evidence": ["headwise view"],
    "yes": ["A"],
    "partial": ["B"],
}


@pytest.mark.parametrize(
    ("change", "message"), refused_cases(__file__, "comparison page", globals())
)
def test_inconsistent_rows_are_refused(measured_pages: ModuleType, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        measured_pages.read_feature("Views", ROW | change, ["A", "B", "C"])
    assert measured_pages.read_feature("Views", ROW, ["A", "B", "C"]).marks == {
        "A": "yes",
        "B": "partial",
        "C": "no",
    }
