"""Checks that every part keeps, for a part of your own too: `hw.check_part(MyPart())`.

In reading order:

- `layer_cases`: small specs that contain a part, layers with random weights and inputs for them,
  and the backends that
  run them; decoding in chunks, gradients, and FLOPs counted by torch;
- `contract`: the six checks, `check_part`, which runs them on every spec of a part, and the report
  of their results.
"""

from .contract import PartReport, check_part

__all__ = ["PartReport", "check_part"]
