"""`headwise bench`: our paths beside those of others, and the machine's limits, in one run."""

from __future__ import annotations

import sys

from .screen import Arguments, document, show, take_form

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Time what is named, or everything."""
    given = _parser().parse_args(argv)
    from ..benching import running

    if given.list:
        listed = running.listed(given.quick)
        show(document(listed) if given.json else "\n".join(_lines(listed)))
        return 0
    report = running.bench(*given.names, quick=given.quick, threads=given.threads, out=given.out, tell=_tell)
    show(document(report.data) if given.json else str(report))
    if report.machine["interrupted"]:
        return INTERRUPTED
    return 0 if report.sound else 1


def _parser() -> Arguments:
    parser = Arguments(
        "bench",
        "Our paths beside those of others, in turns within one process, and beside what this machine allows. Every row "
        "says what it is held to, and whether that is met; who is not installed is named. Ends with 1 where somebody "
        "gives another result than ours.",
        "headwise bench decode --threads 2 --out runs/bench",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="kinds of work, or rows by any piece of their names")
    parser.add_argument("--quick", action="store_true", help="fewer samples of each: minutes for all")
    parser.add_argument("--threads", type=int, metavar="COUNT", help="of torch and of numba (as many as processors)")
    parser.add_argument("--out", metavar="DIR", help="a folder for bench.json and bench.svg")
    parser.add_argument("--list", action="store_true", help="the rows by name, and no more")
    take_form(parser)
    return parser


def _tell(said: str) -> None:
    """Progress, where somebody looks on."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{said[:78]}", end="", file=sys.stderr, flush=True)


def _lines(listed: dict[str, list[str]]) -> list[str]:
    return [line for kind, rows in listed.items() for line in (kind, *(f"  {row}" for row in rows))]
