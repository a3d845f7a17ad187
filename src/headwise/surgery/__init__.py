"""Pruning and conversion of attention heads, and proof that the result works.

`head_selection` decides which heads stay, `pruning_plan` records it, `pruning` removes the rest, `l0_gates` learns
which to remove; `conversion` turns MHA into GQA, MQA, MLA and others with `head_alignment`, `head_grouping` and
`kv_statistics`; `distillation` retrains; `attention_replacement` builds the new model, `weight_folding` removes
biases without effect. `hf_export` writes folders, `verification` proves them, `sweep` measures quality against
heads removed.
"""

from .conversion import AttentionConversion, Collaborate, Merged, Pool, Route, Split
from .distillation import UptrainingOptions
from .head_selection import (
    DropClasses,
    DropHeads,
    HeadRanking,
    HeadSelection,
    KeepOnePerCluster,
    KeepTop,
    PruneToBudget,
    PruningBudget,
)
from .l0_gates import GateTrainingOptions, KeepOpenGates
from .pruning_plan import PruningPlan

__all__ = [
    "Collaborate",
    "DropClasses",
    "DropHeads",
    "GateTrainingOptions",
    "HeadRanking",
    "HeadSelection",
    "KeepOnePerCluster",
    "KeepOpenGates",
    "KeepTop",
    "Merged",
    "PruningBudget",
]
__all__ += ["AttentionConversion", "Pool", "PruneToBudget", "PruningPlan", "Route", "Split", "UptrainingOptions"]
