"""Attention layers as torch modules.

Described by `spec`, `interfaces`, `parts` (one file for each published idea) and `presets`, with
what they have in common in `spec_builder`; `masking` and `cache` hold positions, masks and past
tokens; `backends` are implementations of the core. In reading order:

- `attention`: the layer, which runs the steps of attention in order; `attention_base` creates its
  weights, and `core_extras` runs what only some layers need.
- `attention_call`: checks, completes and plans one call, and asks `backends` which one runs.
- `bound_parts`: the parts of a layer with their weights.
- `composite_attention`: layers that combine several; `multihead_attention`: layers that are called
  as torch's and other
  well-known ones; `tensor_attention`: attention over tensors in hand.
- `position_embeddings`: the sinusoids that are added to the input; `initialisation`: depth-aware
  initialisation, and random features sampled again; `head_axis_ops`: removes, shares and splits
  heads along named axes.
- `reference`: the slow float64 definition that every backend is tested against.
- `op_trace`: records every tensor operation, and numbers the steps of attention among them.

The names are imported when they are first used, so that descriptions of layers and models do
without torch.
"""

from typing import TYPE_CHECKING

from ..util.lazy_names import import_lazily

if TYPE_CHECKING:
    from . import head_axis_ops, reference
    from .composite_attention import LongformerAttention, MergedAttention
    from .initialisation import depth_scaled_init, redraw_features
    from .interfaces.core_types import AuxLosses
    from .masking.sequence_info import AttentionMask
    from .multihead_attention import MultiHeadAttention, MultiheadAttention
    from .position_embeddings import sinusoidal_table

_MODULE_OF_NAME = {
    "AttentionMask": "masking.sequence_info",
    "AuxLosses": "interfaces.core_types",
    "LongformerAttention": "composite_attention",
    "MergedAttention": "composite_attention",
    "MultiHeadAttention": "multihead_attention",
    "MultiheadAttention": "multihead_attention",
    "depth_scaled_init": "initialisation",
    "head_axis_ops": "head_axis_ops:",
    "redraw_features": "initialisation",
    "reference": "reference:",
    "sinusoidal_table": "position_embeddings",
}
__all__ = sorted(_MODULE_OF_NAME)
__getattr__ = import_lazily(__name__, _MODULE_OF_NAME)
__dir__ = __all__.copy
