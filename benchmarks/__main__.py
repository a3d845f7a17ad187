"""Run benchmarks, all or those named, and print their tables; `--json` prints one JSON document.

Those on real data are commands of their own: `python -m benchmarks.shakespeare`, `.mnist`, `.translate_multi30k`.
"""

from __future__ import annotations

import json
import platform
import sys

import torch

from . import registered, training_step

BENCHMARKS = {"training_step": training_step, "registered": registered}


def main() -> int:
    """Print what was measured, on how many threads."""
    names = [name for name in sys.argv[1:] if name != "--json"] or list(BENCHMARKS)
    if wrong := [name for name in names if name not in BENCHMARKS]:
        print(f"there is no benchmark {wrong[0]!r}; use one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows = [row for name in names for row in BENCHMARKS[name].main()]
    machine = {"processor": platform.machine(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    if "--json" in sys.argv[1:]:
        print(json.dumps({"machine": machine, "rows": rows}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for row in rows:
        told = ", ".join(
            f"{name} {seconds * 1e6:.1f} us ({row['ratio'][name]:.2f}x, {(row['ours_s'] - seconds) * 1e6:+.1f} us)"
            for name, seconds in row["peers"].items()
        )
        print(f"{row['name']:<26} ours {row['ours_s'] * 1e6:.1f} us; {told}; spread {max(row['spread'].values()):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
