"""The three lists of mutation testing, in TOML files beside this one.

- tests_of_module.toml: the modules that samples are taken from, and the tests that cover each.
- guards.toml: mutants that the named tests must kill. Each stands for a law or for a bug that was
  once made.
- equivalent.toml: mutants that change nothing that a test could see, each with its reason.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.operators import Address, mutate, points

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
TESTS = ROOT / "tests"
SOURCE = ROOT / "src"
PACKAGE = "headwise"
DOCTESTS = "house/test_house.py::test_doctests"


@dataclass(frozen=True)
class Trial:
    """One mutant to test: its name, its address, the tests to run, as pytest node ids relative to
    tests/, and the change that is meant ("" for any).
    """

    name: str
    address: Address
    tests: tuple[str, ...]
    change: str = ""


def load(name: str, table: str) -> list[dict[str, Any]]:
    """The entries of one table of a TOML file."""
    return tomllib.loads((FOLDER / name).read_text()).get(table, [])


def address_of(entry: dict[str, Any]) -> Address:
    """The address that an entry of guards.toml or equivalent.toml gives."""
    return Address(entry["module"], entry["function"], entry["operator"], entry["nth"])


def guards() -> list[Trial]:
    """All entries of guards.toml."""
    return [
        Trial(entry["name"], address_of(entry), tuple(entry["tests"]), entry["change"])
        for entry in load("guards.toml", "guard")
    ]


def read_covering_tests() -> dict[str, tuple[str, ...]]:
    """For each module of the numeric core the tests that cover it, its own doctests first."""
    entries = load("tests_of_module.toml", "cover")
    return {entry["module"]: (doctests(entry["module"]), *entry["tests"]) for entry in entries}


def dotted(module: str) -> str:
    """The name by which a module is imported: headwise.attention.parts.softmax for parts/softmax.py."""
    return f"{PACKAGE}/{module}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def doctests(module: str) -> str:
    """The node id of the test that runs a module's doctests."""
    return f"{DOCTESTS}[{dotted(module)}]"


def equivalents() -> dict[Address, str]:
    """Mutants that no test can kill, and why."""
    return {address_of(entry): entry["reason"] for entry in load("equivalent.toml", "equivalent")}


# --- whether the lists fit the repository ---------------------------------------------------------


def find_errors() -> list[str]:
    """What is wrong in the three lists: missing modules, mutation points, tests or reasons, and
    repeated names.
    """
    addresses = [(trial.name, trial.address) for trial in guards()]
    addresses += [(f"equivalent {address}", address) for address in equivalents()]
    errors = [
        f"{name}: the name is used twice"
        for name, count in Counter(n for n, _ in addresses).items()
        if count > 1
    ]
    for name, address in addresses:
        path = SOURCE / PACKAGE / address.module
        if not path.is_file():
            errors.append(f"{name}: no module {address.module}")
        elif address not in points_of(path, address.module):
            errors.append(f"{name}: no mutation point {address}")
    errors += [
        f"{address}: no reason is given"
        for address, reason in equivalents().items()
        if not reason.strip()
    ]
    for trial in guards():
        errors += missing_tests(trial.name, trial.tests)
        errors += moved_change(trial)
    modules = Counter(entry["module"] for entry in load("tests_of_module.toml", "cover"))
    errors += [
        f"tests_of_module.toml: {module} has {count} entries"
        for module, count in modules.items()
        if count > 1
    ]
    for module, tests in read_covering_tests().items():
        errors += (
            []
            if (SOURCE / PACKAGE / module).is_file()
            else [f"tests_of_module.toml: no module {module}"]
        )
        errors += missing_tests(module, tests[1:])
        errors += own_test_left_out(module, tests)
    return errors


def moved_change(trial: Trial) -> list[str]:
    """That a guard's address is no longer the change that it stands for."""
    path = SOURCE / PACKAGE / trial.address.module
    is_named = trial.change and path.is_file()
    if not is_named or trial.address not in points_of(path, trial.address.module):
        return []
    change = mutate(path.read_text(), trial.address).change
    if change == trial.change:
        return []
    return [f"{trial.name}: {trial.address} is now {change}, not {trial.change}; correct nth"]


def own_test_left_out(module: str, tests: Iterable[str]) -> list[str]:
    """That the test file named after a module does not cover it: mutants would survive that it
    kills.
    """
    folder, _, name = module.rpartition("/")
    own = f"{folder}/test_{name}".lstrip("/")
    listed = {test.partition("::")[0] for test in tests}
    return (
        [f"{module}: does not name its own tests, {own}"]
        if (TESTS / own).is_file() and own not in listed
        else []
    )


@functools.cache
def points_of(path: Path, module: str) -> frozenset[Address]:
    """All mutation points of one file."""
    return frozenset(points(path.read_text(), module))


def missing_tests(name: str, tests: Iterable[str]) -> list[str]:
    """Why tests of an entry cannot run: there are none, or the file or the
    function does not exist.
    """
    tests = list(tests)
    errors = [] if tests else [f"{name}: names no test"]
    for test in tests:
        file, _, function = test.partition("::")
        path = TESTS / file
        if not path.is_file():
            errors.append(f"{name}: no test file {file}")
        elif function and function.split("[")[0] not in defined(path):
            errors.append(f"{name}: no test {test}")
    return errors


@functools.cache
def defined(path: Path) -> set[str]:
    """The names of all functions in a file."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
