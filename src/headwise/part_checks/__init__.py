"""Checks that every part keeps, for a part of your own too: `hw.check_part(MyPart())`.

In reading order:

- `layer_cases`: small specs that contain a part, layers with random weights and inputs for them, and the backends that
  run them; decoding in chunks, gradients, and FLOPs counted by torch;
- `contract`: the six checks, and `check_part`, which runs them on every spec of a part;
- `part_report`: the result of each check, printed as a table.
"""

from .contract import check_part
from .part_report import PartReport

__all__ = ["PartReport", "check_part"]
