"""Command line of the crash tests; writes its figures to docs/reliability.json."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "CRASH_FOLDER"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials; exit code 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m crashes", description="Kill commands that write, and fill disks."
    )
    parser.add_argument("--kills", type=int, default=500, metavar="N", help="number of kills")
    parser.add_argument(
        "--full-disks", type=int, default=50, metavar="N", help="number of full disks"
    )
    parser.add_argument(
        "--only", action="append", metavar="COMMAND", help="only this command; repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the points")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="trials at a time"
    )
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="record every trial here, and go on from it"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures to this file, beside other keys",
    )
    args = parser.parse_args(argv)
    if FOLDER_VARIABLE not in os.environ:
        return _run_with_small_disk(sys.argv[1:] if argv is None else argv)
    figures = run_trials(args)
    print(json.dumps(figures, indent=1))
    return int(any(part["failures"] for part in figures.values()))


def _run_with_small_disk(argv: Sequence[str]) -> int:
    """Run this module again in a process whose writes can be made to fail."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        library = folder / "full_disk.so"
        subprocess.run(
            [
                "cc",
                "-shared",
                "-fPIC",
                "-o",
                library,
                Path(__file__).with_name("full_disk.c"),
                "-ldl",
            ],
            check=True,
        )
        (folder / "base" / "tmp").mkdir(parents=True)
        environment = os.environ | {
            "LD_PRELOAD": str(library),
            FOLDER_VARIABLE: str(folder / "base"),
            "TMPDIR": str(folder / "base" / "tmp"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HEADWISE_KERNELS": "off",
            "HEADWISE_MACHINE_CLASS": "x86-avx512-bf16",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)]),
        }
        return subprocess.run(
            [sys.executable, "-m", "crashes", *argv], env=environment, check=False
        ).returncode


def run_trials(args: argparse.Namespace) -> dict[str, Any]:
    """Run all trials that the state file does not have yet, and return the figures of all."""
    import torch

    from crashes import workload
    from crashes.trials import Bench, plan_trials, run_in_processes

    torch.set_num_threads(1)
    base = Path(os.environ[FOLDER_VARIABLE])
    state = args.state or base / "trials.jsonl"
    workload.import_everything()
    workload.make_inputs(base / "inputs")
    commands = workload.list_commands(base / "inputs")
    if args.only:
        commands = {name: commands[name] for name in args.only}
    bench = Bench(base, commands, args.seed)
    planned = plan_trials(commands, {"full_disk": args.full_disks, "kills": args.kills}, args.seed)
    done = {(trial["kind"], trial["number"], trial["command"]) for trial in _read_state(state)}
    left = [trial for trial in planned if trial not in done]
    run_in_processes(
        sorted({trial.command for trial in left}),
        args.jobs,
        lambda worker, name: bench.measure(name),
    )
    report = partial(_report, state, planned, args.json)
    run_in_processes(
        left, args.jobs, lambda worker, trial: _record(state, bench.run(worker, trial)), report
    )
    return report()


def _read_state(path: Path) -> list[dict[str, Any]]:
    """The trials of a state file; a last line that was cut is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _record(state: Path, trial: Mapping[str, Any]) -> None:
    """Append a trial to the state file in one write, and print what failed."""
    if trial["problem"]:
        print("{kind}: {command} {fault}: {problem}".format(**trial), file=sys.stderr, flush=True)
    handle = os.open(state, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, (json.dumps(trial) + "\n").encode())
    os.close(handle)


def _report(
    state: Path, planned: Iterable[tuple[str, int, str]], path: Path | None
) -> dict[str, Any]:
    """Return the figures of the planned trials that were run, and write them to `path`."""
    wanted = set(planned)
    trials = [t for t in _read_state(state) if (t["kind"], t["number"], t["command"]) in wanted]
    kinds = sorted({trial["kind"] for trial in trials})
    figures = {kind: _count([trial for trial in trials if trial["kind"] == kind]) for kind in kinds}
    if path is not None and figures:
        document = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(document | figures, indent=1) + "\n")
    return figures


def _count(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of trials: all, those that failed, by outcome, by signal, and by command."""
    by_command: dict[str, dict[str, int]] = {}
    for trial in trials:
        row = by_command.setdefault(trial["command"], {"trials": 0, "failures": 0})
        row["trials"] += 1
        row["failures"] += bool(trial["problem"])
    return {
        "trials": len(trials),
        "failures": sum(bool(trial["problem"]) for trial in trials),
        "outcomes": dict(Counter(trial["outcome"] for trial in trials if not trial["problem"])),
        "signals": dict(Counter(trial["signal"] for trial in trials if trial["signal"])),
        "commands": dict(sorted(by_command.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
