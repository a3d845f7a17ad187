"""`headwise bench`: our paths beside those of others, and the machine's limits, in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .arguments import CommandParser, UsageError, add_json_argument, print_page, to_json

if TYPE_CHECKING:
    from ..bench.benchmark_report import BenchmarkReport
    from ..bench.runner import ScalingReport

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Time what is named, or everything."""
    given = _parser().parse_args(argv)
    if given.list:
        found = _print_cases(given)
        wide = max(map(len, found)) + 2
        print_page(to_json(found) if given.json else "\n".join(f"{kind:<{wide}}{told}" for kind, told in found.items()))
        return 0
    measured = _run_suite(given)
    print_page(to_json(measured.data) if given.json else str(measured))
    if measured.machine["interrupted"]:
        return INTERRUPTED
    return 0 if measured.is_valid else 1


def _print_cases(given: argparse.Namespace) -> Mapping[str, str]:
    """What can be named, with a few words on each."""
    if given.names:
        raise UsageError(f"--list says all there is; leave out {given.names[0]!r}")
    from ..bench import runner

    return runner.list_layers() if given.scaling else runner.list_cases()


def _run_suite(given: argparse.Namespace) -> BenchmarkReport | ScalingReport:
    """Every row that is named, or what every backend costs as calls grow."""
    if not given.scaling:
        from ..bench.runner import run_benchmarks

        return run_benchmarks(
            *given.names, quick=given.quick, threads=given.threads, output_folder=given.out, progress=_report_progress
        )
    from ..bench.runner import run_scaling

    if given.quick:
        raise UsageError("--scaling is as quick as it can be; leave out --quick")
    return run_scaling(*given.names, threads=given.threads, output_folder=given.out, progress=_report_progress)


def _parser() -> CommandParser:
    parser = CommandParser(
        "bench",
        "Our paths beside those of others, in turns within one process, and beside what this machine allows: all kinds "
        "of work, or those that are named. Every row says what it is held to, and whether that is met; who is not "
        "installed is named. Ends with 1 where somebody gives another result than ours.",
        "headwise bench decode:fp32 entmax --quick --out runs/bench",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="KIND[:PIECE]",
        help="a kind of work; of KIND:PIECE the rows with that piece in their names",
    )
    parser.add_argument("--list", action="store_true", help="say which kinds there are, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="fewer samples and rows: minutes for all kinds")
    parser.add_argument("--scaling", action="store_true", help="time what backends cost as calls grow, and no rows")
    parser.add_argument("--threads", type=int, metavar="COUNT", help="of torch and of numba (as many as processors)")
    parser.add_argument("--out", metavar="DIR", help="a folder for bench.json and bench.svg, or scaling.json")
    add_json_argument(parser)
    return parser


def _report_progress(said: str) -> None:
    """Progress, where somebody looks on."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{said[:78]}", end="", file=sys.stderr, flush=True)
