"""The seams: what a part of an attention layer may do.

A part is a frozen description with pure methods. Its parameters are declared by named axes and handed back
to it as `p`; so one declaration builds, counts, cuts, shares and saves it. Letters: see `headwise.interfaces.core_types`.
"""

from .modifiers import (
    Gate,
    Mix,
    Modifier,
    OutputStep,
    QKTransform,
    ScoreStep,
    SingleVectorTransform,
    ValueStep,
    WeightStep,
)
from .part import Part, RecurrentPart
from .slots import Merge, Normaliser, Project, Similarity

__all__ = [
    "Gate",
    "Merge",
    "Mix",
    "Modifier",
    "Normaliser",
    "OutputStep",
    "Part",
    "Project",
    "RecurrentPart",
    "ScoreStep",
    "SingleVectorTransform",
]
__all__ += ["QKTransform", "Similarity", "ValueStep", "WeightStep"]
