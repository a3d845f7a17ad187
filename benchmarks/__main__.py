"""Benchmarks of transformers models on the headwise backend, with and without hooks; `--json`
prints JSON.

The others are commands of their own: `python -m benchmarks.serve`, `.capture`, `.distributed`, and
on real data `.shakespeare`, `.mnist`, `.translate_multi30k`.
"""

from __future__ import annotations

import json
import sys

from headwise.bench.benchmark_report import BenchmarkReport
from headwise.bench.session import MachineLimits, describe_machine, use_threads

from . import transformers_decode


def main() -> int:
    """Print the measurements on one thread."""
    with use_threads(1):
        machine = describe_machine(MachineLimits.of_this_machine(), 1) | {
            "quick": False,
            "interrupted": False,
        }
        report = BenchmarkReport(machine, transformers_decode.main())
    print(json.dumps(report.data) if "--json" in sys.argv[1:] else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
