"""Attention layers as torch modules.

`attention` is the layer: it owns the parameters of a spec and calls its parts in order. `part_weights` holds the
tensors of one part, `call_validation` checks the arguments of a call, `parallel_context` is the hook for tensor and
context parallelism. `longformer_attention` and `merged_attention` combine several layers; `position_embeddings` are
added to the input; `tensor_attention` is attention over tensors in hand, and `multihead_attention` holds layers that
are called as torch's and other well-known ones. `depth_init` is depth-aware initialisation, `feature_redrawing` samples
random features again; `head_axis_ops` removes, shares and splits heads along named axes. `reference` is the slow
float64 definition that every backend is tested against; `op_trace` records every tensor operation,
and `attention_steps` numbers the steps of attention in it.
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
