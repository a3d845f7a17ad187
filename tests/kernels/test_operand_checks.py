"""Operations refuse operands that do not fit before a kernel gets their addresses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise
from headwise.kernels import open_query_attention
from headwise.kernels.operand_checks import FLOAT, OperandChecks, check_indices, check_ranges
from kernels import bad_operands

TESTS = Path(__file__).resolve().parent.parent


def run_calls(skip: int) -> tuple[list[str], int]:
    """Return the lines that the script prints from a call on, and its exit status."""
    path = os.pathsep.join(
        [str(Path(headwise.__file__).parent.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    )
    run = subprocess.run(
        [sys.executable, "-m", "kernels.bad_operands", "--skip", str(skip)],
        env=os.environ | {"HEADWISE_KERNELS": "wait", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    return run.stdout.splitlines(), run.returncode


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The outcome of every call; the script goes on behind a call that ends its process."""
    outcomes: dict[str, str] = {}
    while True:
        lines, status = run_calls(len(outcomes))
        texts = [json.loads(line) for line in lines]
        outcomes |= dict(
            zip(texts[::2], [*texts[1::2], f"ended the process with {status}"], strict=False)
        )
        if status == 0:
            return outcomes
        assert len(texts) % 2, "the script failed between two calls"


GROUP_NAMES = [group.__name__.strip("_") for group in bad_operands.GROUPS]


@pytest.mark.lengthy
@pytest.mark.parametrize("group", GROUP_NAMES)
def test_operands_that_do_not_fit_are_refused(outcomes: dict[str, str], group: str):
    own = {name: outcome for name, outcome in outcomes.items() if name.startswith(group)}
    fitting = {name for name in own if name.endswith("operands that fit")}
    special = {name for name in own if name.endswith(bad_operands.EQUAL_PROBLEMS)}
    assert {own[name] for name in fitting} == {"accepted"}
    assert {
        name: own[name]
        for name in special
        if own[name] != "equal" and "ValueError" not in own[name]
    } == {}
    others = own.keys() - fitting - special
    assert len(others) > 30
    assert {name: own[name] for name in others if "Error: " not in own[name]} == {}


@pytest.mark.lengthy
def test_a_negative_view_decodes_as_its_numbers(outcomes: dict[str, str]):
    decode = {
        name: o
        for name, o in outcomes.items()
        if name.startswith("paged_decode 2") and "negative" in name
    }
    assert set(decode.values()) == {"equal"}
    assert len(decode) == 5


def test_every_registered_operation_is_driven():
    registered: set[str] = set()
    for path in (Path(headwise.__file__).parent / "kernels").glob("*.py"):
        registered |= set(re.findall(r'custom_op\(\s*"headwise::(\w+)"', path.read_text()))
    registered |= {"flash_attention", "flash_attention_backward"}
    registered -= {"open_query_attention", "open_query_attention_backward"}  # for GPUs alone
    script = Path(bad_operands.__file__).read_text()
    assert {name for name in registered if f"OPS.{name}(" not in script} == set()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.ones(2, 5, 3, 8)}, "4 heads do not share 3 key heads evenly"),
        ({"v": torch.ones(2, 6, 2, 8)}, r"v is torch.float32 \[2, 6, 2, 8\]; give"),
        ({"opened": torch.ones(2, 5, 4)}, "opened is torch.float32"),
        ({"q": torch.ones(2, 5, 4, 8).double()}, "q is torch.float64"),
        ({}, "q is on cpu; give tensors of a GPU and Triton"),
    ],
)
def test_operands_of_open_queries_that_do_not_fit_are_refused(
    changed: dict[str, torch.Tensor], message: str
):
    tensors = {
        "q": torch.ones(2, 5, 4, 8),
        "k": torch.ones(2, 5, 2, 8),
        "v": torch.ones(2, 5, 2, 8),
        "opened": torch.ones(2, 5, 4, dtype=torch.bool),
    } | changed
    if "k" in changed:
        tensors["v"] = changed["k"]
    with pytest.raises(ValueError, match=message):
        open_query_attention.attend_open_queries(*tensors.values(), 0, 1.0, 1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(3)),
            r"factors is torch.float32 \[3\]; give torch.float32 \[2\]",
        ),
        (
            (torch.ones(2, 3).half(), torch.ones(2)),
            r"x is torch.float16 \[2, 3\]; give torch.float32 or torch.float64",
        ),
        ((torch.ones(2), torch.ones(2)), r"x is torch.float32 \[2\]; give .* \[R, C\]"),
        ((torch.ones(2, 3), None), "factors is missing"),
        ((torch.ones(2, 3),), "there are 1 tensors; give 2"),
        ((torch.ones(2, 3), torch.ones(2), torch.ones(2)), "there are 3 tensors; give 2"),
        ((torch.ones(2, 3), torch.ones(2, device="meta")), "factors .* is on meta"),
        (
            (bad_operands.shorten_memory(torch.ones(2, 3)), torch.ones(2)),
            r"x \[2, 3\] needs 24 bytes of a storage of 20",
        ),
    ],
)
def test_the_first_operand_that_does_not_fit_is_named(
    tensors: tuple[torch.Tensor | None, ...], message: str
):
    checks = OperandChecks("scale_rows", x=FLOAT + "R C", factors="R")
    checks.check(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match="cannot run headwise::scale_rows: " + message):
        checks.check(*tensors)


