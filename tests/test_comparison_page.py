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

# "yes" counts 1 and "partial" 1/2: the sums that were noted when the marks were given. A changed
# mark changes its sum.
POINTS = {
    "BV": 11,
    "CV": 9,
    "TL": 15,
    "NN": 12,
    "IQ": 16,
    "LT": 11.5,
    "TE": 5.5,
    "EX": 13,
    "CL": 11.5,
    "AV": 12,
    "TX": 7,
    "TP": 9,
    "HF": 6.5,
    "CA": 11,
    "PV": 8,
    "NP": 16.5,
    "IN": 15,
    "TK": 18.5,
}


@pytest.fixture
def measured_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import measured_pages

    return measured_pages


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


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


def test_marks_of_the_tools_add_up():
    points = {
        code: sum((code in row["yes"]) + (code in row["partial"]) / 2 for row in FEATURES)
        for code in POINTS
    }
    assert points == POINTS


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


def test_the_page_shows_every_mark(measured_pages: ModuleType):
    """The tables of the page, read back, hold the marks of the data file."""
    codes = [tool.code for tool in measured_pages.load_comparison().tools]
    lines = [
        cells(line)
        for line in PAGE.read_text("utf-8").splitlines()
        if re.match(r"\| \d+ \| ", line)
    ]
    word = {"yes": "yes", "partial": "part", "no": "·"}
    marks = [
        [
            word["yes" if code in row["yes"] else "partial" if code in row["partial"] else "no"]
            for code in codes
        ]
        for row in FEATURES
    ]
    expected = [
        [str(row["number"]), row["feature"], word[row["ours"]], *own]
        for row, own in zip(FEATURES, marks, strict=True)
    ]
    assert lines == expected


def test_the_page_shows_evidence_and_gaps():
    text = PAGE.read_text("utf-8").partition("\n## Evidence\n")[2]
    rows = {
        int(line.split()[1]): cells(line)
        for line in text.splitlines()
        if re.match(r"\| \d+ ", line)
    }
    assert sorted(rows) == [row["number"] for row in FEATURES]
    for row in FEATURES:
        _, ours, shown, missing = rows[row["number"]]
        assert (ours, missing) == (row["ours"], row.get("missing", "·"))
        assert re.findall(r"`(.*?)`", shown) == row["evidence"]


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
    ("change", "message"),
    [
        ({"yes": ["Z"]}, r"row 1 \(a\): unknown tools \['Z'\]; use codes in \['A', 'B', 'C'\]"),
        ({"yes": ["B"]}, "a tool has two marks"),
        ({"ours": "maybe"}, "unknown mark ours='maybe'"),
        ({"evidence": []}, "ours='yes' needs evidence"),
        ({"missing": "the rest"}, "ours='yes' needs evidence and no `missing`"),
        ({"ours": "partial"}, "ours='partial' needs `missing`"),
        ({"ours": "no", "evidence": []}, "ours='no' needs `missing`"),
    ],
)
def test_inconsistent_rows_are_refused(measured_pages: ModuleType, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        measured_pages.read_feature("Views", ROW | change, ["A", "B", "C"])
    assert measured_pages.read_feature("Views", ROW, ["A", "B", "C"]).marks == {
        "A": "yes",
        "B": "partial",
        "C": "no",
    }
