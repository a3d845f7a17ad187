"""The files that a project shows beside its code agree with the package and with each other."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import headwise as hw

ROOT = Path(__file__).parent.parent


CITATION = dict(
    re.findall(r"^(\w[\w-]*): (\S.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
)


def test_version_and_license_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert CITATION["version"] == project["version"] == hw.__version__
    assert f"({hw.__version__})" in (ROOT / "CHANGELOG.md").read_text()
    assert CITATION["license"] == project["license"] == (ROOT / "LICENSE").read_text().split()[0]


def test_contributing_is_one_page_and_names_real_targets():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 60
    named = set(re.findall(r"`make (\w+)`", text))
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_workflows_run_what_exists():
    """Workflows parse; their make targets, scripts and versions of Python are those of the project."""
    folder = ROOT / ".github"
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = list[str]()
    versions = set[str]()
    for path in sorted(folder.rglob("*.yml")):
        document = yaml.safe_load(path.read_text())
        assert isinstance(document, dict), path
        for job in document.get("jobs", {}).values():
            assert job["timeout-minutes" if "steps" in job and len(job["steps"]) > 2 else "steps"]
            matrix = job.get("strategy", {}).get("matrix", {})
            versions |= set(matrix.get("python-version", ()))
            commands += [step["run"] for step in job["steps"] if "run" in step]
            setups = [step.get("with", {}).get("python-version", "") for step in job["steps"]]
            versions |= {version for version in setups if version[:1].isdigit()}
    assert any(command == "bash .ci/run" for command in commands)
    used = {word for line in commands for word in re.findall(r"^make (?:\S+=\S+ )?(\w+)$", line)}
    assert used == {"fast", "gpu"}
    assert used <= targets
    assert {"3.11"} < versions
    assert all(tuple(map(int, version.split("."))) >= (3, 11) for version in versions)


def test_every_dependency_is_pinned_exactly():
    """An audit of constraints.txt is an audit of everything that an installation brings."""
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = {
        canonicalize_name(line.split("==")[0])
        for line in lines
        if re.fullmatch(r"[\w.-]+==[\w.+!]+", line)
    }
    assert len(pinned) == len(lines) > 50
    needed, waiting = set[str](), {("headwise", frozenset({"dev"}))}
    while waiting:
        name, extras = waiting.pop()
        needed.add(name)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            marker, applied = requirement.marker, {"", *extras}
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in applied):
                dependency = canonicalize_name(requirement.name)
                if dependency not in needed or requirement.extras:
                    waiting.add((dependency, frozenset(requirement.extras)))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert needed - {"headwise"} | {*extras["triton"]} == pinned  # which make triton installs


# --- the glossaries ---


DOCS = Path(__file__).parent.parent / "docs"


def rows(name: str) -> list[list[str]]:
    """The cells of all rows of the tables of a page, without headers."""
    text = (DOCS / name).read_text(encoding="utf-8").partition("\n## Chinese words")[0]
    lines = text.splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return [row for row in cells if row[0] not in ("word", "letter", "---")]


def terms(name: str) -> list[str]:
    return [row[0] for row in rows(name)]


def test_both_pages_have_the_same_terms_in_the_same_order():
    assert len(terms("glossary.md")) > 60
    assert terms("glossary.zh.md") == terms("glossary.md")


def test_the_axes_have_the_same_letters():
    letters = [[row[0], row[3]] for row in rows("glossary.md") if len(row) == 5]
    assert len(letters) == 6
    assert [[row[0], row[3]] for row in rows("glossary.zh.md") if len(row) == 5] == letters


def test_every_term_has_a_chinese_word_and_meaning():
    han = re.compile("[\u4e00-\u9fff]")
    for row in rows("glossary.zh.md"):
        translated = (row[1], row[4]) if len(row) == 5 else row[1:3]
        assert len(translated) == 2
        assert all(han.search(cell) for cell in translated), row


def test_code_words_of_a_meaning_are_kept():
    chinese = {row[0]: row[2] for row in rows("glossary.zh.md") if len(row) == 3}
    for term, meaning in ((row[0], row[1]) for row in rows("glossary.md") if len(row) == 2):
        assert re.findall("`[^`]+`", chinese[term]) == re.findall("`[^`]+`", meaning), term


# --- every point of security ---


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_point_has_a_test():
    rows = [
        line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("|")
    ]
    points = [row for row in rows if not re.match(r"\| point |\|---", row)]
    assert len(points) >= 5
    assert [row for row in points if not NAMED_TEST.search(row)] == []
    for path, name in NAMED_TEST.findall("\n".join(points)):
        tree = ast.parse((ROOT / path).read_text())
        assert name in {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }, (path, name)


# --- the documentation site ---


SETTINGS = (ROOT / "mkdocs.yml").read_text("utf-8")


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w./-]+\.md", SETTINGS.partition("\nnav:\n")[2])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) - pages == {
        "index.md",
        "index.zh.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    }
    assert pages <= set(listed)


def test_the_site_builds_without_warnings(tmp_path: Path):
    mkdocs = Path(sys.executable).parent / "mkdocs"
    if not mkdocs.is_file():
        pytest.skip("mkdocs is not installed; make site installs it")
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [str(mkdocs), "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    front, api = (
        (tmp_path / "site" / name).read_text("utf-8") for name in ("index.html", "api.html")
    )
    assert 'href="heads.html"' in front
    course = tmp_path / "site" / "course"
    for language, ending in (("en", ".html"), ("zh", ".zh.html")):
        start = (course / f"index{ending}").read_text("utf-8")
        assert f'href="course/index{ending}"' in front
        for document in ("000", "001", "002", "003", "004"):
            assert f'href="{document}{ending}"' in start
            assert f'<html lang="{language}"' in (course / f"{document}{ending}").read_text("utf-8")
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre>.*?</pre>", "", api, flags=re.DOTALL)
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
    assert not re.search(r"(src|href)=\"https?://[^\"]*(googleapis|cdn|unpkg)", front)


@pytest.mark.parametrize(
    "name",
    [
        "README.zh-CN.md",
        *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.zh.md")),
    ],
)
def test_no_line_ends_between_two_chinese_characters(name: str):
    """Browsers show a line break as a space, which Chinese does not have."""
    text = re.sub(
        r"^```.*?^```", "", (ROOT / name).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    assert (
        re.findall(
            r".{0,9}[\u3001-\u303f\u4e00-\u9fff\uff00-\uffef]\n "
            r"*[\u3001-\u9fff\uff00-\uffef].{0,9}",
            text,
        )
        == []
    )
