"""Descriptions of whole models, shared by building, cost, saving and reading of other formats; torch-free.

`components` are embeddings, norms, feed-forwards and output heads; `model` puts attention specs and components into
blocks, stacks and a model; `weight_table` lists every tensor by name; `processor_spec` describes tokenizer, labels
and pixel scaling; `serialization` writes and reads TOML and JSON.
"""

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
