"""Time headwise against other libraries and the machine's limits, in turns within one process.

`python -m benchmarks [KIND[:PIECE] ...]` prints one table; `--out DIR` also writes it as
bench.json and as the chart bench.svg. Exit code 1 if a library gives a different result. With
`--device cuda` every backend that runs there is compared with `dense` instead (`gpu`).
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from .harness import CaseKind, run_kinds
from .report import draw_chart, markdown

CASE_MODULES = (
    "attention_layer",
    "attention_cores",
    "decode_attention",
    "head_statistics",
    "mixture_of_heads",
    "ragged_batches",
    "sparse_patterns",
    "whole_models",
)


def load_kinds() -> dict[str, CaseKind]:
    """All kinds of work by name."""
    kinds: dict[str, CaseKind] = {}
    for module in CASE_MODULES:
        kinds |= import_module(f"benchmarks.{module}").KINDS
    return kinds


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="KIND[:PIECE]", help="rows (default: all)")
    parser.add_argument("--list", action="store_true", help="list the kinds of work and exit")
    parser.add_argument("--quick", action="store_true", help="fewer samples, and fewer rows")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="threads of torch (default: as torch chooses)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.json and bench.svg")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the selected rows and print the report."""
    args = parse_arguments(argv)
    if args.device == "cuda":
        return import_module("benchmarks.gpu").main()
    kinds = load_kinds()
    if args.list:
        print("\n".join(f"{name}: {kind.title}" for name, kind in kinds.items()))
        return 0
    selected: dict[str, list[str]] = {}
    for name in args.names or kinds:
        kind, _, piece = name.partition(":")
        if kind not in kinds:
            print(f"unknown kind {kind!r}; use one of {', '.join(kinds)}", file=sys.stderr)
            return 2
        selected.setdefault(kind, []).append(piece.lower())
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    report = run_kinds(kinds, selected, args.quick, lambda text: print(text, file=sys.stderr))
    print(json.dumps(report, indent=1) if args.json else markdown(report))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
        draw_chart(report["rows"], args.out / "bench.svg")
    wrong = any(row["differs"] or row["failed"] for row in report["rows"])
    return 130 if report["machine"]["interrupted"] else int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