def test_every_tensor_of_a_list_is_checked():
    checks = OperandChecks("multiply", x=FLOAT + "M K", matrix="* K+")
    x, fitting = torch.ones(2, 3), torch.ones(5, 3)
    checks.check(x)
    checks.check(x, fitting, fitting[:2])
    bad = (
        torch.ones(5, 4),
        torch.ones(3),
        fitting.double(),
        fitting.to("meta"),
        bad_operands.shorten_memory(fitting),
    )
    for matrix in bad:
        with pytest.raises(ValueError, match="cannot run headwise::multiply: matrix "):
            checks.check(x, fitting, matrix)


def test_operands_that_lack_are_skipped_and_choices_of_sizes_are_kept():
    checks = OperandChecks("op", x=FLOAT + "B T", rows="int64: 1|B 2?", gate="B 0|1?")
    x, rows = torch.ones(3, 5), torch.zeros(1, 2, dtype=torch.int64)
    for good in (None, rows, rows.expand(3, 2)):
        checks.check(x, good, None)
    checks.check(x, None, torch.ones(3, 0))
    for bad in ((rows.expand(2, 2), None), (None, torch.ones(3, 2)), (rows.int(), None)):
        with pytest.raises(ValueError, match="cannot run headwise::op: "):
            checks.check(x, *bad)


def test_memory_of_strided_tensors_is_measured_to_their_last_element():
    checks, base = OperandChecks("scale_rows", x=FLOAT + "R C"), torch.ones(4, 6)
    view = base[1::2, ::3]
    checks.check(view)
    base.untyped_storage().resize_(4 * 22)  # the last element of the view is the 22nd
    checks.check(view)
    base.untyped_storage().resize_(4 * 21)
    with pytest.raises(ValueError, match="needs 88 bytes of a storage of 84"):
        checks.check(view)


def test_empty_tensors_need_no_memory():
    checks = OperandChecks("scale_rows", x=FLOAT + "R C")
    for shape, strides, offset in (((5, 0), (1, 1), 3), ((0, 5), (5, 1), 0), ((5, 0), (100, 1), 0)):
        checks.check(torch.empty(3).as_strided(shape, strides, offset))
    base = torch.ones(5, 3)
    empty = base[5:]
    base.untyped_storage().resize_(0)
    checks.check(empty)
    with pytest.raises(ValueError, match="needs 60 bytes of a storage of 0"):
        checks.check(base)


def test_tables_are_checked_without_overflow():
    far = torch.iinfo(torch.int64)
    check_indices("op", "rows", torch.empty(0, dtype=torch.int64), 0)
    check_ranges("op", "rows", torch.tensor([0, 3]), torch.tensor([3, 0]), 3)
    for begin, count in ((far.max, far.max), (far.min, 1), (1, far.max), (0, far.min), (4, 0)):
        with pytest.raises(ValueError, match="within 0 to 3"):
            check_ranges("op", "rows", torch.tensor([begin]), torch.tensor([count]), 3)
    for number in (-1, 3, far.max, far.min):
        with pytest.raises(ValueError, match="give numbers from 0 to 2"):
            check_indices("op", "rows", torch.tensor([0, number]), 3)
