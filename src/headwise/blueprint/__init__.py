"""Whole models, described: what counting, building, saving and reading foreign files all share."""

from .ends import EmbeddingSpec, OutputHeadSpec, PatchSpec, PositionSpec, HeadTransformSpec
from .model import MODEL_KINDS, UnsupportedPart, ModelSpec
from .pieces import FeedForwardSpec, ExpertsSpec, NormSpec, WeightSpec
from .stack import BlockSpec, ApproximateAttention, LayerRun, StackSpec
from .table import ModelTable
from .text import from_dict, from_json, from_toml, to_dict, to_json, to_toml
from .usage import ProcessorSpec

__all__ = ["MODEL_KINDS", "UnsupportedPart", "BlockSpec", "FeedForwardSpec", "EmbeddingSpec", "ExpertsSpec", "OutputHeadSpec", "ModelSpec", "ApproximateAttention", "NormSpec", "PatchSpec"]
__all__ += ["PositionSpec", "LayerRun", "StackSpec", "ModelTable", "HeadTransformSpec", "ProcessorSpec", "WeightSpec"]
__all__ += ["from_dict", "from_json", "from_toml", "to_dict", "to_json", "to_toml"]
