"""Blocks: what one spec cannot say, because several layers act as one or because it concerns depth."""

from .depth_init import depth_scaled_init
from .longformer_attention import LongformerAttention
from .merged_attention import MergedAttention

__all__ = ["LongformerAttention", "MergedAttention", "depth_scaled_init"]
