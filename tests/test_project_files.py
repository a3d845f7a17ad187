"""The files that a project shows beside its code agree with the package and with each other."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

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
    assert needed - {"headwise"} == pinned
