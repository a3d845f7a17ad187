"""Attention layers as torch modules.

In reading order:

- `attention`: the layer; it owns the parameters of a spec and runs the steps of attention in order.
- `attention_call`: checks, completes and plans one call, and asks `backends` which one runs; `call_validation`.
- `bound_parts`: the parts of a layer with their weights; `part_weights`: the tensors of one part.
- `parallel_context`: the hook for tensor and context parallelism.
- `longformer_attention`, `merged_attention`: layers that combine several; `multihead_attention`: layers that are called
  as torch's and other well-known ones; `tensor_attention`: attention over tensors in hand.
- `position_embeddings`: added to the input; `depth_init`: depth-aware initialisation; `feature_redrawing`: random
  features, sampled again; `head_axis_ops`: removes, shares and splits heads along named axes.
- `reference`: the slow float64 definition that every backend is tested against.
- `op_trace`: records every tensor operation; `attention_steps`: numbers the steps of attention in it.
"""

from . import head_axis_ops, position_embeddings, reference
from .depth_init import depth_scaled_init
from .feature_redrawing import redraw_features
from .longformer_attention import LongformerAttention
from .merged_attention import MergedAttention
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
