"""Heads cut and shared, and what is left proven to work."""

from .choices import Choice, Classes, Clusters, Keep, Named
from .plans import Plan
from .worths import By

__all__ = ["By", "Choice", "Classes", "Clusters", "Keep", "Named", "Plan"]
