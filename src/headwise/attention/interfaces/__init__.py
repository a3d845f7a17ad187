"""Base classes of the parts that an attention layer is made of.

In reading order:

- `part`: `Part`, the base class with the methods that every part may override, the registry of
  parts by class name, so that specs can be written as text, and parts in files of the user;
- `part_types`: the base classes of the slots that a spec fills once (project, similarity,
  normaliser, merge; patterns
  live in `headwise.attention.masking`), and of the optional modifiers, one per phase of the
  computation;
- `core_types`: the values that parts, the layer, probes and backends exchange; names for the axes
  of a tensor, such as ``"(q dim) model"``; the division of a layer over processes.
"""

from .core_types import AxisLayout, Param, ScorePosition, SpecFactory
from .part import Part, RecurrentPart
from .part_types import (
    Gate,
    JointStep,
    Merge,
    Mix,
    Modifier,
    Normaliser,
    OutputStep,
    Project,
    QKTransform,
    RowFactors,
    RowStep,
    ScoreStep,
    Similarity,
    SingleVectorTransform,
    ValueStep,
    WeightStep,
)

__all__ = [
    "AxisLayout",
    "Gate",
    "JointStep",
    "Merge",
    "Mix",
    "Modifier",
    "Normaliser",
    "OutputStep",
    "Param",
    "Part",
    "Project",
    "QKTransform",
    "RecurrentPart",
    "RowFactors",
    "RowStep",
    "ScorePosition",
    "ScoreStep",
    "Similarity",
    "SingleVectorTransform",
    "SpecFactory",
    "ValueStep",
    "WeightStep",
]
