"""The files that a project shows beside its code agree with the package and with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import headwise as hw

ROOT = Path(__file__).parent.parent
CITATION = dict(re.findall(r"^(\w[\w-]*): (\S.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))


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


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_to_files(page: str):
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
