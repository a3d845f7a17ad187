"""Heads cut and shared, and what is left proven to work."""

from .budgets import Budget, Until
from .choices import Choice, Classes, Clusters, Keep, Named
from .gates import Gating
from .learned import Gated
from .plans import Plan
from .uptraining import Uptraining
from .ways import Collaborate, Merged, Pool, Route, Split, Way
from .worths import By

__all__ = ["Budget", "By", "Choice", "Classes", "Clusters", "Collaborate", "Gated", "Gating", "Keep", "Merged", "Named"]
__all__ += ["Plan", "Pool", "Route", "Split", "Until", "Uptraining", "Way"]
