"""Command line of the crash tests; writes its figures to docs/reliability.json."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "CRASH_FOLDER"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials; exit code 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m crashes", description="Kill commands that write, and fill disks.")
    parser.add_argument("--kills", type=int, default=500, metavar="N", help="number of kills")
    parser.add_argument("--full-disks", type=int, default=50, metavar="N", help="number of full disks")
    parser.add_argument("--only", action="append", metavar="COMMAND", help="only this command; repeatable")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the points")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, beside other keys")
    args = parser.parse_args(argv)
    if FOLDER_VARIABLE not in os.environ:
        return _run_with_small_disk(sys.argv[1:] if argv is None else argv)
    figures: dict[str, Any] = {}
    for kind, trials in run_trials(args):
        figures[kind] = _count(trials)
        if args.json is not None:  # after every trial, so that a run that is stopped leaves its figures
            document = json.loads(args.json.read_text()) if args.json.exists() else {}
            args.json.write_text(json.dumps(document | figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    return int(any(part["failures"] for part in figures.values()))


def _run_with_small_disk(argv: Sequence[str]) -> int:
    """Run this module again in a process whose writes can be made to fail."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        library = folder / "full_disk.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("full_disk.c"), "-ldl"], check=True
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
        return subprocess.run([sys.executable, "-m", "crashes", *argv], env=environment, check=False).returncode


def run_trials(args: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:
    """Yield the kind of fault and all of its trials so far, after every trial."""
    import torch

    from crashes import workload
    from crashes.trials import Bench

    torch.set_num_threads(1)
    base = Path(os.environ[FOLDER_VARIABLE])
    workload.import_everything()
    workload.make_inputs(base / "inputs")
    commands = workload.list_commands(base / "inputs")
    if args.only:
        commands = {name: commands[name] for name in args.only}
    bench = Bench(base, commands, args.seed)
    for kind, run, count in (("full_disk", bench.fill_disk, args.full_disks), ("kills", bench.kill, args.kills)):
        names = list(bench.choose_names(count)) if count else []
        bench.random.shuffle(names)
        trials = list[Any]()
        for name in names:
            trials.append(trial := run(name))
            if trial.problem:
                print(f"{kind}: {name} {trial.fault}: {trial.problem}", file=sys.stderr, flush=True)
            yield kind, trials


def _count(trials: Sequence[Any]) -> dict[str, Any]:
    """Numbers of trials: all, those that failed, by outcome, by signal, and by command."""
    outcomes = Counter(trial.outcome for trial in trials if not trial.problem)
    signals = Counter(trial.fault.signal.name for trial in trials if trial.fault.signal)
    by_command: dict[str, dict[str, int]] = {}
    for trial in trials:
        row = by_command.setdefault(trial.command, {"trials": 0, "failures": 0})
        row["trials"] += 1
        row["failures"] += bool(trial.problem)
    figures = {"trials": len(trials), "failures": sum(bool(trial.problem) for trial in trials)}
    return figures | {
        "outcomes": dict(outcomes),
        "signals": dict(signals),
        "commands": dict(sorted(by_command.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
