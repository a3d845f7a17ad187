"""Heads cut and shared, and what is left proven to work."""

from .budgets import PruningBudget, PruneToBudget
from .choices import HeadSelection, DropClasses, KeepOnePerCluster, KeepTop, DropHeads
from .gates import GateTrainingOptions
from .learned import KeepOpenGates
from .plans import PruningPlan
from .uptraining import UptrainingOptions
from .ways import Collaborate, Merged, Pool, Route, Split, AttentionConversion
from .worths import HeadRanking

__all__ = ["PruningBudget", "HeadRanking", "HeadSelection", "DropClasses", "KeepOnePerCluster", "Collaborate", "KeepOpenGates", "GateTrainingOptions", "KeepTop", "Merged", "DropHeads"]
__all__ += ["PruningPlan", "Pool", "Route", "Split", "PruneToBudget", "UptrainingOptions", "AttentionConversion"]
