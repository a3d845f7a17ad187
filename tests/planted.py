"""Bugs that the tests must catch. `make mutate` plants all of them, `python tests/planted.py NAME...` some.

A test that has never been seen red proves nothing. Each bug here is one that could really be written: an
off-by-one at an edge, a transposed axis, a forgotten scale. It names the tests that must turn red.
"""

from __future__ import annotations

import sys

import planted_align  # noqa: F401 - as the first
import planted_banded  # noqa: F401 - as the first
import planted_bench  # noqa: F401 - as the first
import planted_callers  # noqa: F401 - as the first
import planted_comparing  # noqa: F401 - as the first
import planted_composition  # noqa: F401 - importing a list plants its bugs
import planted_core  # noqa: F401 - as the first
import planted_curves  # noqa: F401 - as the first
import planted_data  # noqa: F401 - as the first
import planted_demo  # noqa: F401 - as the first
import planted_engine  # noqa: F401 - as the first
import planted_families  # noqa: F401 - as the first
import planted_fast_models  # noqa: F401 - as the first
import planted_few  # noqa: F401 - as the first
import planted_finding  # noqa: F401 - as the first
import planted_fused  # noqa: F401 - as the first
import planted_gather  # noqa: F401 - as the first
import planted_generation  # noqa: F401 - as the first
import planted_halves  # noqa: F401 - as the first
import planted_heads_importance  # noqa: F401 - as the first
import planted_heads_kinds  # noqa: F401 - as the first
import planted_heads_redundancy  # noqa: F401 - as the first
import planted_hub  # noqa: F401 - as the first
import planted_keep  # noqa: F401 - as the first
import planted_kept  # noqa: F401 - as the first
import planted_learn  # noqa: F401 - as the first
import planted_length  # noqa: F401 - as the first
import planted_models  # noqa: F401 - as the first
import planted_nets  # noqa: F401 - as the first
import planted_orders  # noqa: F401 - as the first
import planted_packing  # noqa: F401 - as the first
import planted_paged  # noqa: F401 - as the first
import planted_patches  # noqa: F401 - as the first
import planted_prefixes  # noqa: F401 - as the first
import planted_pricing  # noqa: F401 - as the first
import planted_proof  # noqa: F401 - as the first
import planted_ragged  # noqa: F401 - as the first
import planted_registered  # noqa: F401 - as the first
import planted_routed  # noqa: F401 - as the first
import planted_serving  # noqa: F401 - as the first
import planted_sites  # noqa: F401 - as the first
import planted_split  # noqa: F401 - as the first
import planted_surgery  # noqa: F401 - as the first
import planted_tasks  # noqa: F401 - as the first
import planted_texts  # noqa: F401 - as the first
import planted_tiled  # noqa: F401 - as the first
import planted_traces  # noqa: F401 - as the first
import planted_training  # noqa: F401 - as the first
import planted_wide  # noqa: F401 - as the first
from mutate import main
from planting import BUGS

if __name__ == "__main__":
    sys.exit(main(BUGS))
