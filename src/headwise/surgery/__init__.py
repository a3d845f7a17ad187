"""Heads cut and shared, and what is left proven to work."""

from .budgets import Budget, Until
from .choices import Choice, Classes, Clusters, Keep, Named
from .plans import Plan
from .worths import By

__all__ = ["Budget", "By", "Choice", "Classes", "Clusters", "Keep", "Named", "Plan", "Until"]
