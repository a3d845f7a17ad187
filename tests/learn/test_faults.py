"""A fault of the product makes the entries of its subject fail; entries about training fail with
random weights; and entries that state opposites have opposite verdicts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from headwise.learn import cited_papers
from headwise.learn.catalogue import Entry, Verdict, judge, load_entries
from learn import learn_entries as learn
from learn.planted_faults import Fault, notices, planted, read_faults

ENTRIES = {entry.id: entry for entry in load_entries()}
FAULTS = read_faults()
# Checked in the normal tests: one line in eight, and not those that take longer than a second.
LONG = {
    "000-1f",
    "000-1g",
    "001-3b",
    "002-2.7b",
    "002-2.1j",
    "002-2.6c",
    "002-FF.8",
    "003-4.1c",
    "003-4.2d",
}
QUICK = {id for id, _ in FAULTS[::8]} - LONG
PRODUCT = Path(learn.__file__).parents[2] / "src" / "headwise"
# Their numbers come from stored runs: of MiniLM, which is not part of the package, and of studies.
STORED = {"002-2.4", "002-2.6l", "002-2.6h"} | {
    id for id, entry in ENTRIES.items() if isinstance(entry.run, partial)
}
# Entries of two ids that state the same, or the opposite, in other words.
SAME = [("002-2.1", "001-1b"), ("003-2.2b", "001-4b"), ("003-6.6", "002-2.6j")]
SAME += [("000-1.1", "003-2.1"), ("002-2.3", "003-2.3"), ("002-3.3c", "004-4")]
SAME += [("001-3d", "003-7.5b"), ("001-2c", "003-7.5b"), ("002-2.7b", "001-3b")]
OPPOSITE = [("001-2c", "001-3c"), ("001-3d", "002-4.1b"), ("002-2.2b", "003-7.2")]
OPPOSITE += [("003-7.5b", "003-2.3b"), ("000-1e", "002-1.3"), ("002-2.1g", "002-2.1i")]


@pytest.mark.parametrize(
    ("id", "fault"),
    [pytest.param(id, fault, marks=[pytest.mark.slow] * (id not in QUICK)) for id, fault in FAULTS],
    ids=[f"{id} {fault.function}" for id, fault in FAULTS],
)
def test_an_entry_notices_a_fault_of_its_subject(id: str, fault: Fault):
    assert notices(ENTRIES[id], fault)


def test_every_fault_is_in_a_function_of_the_product():
    """Also those that only the slow tests plant."""
    for _, fault in FAULTS:
        assert fault.changed_code().co_name == fault.find_function().__name__


def test_nearly_every_entry_with_product_code_has_a_fault():
    runs = {id for id, entry in ENTRIES.items() if entry.run is not None and not entry.arithmetic}
    runs -= STORED
    covered = {id for id, _ in FAULTS}
    assert covered <= runs
    assert len(covered) >= 0.95 * len(runs), sorted(runs - covered)


def test_a_planted_fault_ends_with_its_context():
    entry, (fault,) = ENTRIES["003-2.2c"], [fault for id, fault in FAULTS if id == "003-2.2c"]
    before = entry.check().numbers
    assert notices(entry, fault)
    assert entry.check().numbers == before


def test_a_fault_must_be_in_the_text_of_its_function():
    fault = replace(FAULTS[0][1], old="this is not there")
    with pytest.raises(AssertionError, match="0 times"), planted(fault):
        pass


# --- Product code, or arithmetic ------------------------------------------------------------------


@contextmanager
def functions_of_the_product() -> Iterator[set[str]]:
    """The product's functions that run in this context, without those of `learn` and of figures."""
    called: set[str] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PRODUCT):
            return
        if path.relative_to(PRODUCT).parts[0] not in ("learn", "report", "util"):
            called.add(f"{path.name} {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield called
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("id", sorted({id for id, e in ENTRIES.items() if e.arithmetic} | STORED))
def test_arithmetic_runs_no_part_of_the_product(id: str):
    with functions_of_the_product() as called:
        assert learn.checked(ENTRIES[id]).verdict == ENTRIES[id].verdict
    assert called == set()


def test_few_statements_are_arithmetic():
    assert sum(entry.arithmetic for entry in ENTRIES.values()) <= len(ENTRIES) / 20


# --- Three outcomes -------------------------------------------------------------------------------


def test_wrong_needs_a_true_correction():
    assert judge(False, corrected=True).verdict == Verdict.WRONG
    assert judge(False, corrected=False).verdict == judge(False).verdict == Verdict.FAULT
    assert judge(True, corrected=False).verdict == Verdict.HOLDS


@pytest.mark.parametrize(("language", "words"), [("en", "Neither the"), ("zh", "更正后的说法")])
def test_a_fault_is_reported_with_its_numbers(language: str, words: str):
    entry = replace(ENTRIES["001-2"], run=lambda: judge(False, one=3))
    result = entry.check()
    assert result.verdict == Verdict.FAULT
    assert words in result.reason(language)
    assert "one = 3" in result.reason(language)


# --- Statements about training --------------------------------------------------------------------

TRAINED = {
    "002-FF.1b": cited_papers.rank_of_trained_states,
    "002-FF.2": cited_papers.collaborative_without_retraining,
    "002-FF.4": cited_papers.aligned_heads,
    "002-FF.5": cited_papers.channels_by_distance,
    "002-FF.8": cited_papers.heads_removed_alone,
}


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.slow] * (id == "002-FF.8")) for id in TRAINED]
)
def test_statements_about_training_do_not_hold_for_random_weights(id: str):
    assert ENTRIES[id].run is TRAINED[id]
    assert TRAINED[id](trained=False).verdict == Verdict.FAULT


# --- Entries about one subject --------------------------------------------------------------------


def is_true(entry: Entry) -> bool:
    return entry.verdict in (Verdict.HOLDS, Verdict.HOLDS_IF)


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_statements_have_one_verdict(one: str, other: str):
    assert ENTRIES[one].verdict == ENTRIES[other].verdict


@pytest.mark.parametrize(("one", "other"), OPPOSITE)
def test_opposite_statements_have_opposite_verdicts(one: str, other: str):
    assert is_true(ENTRIES[one]) != is_true(ENTRIES[other])


def test_one_run_answers_one_statement():
    """Two entries with one run and different verdicts would contradict each other."""
    verdicts: dict[Any, set[Verdict]] = {}
    for entry in ENTRIES.values():
        if entry.run is not None:
            verdicts.setdefault(entry.run, set()).add(entry.verdict)
    assert [run for run, found in verdicts.items() if len(found) > 1] == []


def test_heads_with_a_role_are_the_same_in_both_entries():
    """002-2.6c and 002-2.1j count one set of heads: those of self-attention, and all."""
    numbers = learn.checked(ENTRIES["002-2.6c"]).numbers
    roles = learn.checked(ENTRIES["002-2.1j"]).numbers
    elsewhere = learn.checked(ENTRIES["002-2.6m"]).numbers
    cross = learn.checked(ENTRIES["002-3.3d"]).numbers
    others = int(roles["named"]) - int(numbers["named"])
    assert 0 <= others <= int(cross["heads"])
    assert others >= int(cross["aligned"])
    assert numbers["heads"] == elsewhere["heads"]
    assert int(elsewhere["named"]) <= int(numbers["named"])
    assert len({one["texts"] for one in (numbers, roles, elsewhere, cross)}) == 1
