"""The seams: what a part of an attention layer may do.

A part is a frozen description with pure methods. Its parameters are declared by named axes and handed back
to it as `p`; so one declaration builds, counts, cuts, shares and saves it. Letters: see `headwise.terms`.
"""

from .base import RecurrentPart, Part
from .choices import Merge, Normaliser, Project, Similarity
from .modifiers import Gate, SingleVectorTransform, Mix, Modifier, OutputStep, ScoreStep, QKTransform, ValueStep, WeightStep

__all__ = [
    "RecurrentPart",
    "Gate",
    "SingleVectorTransform",
    "Merge",
    "Mix",
    "Modifier",
    "Normaliser",
    "OutputStep",
    "Part",
    "Project",
    "ScoreStep",
]
__all__ += ["Similarity", "QKTransform", "ValueStep", "WeightStep"]
