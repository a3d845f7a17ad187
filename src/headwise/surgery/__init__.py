"""Heads cut and shared, and what is left proven to work."""

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
