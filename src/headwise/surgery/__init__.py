"""Heads cut and shared, and what is left proven to work."""

from .budgets import Budget, Until
from .choices import Choice, Classes, Clusters, Keep, Named
from .plans import Plan
from .ways import Collaborate, Merged, Pool, Route, Split, Way
from .worths import By

__all__ = ["Budget", "By", "Choice", "Classes", "Clusters", "Collaborate", "Keep", "Merged", "Named", "Plan", "Pool"]
__all__ += ["Route", "Split", "Until", "Way"]
