"""Command line of the crash tests; writes its figures to docs/reliability.json."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
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
                *("cc", "-shared", "-fPIC", "-o", library),
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
    """Run all trials, print those that fail, and return the figures."""
    import torch

    from crashes import workload
    from crashes.trials import Bench, plan_trials, run_in_processes

    torch.set_num_threads(1)
    base = Path(os.environ[FOLDER_VARIABLE])
    workload.import_everything()
    workload.make_inputs(base / "inputs")
    commands = workload.list_commands(base / "inputs")
    if args.only:
        commands = {name: commands[name] for name in args.only}
    bench = Bench(base, commands, args.seed)
    planned = plan_trials(commands, {"full_disk": args.full_disks, "kills": args.kills}, args.seed)
    list(run_in_processes(sorted({trial.command for trial in planned}), args.jobs, bench.measure))
    trials: dict[str, list[dict[str, Any]]] = {"full_disk": [], "kills": []}
    for trial in run_in_processes(planned, args.jobs, bench.run):
        trials[trial["kind"]].append(trial)
        if trial["problem"]:
            print("{kind}: {command} {fault}: {problem}".format(**trial), file=sys.stderr)
    figures = {kind: _count(found) for kind, found in trials.items() if found}
    if args.json is not None:
        document = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps(document | figures, indent=1) + "\n")
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
