"""`headwise bench`: time headwise, other libraries and the machine's limits in one run."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..escaping import make_visible
from .arguments import add_json_argument, add_overwrite_argument, print_note, print_page, to_json
from .command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ..bench.benchmark_report import BenchmarkReport
    from ..bench.runner import ScalingReport


def main(argv: list[str]) -> int:
    """Run the named benchmarks, or all, and print a report."""
    args = _parser().parse_args(argv)
    if args.list:
        cases = _print_cases(args)
        width = max(map(len, cases)) + 2
        print_page(
            to_json(cases)
            if args.json
            else "\n".join(f"{kind:<{width}}{summary}" for kind, summary in cases.items())
        )
        return 0
    if args.calibrate:
        return _calibrate(args)
    with _sigterm_as_interrupt():
        report = _run_suite(args)
    print_page(to_json(report.data) if args.json else str(report))
    if report.machine["interrupted"]:
        missing = ", ".join(
            f"{kind} ({count})" for kind, count in report.machine["missing"].items()
        )
        print_note(f"headwise: interrupted; cases that are missing, by kind: {missing or 'none'}")
        raise KeyboardInterrupt
    return 0 if report.is_valid else 1


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C, so that the finished rows are reported."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _print_cases(args: argparse.Namespace) -> Mapping[str, str]:
    """Return the names that the command accepts, each with a short description."""
    if args.names:
        raise UsageError(f"--list takes no names; leave out {args.names[0]!r}")
    from ..bench import runner

    return runner.list_layers() if args.scaling else runner.list_cases()


def _calibrate(args: argparse.Namespace) -> int:
    """Measure the take-over points of this machine, and print them; exit code 1 if they cannot be
    kept.
    """
    if args.quick or args.scaling or args.out:
        raise UsageError("--calibrate takes no --quick, --scaling and --out; leave them out")
    from ..bench.calibration import calibrate

    report = calibrate(args.threads, names=args.names, progress=_report_progress)
    print_page(to_json(report.data) if args.json else str(report))
    return 0 if report.stored_in else 1


def _run_suite(args: argparse.Namespace) -> BenchmarkReport | ScalingReport:
    """Run the benchmark cases, or with --scaling time every backend at growing sizes."""
    callbacks: dict[str, Any] = {
        "overwrite": args.overwrite,
        "progress": _report_progress,
        "finished": _report_finished,
    }
    if not args.scaling:
        from ..bench.runner import run_benchmarks

        return run_benchmarks(
            *args.names, quick=args.quick, threads=args.threads, output_folder=args.out, **callbacks
        )
    from ..bench.runner import run_scaling

    if args.quick:
        raise UsageError("--scaling has no quick mode; leave out --quick")
    return run_scaling(*args.names, threads=args.threads, output_folder=args.out, **callbacks)


def _parser() -> CommandParser:
    parser = CommandParser(
        "bench",
        "Time headwise against other libraries, in alternation within one process, and against "
        "this machine's memory "
        "bandwidth and matrix-multiplication rate. Each row has its targets and whether they are "
        "met; libraries that "
        "are not installed are listed. Exit code 1 if a library gives a different result than "
        "headwise.",
        "headwise bench --list",
        "headwise bench attention_decode:fp32 entmax --quick --out runs/bench",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="KIND[:PIECE]",
        help=(
            "kinds of benchmarks, see --list; KIND:PIECE selects the rows with PIECE in their "
            "names (default: all)"
        ),
    )
    parser.add_argument("--list", action="store_true", help="list the kinds of benchmarks and exit")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take fewer samples and skip rows; a few minutes for all kinds",
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="time every backend at growing sizes instead of the benchmarks",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure from which sizes own kernels are faster here, and keep it; under a minute",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="COUNT",
        help="threads for torch and numba (default: all processors)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write bench.json and bench.svg, or scaling.json, to this folder",
    )
    add_overwrite_argument(parser)
    add_json_argument(parser)
    return parser


def _report_progress(message: str) -> None:
    """Overwrite one progress line on stderr, if it is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{make_visible(message[:78])}", end="", file=sys.stderr, flush=True)


def _report_finished(message: str) -> None:
    """Print one line for each finished case to stderr, unless it is a terminal, which shows the
    progress line.
    """
    if not sys.stderr.isatty():
        print_note(message)
