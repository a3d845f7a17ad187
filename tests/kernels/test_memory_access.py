"""Kernels touch only the memory of their call: tensors between guard pages."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise
from headwise.kernels.head_mixing import HeadMixingArgs

TESTS = Path(__file__).resolve().parent.parent
SOURCES = Path(headwise.__file__).parent
PLANTED = ["read_behind_end", "write_behind_end"]


def run_checks(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run kernels/memory_checks.py in a process of its own."""
    path = os.pathsep.join([str(SOURCES.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "kernels.memory_checks", *arguments],
        env=os.environ | {"HEADWISE_KERNELS": "wait", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_no_kernel_touches_other_memory():
    run = run_checks()
    assert (run.returncode, run.stdout) == (0, "no access outside\n"), run.stderr


@pytest.mark.slow
def test_guard_pages_catch_an_access_outside():
    run = run_checks("--plant", *PLANTED)
    assert run.stdout.splitlines() == [
        f"{name} ended with {-signal.SIGSEGV}" for name in PLANTED
    ], run.stderr


# Everything that turns memory into an address, or an address into memory, with the only file that
# may do it.
ADDRESSES = {
    r"(?<!untyped_storage\(\))\.data_ptr\(": {"kernels/launch.py"},
    r"\.buffer_info\(": {"kernels/launch.py"},
    r"inttoptr\(": {"kernels/simd.py"},
    r"__(cuda_)?array_interface__|\.from_address\(|\.ctypes\.data|addressof\(|ctypes\.(cast|POINTER|memmove)\(": set(),
    r"carray\(|farray\(|address_as_void_pointer|cffi": set(),
}


@pytest.mark.parametrize("pattern", ADDRESSES)
def test_only_argument_records_take_addresses_of_tensors(pattern: str):
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    assert found == ADDRESSES[pattern]


KERNEL_FILES = sorted(
    path.name
    for path in (SOURCES / "kernels").glob("*.py")
    if re.search("^@(njit|extending.register_jitable)", path.read_text(), re.MULTILINE)
    and path.name not in ("jit.py", "simd.py")  # the foundation, which computes nothing by itself
)


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_a_kernel_file_opens_with_its_maths_its_loop_order_and_plain_pytorch(name: str):
    tree = ast.parse((SOURCES / "kernels" / name).read_text())
    head = ast.get_docstring(tree) or ""
    assert re.search(r"^ {4}\S", head, re.MULTILINE), "no formula"
    assert "Loop order" in head
    assert re.search(r"[Ii]n plain PyTorch[^`]*`\S", head.replace("\n", " "))


def test_every_operation_has_a_kernel_file():
    from headwise.kernels.__main__ import find_kernel_sets

    assert {f"{kernels.module}.py" for kernels in find_kernel_sets()} <= set(KERNEL_FILES)


# --- Argument records -----------------------------------------------------------------------------


def test_a_record_holds_addresses_integers_and_floats():
    x = torch.ones(2, 16)
    args = HeadMixingArgs.make(q_gate=x, num_queries=2)
    assert (args.q_gate, args.k_gate, args.num_queries, args.num_keys) == (x.data_ptr(), 0, 2, 0)
    changed = args.replace(k_gate=x, num_queries=3)
    assert (changed.k_gate, changed.num_queries, changed.q_gate) == (x.data_ptr(), 3, x.data_ptr())
    assert (args.k_gate, args.num_queries) == (0, 2)
    assert changed.tensors[-1] is x
    with pytest.raises(TypeError, match="colour"):
        HeadMixingArgs.make(colour=1)
