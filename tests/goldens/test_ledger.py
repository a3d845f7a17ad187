"""Every name that users know is there, or the ledger has a line that says what became of it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

from . import collect, ledger

WORDS = ("renamed to ", "replaced by ", "deleted because ")


@pytest.mark.parametrize("category", ledger.CATEGORIES)
def test_names_that_disappeared_have_a_line(category: str):
    recorded = set(json.loads(ledger.NAMES.read_text(encoding="utf-8"))[category])
    changes = tomllib.loads(ledger.CHANGES.read_text(encoding="utf-8"))
    lines = changes.get(category, {})
    if category == "options":  # of a command that is left
        recorded = {name for name in recorded if name.split()[0] not in changes["commands"]}
    gone = recorded - set(ledger.CATEGORIES[category]())
    assert {name for name in gone if name not in lines} == set()
    assert {name for name in lines if name not in gone} == set()
    assert [name for name, line in lines.items() if not line.startswith(WORDS)] == []


def test_the_systems_of_the_documents_name_entries_that_exist(shared: Path):
    """57 rows; entries of `learn` that a row names are in the catalogue."""
    text = (shared / "reference" / "systems.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|(.*)$", text, re.MULTILINE)
    assert len(rows) == 57
    entries = ledger.CATEGORIES["learn"]()
    for number, row in rows:
        for entry in re.findall(r"\b00[0-4]-[A-Z\d.]*\d[a-z]?\b", row):
            assert any(name.startswith(entry) for name in entries), (number, entry)


# --- answers that making the package smaller must not change ---


ROUNDING = {"rtol": 1e-11, "atol": 1e-12}  # another processor may sum in another order


@pytest.mark.parametrize("backend", ["dense", None])
def test_layers_give_the_recorded_outputs_and_gradients(backend: str | None):
    expected, found = collect.read_tensors(), dict(collect.layer_tensors(backend))
    assert set(found) == set(expected)
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], **ROUNDING, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("section", collect.SECTIONS)
def test_answers_are_those_recorded(section: str):
    found = list(collect.differences(collect.SECTIONS[section](), collect.read_answers()[section]))
    assert not found, "\n".join([f"{len(found)} differences", *found[:40]])
