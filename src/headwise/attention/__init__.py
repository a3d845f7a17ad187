"""Attention layers as torch modules.

In reading order:

- `attention`: the layer; it owns the parameters of a spec and runs the steps of attention in order.
- `attention_call`: checks, completes and plans one call, and asks `backends` which one runs.
- `bound_parts`: the parts of a layer with their weights.
- `parallel_context`: the hook for tensor and context parallelism.
- `composite_attention`: layers that combine several; `multihead_attention`: layers that are called
  as torch's and other
  well-known ones; `tensor_attention`: attention over tensors in hand.
- `position_embeddings`: added to the input; `initialisation`: depth-aware initialisation, and
  random features sampled
  again; `head_axis_ops`: removes, shares and splits heads along named axes.
- `reference`: the slow float64 definition that every backend is tested against.
- `op_trace`: records every tensor operation, and numbers the steps of attention among them.
"""

from . import head_axis_ops, position_embeddings, reference
from .composite_attention import LongformerAttention, MergedAttention
from .initialisation import depth_scaled_init, redraw_features
from .multihead_attention import MultiHeadAttention, MultiheadAttention

__all__ = [
    "LongformerAttention",
    "MergedAttention",
    "MultiHeadAttention",
    "MultiheadAttention",
    "depth_scaled_init",
    "head_axis_ops",
    "position_embeddings",
    "redraw_features",
    "reference",
]
