"""Hostile inputs and injected faults for as long as you like: run as a script, with the figures of
docs/reliability.md.

    PYTHONPATH=tests python -m soak --seconds 3600 --out docs/reliability.json

Every parser, route and command gets `--inputs` inputs (default 1,000) of a new seed, then operands
that do not fit each kernel operation and tokenizers that end are tried; while time is left, all
begin again with the next seed. No round begins after `--seconds`, so the script ends within that
time and one round; what was never tried is printed. Exit code 1 says that an input failed; its
traceback is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import headwise
from headwise import cli
from headwise.util.files import write_atomically
from hostile import hostile_requests
from hostile.hostile_documents import PARSERS
from hostile.hostile_runs import MANY, count_inputs, try_input
from kernels import bad_operands

Round = Callable[[int, int], Counter[str]]  # (inputs, seed) -> how many of each outcome


def parser_round(name: str) -> Round:
    """Return a call that tries inputs of one parser."""
    parser = PARSERS[name]

    def run(count: int, seed: int) -> Counter[str]:
        outcomes = Counter[str]()
        count_inputs(
            parser.inputs, lambda value: outcomes.update([try_input(parser, value)]), count, seed
        )
        return outcomes

    return run


def page_round(count: int, seed: int) -> Counter[str]:
    """Try requests for the routes of the page."""
    view, outcomes = hostile_requests.open_page(), Counter[str]()
    client = hostile_requests.page_client(view)
    count_inputs(
        hostile_requests.page_requests(view),
        lambda request: outcomes.update(
            [_outcome(hostile_requests.check_page_answer(client, request))]
        ),
        count,
        seed,
    )
    view.worker.close()
    return outcomes


def job_round(count: int, seed: int) -> Counter[str]:
    """Try jobs of the page."""
    view, outcomes = hostile_requests.open_page(), Counter[str]()
    client = hostile_requests.page_client(view)

    def check(body: bytes) -> None:
        state = hostile_requests.check_job(view, client, body)
        outcomes.update(["read" if state == "done" else "refused"])

    count_inputs(hostile_requests.job_bodies(), check, count, seed)
    view.worker.close()
    return outcomes


def command_round(command: str) -> Round:
    """Return a call that tries arguments of one command."""

    def run(count: int, seed: int) -> Counter[str]:
        outcomes = Counter[str]()

        def check(argv: list[str]) -> None:
            outcomes.update(["refused" if hostile_requests.check_command(argv) == 2 else "read"])

        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            count_inputs(hostile_requests.command_lines(command), check, count, seed)
        return outcomes

    return run


def _outcome(status: int) -> str:
    return "refused" if status >= 400 else "read"


def list_rounds() -> dict[str, Round]:
    """Return every parser, route and command by name."""
    rounds: dict[str, Round] = {name: parser_round(name) for name in PARSERS}
    rounds |= {"HTTP: page": page_round, "HTTP: jobs of the page": job_round}
    return rounds | {f"headwise {command}": command_round(command) for command in cli.COMMANDS}


# --- Faults ---------------------------------------------------------------------------------------


def bad_operand_faults() -> tuple[int, list[str]]:
    """Call every kernel operation with operands that do not fit, in a process of its own; return
    calls and failures.
    """
    command = [sys.executable, "-m", "kernels.bad_operands"]
    run = subprocess.run(
        command, env=os.environ | {"HEADWISE_KERNELS": "wait"}, stdout=subprocess.PIPE, text=True
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    failures = (
        [] if run.returncode == 0 else [f"{lines[-1]} ended the process with {run.returncode}"]
    )
    for name, outcome in zip(lines[::2], lines[1::2], strict=False):
        is_special = name.endswith(("operands that fit", *bad_operands.EQUAL_PROBLEMS))
        if "Error: " not in outcome and not (is_special and outcome in ("accepted", "equal")):
            failures.append(f"{name}: {outcome}")
    return len(lines[1::2]), failures


FAULTS = {
    "operands of kernel operations that do not fit": bad_operand_faults,
}

# --- The run --------------------------------------------------------------------------------------


class SoakRun:
    """Counts of inputs, faults and failures by name."""

    def __init__(self) -> None:
        self.inputs: dict[str, Counter[str]] = {}
        self.faults: dict[str, Counter[str]] = {}
        self.failures: list[str] = []

    def try_round(self, name: str, run: Round, count: int, seed: int) -> None:
        """Run one round and add its counts."""
        counts = self.inputs.setdefault(name, Counter())
        try:
            outcomes = run(count, seed)
            counts.update(outcomes)
            counts["inputs"] += outcomes.total()
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self.fail(counts, name, error)

    def try_fault(self, name: str, inject: Callable[[], tuple[int, list[str]]]) -> None:
        """Inject one kind of fault and add its counts."""
        injected, failures = inject()
        self.faults.setdefault(name, Counter()).update(
            {"injected": injected, "failures": len(failures)}
        )
        for failure in failures:
            self.failures.append(f"{name}: {failure}")
            print(self.failures[-1], file=sys.stderr)

    def fail(self, counts: Counter[str], name: str, error: BaseException) -> None:
        """Count a failure and print it."""
        counts["failures"] += 1
        self.failures.append(f"{name}: {type(error).__name__}: {error}"[:500])
        print(f"{name}:", *traceback.format_exception(error), sep="\n", file=sys.stderr)

    @property
    def data(self) -> dict[str, Any]:
        """The counts as JSON-serialisable values."""
        keys = ("inputs", "read", "refused", "failures")
        versions = (
            f"headwise {headwise.__version__}, Python {platform.python_version()}, torch "
            f"{torch.__version__}"
        )
        return {
            "versions": versions,
            "inputs": {
                name: {key: counts[key] for key in keys} for name, counts in self.inputs.items()
            },
            "faults": {name: dict(counts) for name, counts in self.faults.items()},
        }


def run_rounds(seconds: float, count: int, names: list[str]) -> Iterator[SoakRun]:
    """Yield the counts after each round of each name, until the time is over."""
    end, soak, seed = time.monotonic() + seconds, SoakRun(), 0
    rounds = {name: run for name, run in list_rounds().items() if not names or name in names}
    while time.monotonic() < end:
        for name, run in rounds.items():
            if time.monotonic() < end:
                begin = time.monotonic()
                soak.try_round(name, run, count, seed)
                print(
                    f"{name}: {dict(soak.inputs[name])} in {time.monotonic() - begin:.0f} s",
                    file=sys.stderr,
                )
                yield soak
        for name, inject in FAULTS.items():
            if (not names or name in names) and time.monotonic() < end:
                soak.try_fault(name, inject)
        seed += 1
    for name in [*rounds, *FAULTS]:
        if (not names or name in names) and name not in soak.inputs and name not in soak.faults:
            print(f"{name}: not tried, because the time was over", file=sys.stderr)
    yield soak


def main() -> int:
    """Run, write the figures, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="time after which no round begins"
    )
    parser.add_argument(
        "--inputs", type=int, default=MANY, help="inputs of a round (default: 1000)"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="NAME",
        help="parsers to try (default: all, and faults)",
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file for the figures; other names in it are kept"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    hostile_requests.load_all()
    soak = SoakRun()
    for soak in run_rounds(options.seconds, options.inputs, options.only):
        if options.out is not None:
            earlier = json.loads(options.out.read_text()) if options.out.is_file() else {}
            data = soak.data
            data["faults"] = earlier.get("faults", {}) | data["faults"]
            if options.only:
                data["inputs"] = earlier.get("inputs", {}) | data["inputs"]
            write_atomically(options.out, [(json.dumps(data, indent=1) + "\n").encode()])
    total = sum(counts["inputs"] for counts in soak.inputs.values())
    print(f"{total:,} inputs of {len(soak.inputs)} parsers, {len(soak.failures)} failures")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
