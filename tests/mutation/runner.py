"""Run tests on mutated copies of the package. The working tree is never edited."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutation.lists import PACKAGE, ROOT, SOURCE, Trial, dotted
from mutation.operators import SAMPLED, Address, mutate, points

JOBS = 2  # mutants tested at the same time
TIME_LIMIT = 300.0  # seconds for the tests of one mutant
OUTPUT_LINES = 15  # lines of pytest's output shown for a mutant that was not killed

# An editable install must not win over PYTHONPATH: check where the package comes from before
# running a test.
WRONG_SOURCE = 97
CANNOT_IMPORT = 98
# The mutated module is imported before tests/conftest.py, which sets the same policy of kernels.
TEST_ENVIRONMENT = {"HEADWISE_KERNELS": "wait", "PYTHONDONTWRITEBYTECODE": "1"}
RUN_PYTEST = f"""
import importlib, importlib.util, pathlib, sys
copy, module, *args = sys.argv[1:]
origin = importlib.util.find_spec("{PACKAGE}").origin
if not pathlib.Path(origin).resolve().is_relative_to(copy):
    print("{PACKAGE} is imported from", origin, "and not from", copy)
    sys.exit({WRONG_SOURCE})
try:
    importlib.import_module(module)
except Exception as error:
    print("cannot import", module, "-", repr(error))
    sys.exit({CANNOT_IMPORT})
import pytest
sys.exit(pytest.main(args))
"""
VERDICTS = {
    0: ("survived", "every test passes"),
    1: ("killed", ""),
    2: ("broken", "pytest cannot collect the tests"),
    4: ("broken", "pytest cannot collect the tests, or a named test does not exist"),
    5: ("broken", "no named test ran"),
    WRONG_SOURCE: ("broken", "the tests would run another copy of the package"),
    CANNOT_IMPORT: ("broken", "the mutated module cannot be imported"),
}


@dataclass(frozen=True)
class Result:
    """What the tests say about one mutant: `verdict` is killed, survived, timeout or broken."""

    trial: Trial
    verdict: str
    reason: str
    change: str
    seconds: float
    output: str

    def line(self) -> str:
        """One line of the report."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.verdict:8}  {self.seconds:6.1f} s  {self.trial.name}: {self.change}{reason}"


def sample(
    tests: Mapping[str, tuple[str, ...]], skipped: Mapping[Address, str], size: int, seed: int
) -> list[Trial]:
    """`size` mutation points of these modules, chosen at random by `seed`, without those in
    `skipped`.
    """
    found: list[Address] = []
    for module in sorted(tests):
        source = (SOURCE / PACKAGE / module).read_text()
        found += [
            point
            for point in points(source, module)
            if point.operator in SAMPLED and point not in skipped
        ]
    chosen = random.Random(seed).sample(found, min(size, len(found)))
    return [Trial(str(point), point, tests[point.module]) for point in chosen]


def run_tests(
    source: Path, module: str, tests: Sequence[str], time_limit: float | None
) -> tuple[int | None, str]:
    """Exit status (None after the time limit) and output of pytest with the package imported from
    `source`.
    """
    args = ["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    environment = {**os.environ, **TEST_ENVIRONMENT, "PYTHONPATH": str(source)}
    if module.startswith("kernels/"):
        # mutants leave nothing in the user's cache
        environment["NUMBA_CACHE_DIR"] = str(source.parent / "cache")
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_PYTEST, str(source), dotted(module), *args],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tests' own child processes too
        return None, process.communicate()[0]
    return process.returncode, output


def run_trial(trial: Trial, time_limit: float = TIME_LIMIT) -> Result:
    """Test one mutant in a copy of the package in a temporary folder."""
    begun = time.perf_counter()
    module = trial.address.module
    with tempfile.TemporaryDirectory(prefix="headwise-mutant-") as folder:
        source = Path(folder).resolve() / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        target = source / PACKAGE / module
        mutant = mutate(target.read_text(), trial.address)
        target.write_text(mutant.source)
        status, output = run_tests(source, module, trial.tests, time_limit)
    if status is None:
        verdict, reason = "timeout", f"after {time_limit:.0f} s"
    else:
        verdict, reason = VERDICTS.get(status, ("broken", f"pytest ended with status {status}"))
    return Result(trial, verdict, reason, mutant.change, time.perf_counter() - begun, output)


def run_trials(
    trials: Sequence[Trial], time_limit: float = TIME_LIMIT, jobs: int = JOBS
) -> Iterator[Result]:
    """Results of all trials in their order, `jobs` of them at the same time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda trial: run_trial(trial, time_limit), trials)


def kill_rate(results: Sequence[Result]) -> float:
    """Share of mutants that a failing test killed.

    A timeout is no kill, because a busy machine causes it too. Broken mutants test nothing and
    count neither way.
    """
    counts = Counter(result.verdict for result in results)
    tested = len(results) - counts["broken"]
    return counts["killed"] / tested if tested else 0.0


def passes_unchanged(trials: Sequence[Trial]) -> bool:
    """Whether all tests of these mutants pass on the package as it is; prints the end of pytest's
    output if not.
    """
    tests = list(dict.fromkeys(test for trial in trials for test in trial.tests))
    status, output = run_tests(SOURCE, "__init__.py", tests, time_limit=None)
    if status != 0:
        print(*output.splitlines()[-OUTPUT_LINES:], sep="\n")
        print("cannot test mutants: these tests must pass on the unchanged package first")
    return status == 0


def report(
    trials: Sequence[Trial], aim: float, time_limit: float = TIME_LIMIT, jobs: int = JOBS
) -> int:
    """Print one line for each mutant and the kill rate; 0 if it reaches `aim`, else 1.

    With an aim of 1 every mutant must be killed, and none may be broken or reach the time limit.
    """
    results = []
    for result in run_trials(trials, time_limit, jobs):
        results.append(result)
        print(result.line(), flush=True)
        if result.verdict == "broken":
            print(*(f"    {line}" for line in result.output.splitlines()[-OUTPUT_LINES:]), sep="\n")
    counts = Counter(result.verdict for result in results)
    rate = kill_rate(results)
    total = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("killed", "survived", "timeout", "broken")
    )
    print(f"{len(results)} mutants: {total}; kill rate {rate:.2f}, aim {aim:.2f}")
    short = counts["killed"] < len(results) if aim == 1 else rate < aim
    return 1 if short else 0
