"""Whole models, described: what counting, building, saving and reading foreign files all share."""

from .components import (
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    WeightSpec,
)
from .model import MODEL_KINDS, ApproximateAttention, BlockSpec, LayerRun, ModelSpec, StackSpec, UnsupportedPart
from .processor_spec import ProcessorSpec
from .serialization import from_dict, from_json, from_toml, to_dict, to_json, to_toml
from .weight_table import ModelTable

__all__ = [
    "MODEL_KINDS",
    "ApproximateAttention",
    "BlockSpec",
    "EmbeddingSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
    "ModelSpec",
    "NormSpec",
    "OutputHeadSpec",
    "PatchSpec",
    "UnsupportedPart",
]
__all__ += ["HeadTransformSpec", "LayerRun", "ModelTable", "PositionSpec", "ProcessorSpec", "StackSpec", "WeightSpec"]
__all__ += ["from_dict", "from_json", "from_toml", "to_dict", "to_json", "to_toml"]
