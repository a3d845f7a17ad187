"""What `headwise bench` has no row for: models of transformers on headwise, watched and not; `--json` prints JSON.

The others are commands of their own: `python -m benchmarks.serve`, `.capture`, `.distributed`, and on real data
`.shakespeare`, `.mnist`, `.translate_multi30k`.
"""

from __future__ import annotations

import json
import sys

from headwise.bench.benchmark_report import BenchmarkReport
from headwise.bench.session import MachineLimits, describe_machine, use_threads

from . import registered


def main() -> int:
    """Print what was measured, on one thread."""
    with use_threads(1):
        told = describe_machine(MachineLimits.of_this_machine(), 1) | {"quick": False, "interrupted": False}
        report = BenchmarkReport(told, registered.main())
    print(json.dumps(report.data) if "--json" in sys.argv[1:] else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
