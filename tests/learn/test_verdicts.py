"""Every verdict follows its input: with another input the statement fares differently."""

from __future__ import annotations

import math  # noqa: F401 - used in changes.txt

import pytest
import torch  # noqa: F401 - used in changes.txt

from headwise.learn.catalogue import load_entries
from headwise.studies.cells import resize_model  # noqa: F401 - used in changes.txt
from headwise.training.data import make_task  # noqa: F401 - used in changes.txt
from learn import learn_entries as learn

ENTRIES = {entry.id: entry for entry in load_entries()}
CHANGES = learn.read_table("changes.txt")
# Tests of the numbers of these entries change the model or its modifiers.
CHANGED_ELSEWHERE = {"002-2.5b", "003-6.6b", "003-7.3"}


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.slow] * (id == "002-FF.8")) for id in CHANGES]
)
def test_verdict_follows_the_input(id: str):
    learn.check_flip(ENTRIES[id], eval(CHANGES[id], globals()))


def test_every_run_has_a_changed_input():
    runs = {entry.id for entry in ENTRIES.values() if entry.run is not None}
    assert runs == set(CHANGES) | CHANGED_ELSEWHERE
