"""Write docs/config-fields.json: what becomes of each field of config.json in each family that
hw.load builds.

    python tools/build_config_fields.py [FAMILY ...]

Every field is compared with transformers for several values. With names of families, only their
rows are replaced.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402

from support.config_fields import BASES, classify_fields, list_outcomes  # noqa: E402

TABLE_FILE = ROOT / "docs" / "config-fields.json"
NUM_PAIRS = 10


def main(families: list[str]) -> int:
    """Compare the fields of these families, or of all; return 1 if a case differs."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    has_difference = False
    for family in families or list(BASES):
        outcomes = list_outcomes(family, NUM_PAIRS)
        for case, outcome in outcomes:
            if outcome.kind == "different":
                print(f"{family}: {case}: {outcome.detail}", flush=True)
                has_difference = True
        counts = Counter(outcome.kind for _, outcome in outcomes)
        print(family, dict(counts), flush=True)
        _write_row(family, dict(sorted(counts.items())), classify_fields(outcomes))
    return int(has_difference)


def _write_row(family: str, counts: dict[str, int], fields: dict[str, list[str]]) -> None:
    """Replace the row of a family, one line per class of fields."""
    old = json.loads(TABLE_FILE.read_text()) if TABLE_FILE.is_file() else {}
    cases, rows = (
        old.get("cases", {}) | {family: counts},
        old.get("families", {}) | {family: fields},
    )
    lines = ["{", f'"transformers": "{transformers.__version__}",', '"cases": {']
    lines.append(
        ",\n".join(f" {json.dumps(name)}: {json.dumps(cases[name])}" for name in sorted(cases))
    )
    lines.append('},\n"families": {')
    blocks = []
    for name in sorted(rows):
        kinds = ",\n".join(
            f"  {json.dumps(kind)}: {json.dumps(names)}" for kind, names in rows[name].items()
        )
        blocks.append(f" {json.dumps(name)}: {{\n{kinds}\n }}")
    lines.append(",\n".join(blocks) + "\n}\n}\n")
    TABLE_FILE.write_text("\n".join(lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
