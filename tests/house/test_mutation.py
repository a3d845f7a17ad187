"""The mutation operators change what they say, samples are deterministic, and the runner tells
killed from survived.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutation import lists, runner
from mutation.lists import Trial
from mutation.operators import OPERATORS, Address, mutate, points

CODE = '''
"""Module docstring 1 + 1."""
LIMIT = 3

class Window:
    size: int = 2

    def boxes(self, i, j=4):
        """Docstring."""
        def inner(k):
            return k // 2
        if i < j and not self.size:
            raise ValueError("a" + "b")
        return max(inner(i), -j)[1:i]

    def examples(self):
        return 1 + 1
'''


def after(operator: str, source: str) -> list[str]:
    """The source after each mutation of one operator."""
    return [
        mutate(source, point).source.strip()
        for point in points(source, "x.py")
        if point.operator == operator
    ]


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        ("comparison", "a < b == c", ["a <= b == c", "a < b != c"]),
        ("comparison", "a in b", ["a not in b"]),
        ("arithmetic", "a + b // c", ["a - b // c", "a + b * c"]),
        ("arithmetic", "a *= b", ["a //= b"]),
        ("arithmetic", "a / b & c", ["a / b | c", "a * b & c"]),
        ("constant", "f(1, 0.5, True, 'x')", ["f(2, 0.5, True, 'x')", "f(1, 1.5, True, 'x')"]),
        ("constant-down", "f(0, 2)", ["f(0, 1)"]),
        ("and-or", "a and b", ["a or b"]),
        ("not", "not a", ["a"]),
        ("not", "-a", ["a"]),
        ("extreme", "min(a, b.amax())", ["max(a, b.amax())", "min(a, b.amin())"]),
        ("slice", "a[b:c]", ["a[b + 1:c]", "a[b:c + 1]"]),
        ("negate", "a if b else c", ["a if not b else c"]),
        ("negate", "if a:\n    b()", ["if not a:\n    b()"]),
        ("boolean", "f(True)", ["f(False)"]),
        ("operand", "a * b", ["a", "b"]),
        ("operand", "a and b and c", ["b and c", "a and c", "a and b"]),
        ("condition", "a if b else c", ["a", "c"]),
        ("condition", "if a:\n    b()", ["if True:\n    b()", "if False:\n    b()"]),
        ("statement", "'text'\na = 1\nb()", ["'text'\npass\nb()", "'text'\na = 1\npass"]),
    ],
)
def test_operators_make_their_described_change(operator: str, source: str, expected: list[str]):
    assert [text.replace('"""', "'") for text in after(operator, source)] == expected


def test_every_operator_applies_somewhere_and_gives_code_that_parses():
    source = CODE + "\nif LIMIT:\n    LIMIT += sum(range(LIMIT)) if True else 0\n"
    found = points(source, "x.py")
    assert {point.operator for point in found} == set(OPERATORS)
    for point in found:
        assert ast.dump(ast.parse(mutate(source, point).source)) != ast.dump(ast.parse(source)), (
            point
        )


def test_points_are_addressed_by_function_and_number_whatever_the_layout():
    spaced = CODE.replace("LIMIT = 3", "# a comment\n\n\nLIMIT = (3)")
    assert points(spaced, "x.py") == points(CODE, "x.py")
    found = [(p.function, p.nth) for p in points(CODE, "x.py") if p.operator == "constant"]
    boxes = "Window.boxes"
    assert found == [
        *(("<module>", 1), ("Window", 1), (boxes, 1), (f"{boxes}.inner", 1), (boxes, 2))
    ]
    with pytest.raises(KeyError, match=r"no mutation point x\.py Window not 9"):
        mutate(CODE, Address("x.py", "Window", "not", 9))


# --- lists ----------------------------------------------------------------------------------------


def test_the_lists_fit_the_repository():
    assert lists.find_errors() == []
    assert 0 < len(lists.guards()) <= 120


def test_errors_of_a_list_are_all_named(monkeypatch: pytest.MonkeyPatch):
    address = Address("util/errors.py", "<module>", "constant", 999)
    wrong = [
        Trial("twice", address, ("house/test_mutation.py",)),
        Trial("twice", Address("absent.py", "f", "not", 1), ("house/absent.py",)),
        Trial("empty", address, ()),
        Trial("gone", address, ("house/test_mutation.py",), "a -> b"),
        Trial("test", address, ("house/test_mutation.py::test_absent[1]",)),
        Trial("moved", lists.guards()[0].address, ("house/test_mutation.py",), "a -> b"),
    ]
    monkeypatch.setattr(lists, "guards", lambda: wrong)
    monkeypatch.setattr(lists, "equivalents", lambda: {address: " "})
    monkeypatch.setattr(
        lists,
        "read_covering_tests",
        lambda: {"attention/masking/patterns.py": ("doctests", "attention/parts/test_alibi.py")},
    )
    errors = "\n".join(lists.find_errors())
    for error in (
        "twice: the name is used twice",
        "twice: no mutation point util/errors.py <module> constant 999",
        "twice: no module absent.py",
        "twice: no test file house/absent.py",
        "empty: names no test",
        "test: no test house/test_mutation.py::test_absent[1]",
        "no reason is given",
        "not a -> b; correct nth",
        "gone: no mutation point",
        "attention/masking/patterns.py: does not name its own tests, attention/masking/test_patterns.py",
        "attention/masking/patterns.py: no test file attention/parts/test_alibi.py",
    ):
        assert error in errors


