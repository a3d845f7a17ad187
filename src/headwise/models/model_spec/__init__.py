"""Specs of whole models, used to build, cost, save and convert them. This package does not import
torch.

In reading order:

- `components`: embeddings, norms and output heads, each with its weights; processing of inputs
- `sublayers`: feed-forwards, experts, recurrences and convolutions
- `quantization`: the number formats of quantised checkpoints, and which matrices have them
- `layer_edges`: keys and values that a layer reads of an earlier one, and first values
- `model`: `BlockSpec`, `StackSpec` and `ModelSpec` combine attention specs and components
- `serialization`: specs as dictionaries, TOML and JSON; the manifest of a saved model and the
  record of surgery; a table of every tensor with its axes, shape and size
"""

from .components import (
    EmbeddingSpec,
    HeadTransformSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    ProcessorSpec,
    WeightSpec,
)
from .layer_edges import kv_owner
from .model import (
    MODEL_KINDS,
    BlockSpec,
    LayerRun,
    ModelSpec,
    StackSpec,
    attention_weights,
)
from .quantization import WEIGHT_FORMATS, QuantizationSpec, WeightFormat
from .serialization import (
    ModelTable,
    from_dict,
    from_json,
    from_toml,
    to_dict,
    to_json,
    to_toml,
)
from .sublayers import (
    ConvolutionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    RecurrentSpec,
    SequenceMixerSpec,
)

__all__ = [
    "MODEL_KINDS",
    "WEIGHT_FORMATS",
    "BlockSpec",
    "ConvolutionSpec",
    "EmbeddingSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
    "ModelSpec",
    "NormSpec",
    "OutputHeadSpec",
    "PatchSpec",
    "QuantizationSpec",
    "RecurrentSpec",
    "SequenceMixerSpec",
    "WeightFormat",
    "attention_weights",
    "kv_owner",
]
__all__ += [
    "HeadTransformSpec",
    "LayerRun",
    "ModelTable",
    "PositionSpec",
    "ProcessorSpec",
    "StackSpec",
    "WeightSpec",
]
__all__ += ["from_dict", "from_json", "from_toml", "to_dict", "to_json", "to_toml"]
