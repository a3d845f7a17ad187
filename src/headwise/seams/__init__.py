"""The seams: what a part of an attention layer may do.

A part is a frozen description with pure methods. Its parameters are declared by named axes and handed back
to it as `p`; so one declaration builds, counts, cuts, shares and saves it. Letters: see `headwise.terms`.
"""

from .base import Foldable, Part
from .choices import Merge, Normaliser, Project, Similarity
from .modifiers import Gate, Joined, Mix, Modifier, OutputStep, ScoreStep, Turn, ValueStep, WeightStep

__all__ = [
    "Foldable",
    "Gate",
    "Joined",
    "Merge",
    "Mix",
    "Modifier",
    "Normaliser",
    "OutputStep",
    "Part",
    "Project",
    "ScoreStep",
]
__all__ += ["Similarity", "Turn", "ValueStep", "WeightStep"]
