"""What a part of an attention layer may do: the base classes that every part implements.

`part` is the base class; `slots` the five choices (project, similarity, pattern, normaliser, merge); `modifiers`
everything else; `core_types` the values they exchange; `axis_layout` names the axes of a tensor; `registry` finds
parts by name; `probe` observes tensors inside a layer.
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