def test_samples_are_deterministic():
    tests = dict(list(lists.read_covering_tests().items())[:2])
    first, again, other = (runner.sample(tests, {}, 20, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len({trial.address for trial in first}) == 20
    assert not {
        trial.address for trial in runner.sample(tests, {first[0].address: "why"}, 20, 0)
    } & {first[0].address}


# --- runner ---------------------------------------------------------------------------------------

PACKAGE = '''
"""A package with one function."""
HALF = 1 // 1


def add(a, b):
    """
    >>> add(1, 2)
    3
    """
    unused = 1
    return a + b


def loop(n):
    while n > 0:
        n -= 1
    return n
'''
TEST = """
import headwise

def test_add():
    assert headwise.add(1, 2) == 3

def test_loop():
    assert headwise.loop(3) == 0
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a small package named headwise and its tests, in the place of ours."""
    (tmp_path / "src" / "headwise").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    source = PACKAGE.replace("1 // 1", "1 // (1 - 0)")
    (tmp_path / "src" / "headwise" / "__init__.py").write_text(source)
    (tmp_path / "tests" / "test_small.py").write_text(TEST)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts in half of the time
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "SOURCE", tmp_path / "src")
    yield tmp_path
    assert (tmp_path / "src" / "headwise" / "__init__.py").read_text() == source


def trial(function: str, operator: str, nth: int = 1, test: str = "test_small.py") -> Trial:
    return Trial(function, Address("__init__.py", function, operator, nth), (test,))


@pytest.mark.parametrize(
    ("mutant", "verdict", "reason"),
    [
        (trial("add", "constant"), "survived", "every test passes"),
        (trial("add", "arithmetic"), "killed", ""),
        (trial("<module>", "constant", 3), "broken", "the mutated module cannot be imported"),
        (
            trial("add", "arithmetic", test="test_small.py::test_absent"),
            "broken",
            "pytest cannot collect the tests, or a named test does not exist",
        ),
        (trial("loop", "arithmetic"), "timeout", "after 1 s"),
    ],
)
def test_verdicts(small: Path, mutant: Trial, verdict: str, reason: str):
    # a busy machine may need long to start pytest
    time_limit = 1.0 if verdict == "timeout" else 120.0
    result = runner.run_trial(mutant, time_limit)
    assert (result.verdict, result.reason) == (verdict, reason), result.output


def test_another_copy_of_the_package_is_noticed(small: Path, monkeypatch: pytest.MonkeyPatch):
    """The working folder comes first on the path of `python -c`, so a package in it wins over
    PYTHONPATH.
    """
    (small / "headwise").mkdir()
    (small / "headwise" / "__init__.py").write_text(PACKAGE)
    result = runner.run_trial(trial("add", "arithmetic"))
    assert (result.verdict, result.reason) == (
        "broken",
        "the tests would run another copy of the package",
    )


def test_tests_must_pass_on_the_unchanged_package_with_the_kernels_of_the_tests(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The mutated module is imported before conftest.py, which sets the policy of kernels."""
    monkeypatch.setenv("HEADWISE_KERNELS", "auto")
    module, test = small / "src" / "headwise" / "policy.py", small / "tests" / "test_small.py"
    module.write_text("import os\nPOLICY = os.environ['HEADWISE_KERNELS']\n")
    source = "from headwise import policy\n\ndef test():\n    assert policy.POLICY == '{}'\n"
    for policy in ("wait", "auto"):
        test.write_text(source.format(policy))
        assert runner.passes_unchanged([trial("add", "arithmetic")]) == (policy == "wait")
    assert "must pass on the unchanged package first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verdicts", "rate", "codes"),
    [
        ("killed survived", "0.50", [0, 1, 1]),
        ("killed killed timeout survived broken", "0.50", [0, 1, 1]),  # broken ones do not count
        ("killed broken", "1.00", [0, 0, 1]),
    ],
)
def test_the_report_gives_the_kill_rate(verdicts, rate, codes, capsys, monkeypatch):
    results = [
        runner.Result(trial("add", "not"), verdict, "", "a + b -> a - b", 1.0, "")
        for verdict in verdicts.split()
    ]
    monkeypatch.setattr(runner, "run_trials", lambda *args: results)
    assert [runner.report([], aim) for aim in (0.5, 0.9, 1)] == codes
    out = capsys.readouterr().out
    assert "add: a + b -> a - b" in out
    assert f"kill rate {rate}, aim 0.90" in out
    assert runner.kill_rate([]) == 0.0
