"""Command line of mutation testing: `python -m mutation` with tests/ on PYTHONPATH."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mutation.lists import Trial, equivalents, find_errors, guards, read_covering_tests
from mutation.runner import JOBS, TIME_LIMIT, passes_unchanged, report, sample


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    command = argparse.ArgumentParser(
        prog="python -m mutation",
        description=(
            "Change the numeric core in one place at a time and see whether the tests fail."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--sample", type=int, default=60, metavar="N", help="number of mutants to test"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sample")
    command.add_argument(
        "--module", action="append", metavar="PATH", help="sample from this module only; repeatable"
    )
    command.add_argument(
        "--guards", nargs="*", metavar="NAME", help="test all guards, or those named, instead"
    )
    command.add_argument(
        "--aim",
        type=float,
        default=0.9,
        metavar="RATE",
        help="kill rate below which the exit code is 1",
    )
    command.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        metavar="SECONDS",
        help="limit for one mutant",
    )
    command.add_argument(
        "--jobs", type=int, default=JOBS, metavar="N", help="mutants tested at the same time"
    )
    command.add_argument(
        "--skip-baseline", action="store_true", help="do not test the unchanged package first"
    )
    command.add_argument("--list", action="store_true", help="print the chosen mutants and stop")
    return command


def choose(command: argparse.ArgumentParser, args: argparse.Namespace) -> list[Trial]:
    """The mutants that the options ask for."""
    if args.guards is not None:
        trials = {trial.name: trial for trial in guards()}
        if unknown := set(args.guards) - set(trials):
            command.error(
                f"no guard is named {', '.join(sorted(unknown))}; `--guards --list` prints all "
                "names"
            )
        return [trials[name] for name in args.guards or trials]
    tests = read_covering_tests()
    if unknown := set(args.module or ()) - set(tests):
        command.error(f"tests_of_module.toml has no module {', '.join(sorted(unknown))}")
    chosen = {module: tests[module] for module in args.module or tests}
    return sample(chosen, equivalents(), args.sample, args.seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Test the chosen mutants; guards must all be killed, a sample to the share
    that `--aim` gives.
    """
    command = parser()
    args = command.parse_args(argv)
    if errors := find_errors():
        print(*errors, sep="\n", file=sys.stderr)
        return 1
    trials = choose(command, args)
    if args.list:
        print(
            *(f"{trial.name}  {trial.address}  {' '.join(trial.tests)}" for trial in trials),
            sep="\n",
        )
        return 0
    if not args.skip_baseline and not passes_unchanged(trials):
        return 1
    return report(trials, 1.0 if args.guards is not None else args.aim, args.time_limit, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
