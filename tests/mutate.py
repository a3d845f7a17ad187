"""Plant bugs in copies of the source, one at a time, and see whether the named tests catch them.

The working tree is never edited. `tests/planted.py` holds the list and is the command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AT_A_TIME = 2
LIMIT = 300  # seconds for the tests of one bug; a run that reaches it has proved nothing

# The tests run the copy or nothing: an editable install must not win over PYTHONPATH.
WRONG_SOURCE = 97
RUN = f"""
import importlib.util, pathlib, pytest, sys
copy, *args = sys.argv[1:]
origin = importlib.util.find_spec("headwise").origin
if not pathlib.Path(origin).resolve().is_relative_to(copy):
    print("headwise comes from", origin, "and not from", copy)
    sys.exit({WRONG_SOURCE})
sys.exit(pytest.main(args))
"""
VERDICTS = {
    0: "SURVIVED",
    1: "caught",
    2: "BROKEN: the tests cannot be collected; plant a bug that imports",
    4: "BROKEN: a named test does not exist",
    5: "BROKEN: no named test ran",
    WRONG_SOURCE: "BROKEN: the tests ran another copy of headwise",
}


@dataclass(frozen=True)
class Bug:
    """`old` replaced by `new` in one source file, and the tests that fail because of it.

    `file` is relative to src/headwise; `old` stands in it exactly once. `tests` are pytest node ids relative
    to tests/; the first failure among them catches the bug.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The source with the bug in it; ValueError when the patch no longer fits."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its text occurs {found} times in {self.file}; it must occur once")
        if self.old == self.new:
            raise ValueError(f"{self.name}: it replaces its text by the same text")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    bug: str
    verdict: str
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        return self.verdict == "caught"


def misfits(bugs: Sequence[Bug], source: Path = ROOT / "src" / "headwise") -> list[str]:
    """Why these bugs cannot be planted: a patch does not fit, a test has no file, a name is used twice."""
    used = Counter(names(bugs))
    said = [f"{name}: the name is used twice" for name in used if used[name] > 1]
    for bug in bugs:
        try:
            bug.planted((source / bug.file).read_text())
        except (OSError, ValueError) as error:
            said.append(str(error))
        if not bug.tests:
            said.append(f"{bug.name}: it names no test")
        lost = [test for test in bug.tests if not (ROOT / "tests" / test.split("::")[0]).is_file()]
        said += [f"{bug.name}: there is no test file for {test}" for test in lost]
    return said


def names(bugs: Sequence[Bug]) -> list[str]:
    return [bug.name for bug in bugs]


def pytest_on(source: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """The exit status (None: out of time) and the output of these tests, run on this source folder."""
    args = ["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", RUN, str(source), *args],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace")
    return ran.returncode, ran.stdout


def tried(bug: Bug) -> Outcome:
    """What the named tests say of a copy with this bug in it."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headwise-bug-") as folder:
        source = Path(folder).resolve() / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        target = source / "headwise" / bug.file
        target.write_text(bug.planted(target.read_text()))
        status, output = pytest_on(source, bug.tests)
    late = f"TIMEOUT after {LIMIT} s: it proves nothing"
    verdict = late if status is None else VERDICTS.get(status, f"BROKEN: pytest ended with {status}")
    return Outcome(bug.name, verdict, time.perf_counter() - begun, output)


def run(bugs: Sequence[Bug]) -> int:
    """0 when the named tests pass on the source as it is and catch every bug; 1 otherwise."""
    if said := misfits(bugs) or ([] if bugs else ["no bug is planted: a list without bugs proves nothing"]):
        print(*said, sep="\n", file=sys.stderr)
        return 1
    tests = sorted({test for bug in bugs for test in bug.tests})
    print(f"{len(bugs)} bugs, {len(tests)} tests; first the tests on the source as it is")
    status, output = pytest_on(ROOT / "src", tests)
    if status != 0:
        print(output, "these tests must pass before a bug is planted", sep="\n", file=sys.stderr)
        return 1
    width = max(map(len, names(bugs)))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        outcomes = []
        for outcome in pool.map(tried, bugs):
            outcomes.append(outcome)
            print(f"{outcome.bug:{width}}  {1000 * outcome.seconds:7.0f} ms  {outcome.verdict}", flush=True)
    missed = [outcome for outcome in outcomes if not outcome.caught]
    for outcome in missed:
        print(f"\n--- {outcome.bug}: {outcome.verdict}\n{outcome.output[-2000:]}")
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} caught")
    return 1 if missed else 0


def main(bugs: Sequence[Bug], argv: Sequence[str] | None = None) -> int:
    """The command: run the bugs named, or all of them."""
    parser = argparse.ArgumentParser(prog="planted.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these bugs")
    parser.add_argument("--list", action="store_true", help="say which bugs there are and stop")
    asked = parser.parse_args(argv)
    if unknown := set(asked.names) - set(names(bugs)):
        parser.error(f"no bug is named {', '.join(sorted(unknown))}; --list names them")
    chosen = [bug for bug in bugs if not asked.names or bug.name in asked.names]
    if asked.list:
        for bug in chosen:
            print(f"{bug.name}  ({bug.file})  {' '.join(bug.tests)}")
        return 0
    return run(chosen)
