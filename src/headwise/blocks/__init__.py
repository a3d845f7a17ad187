"""Blocks: what one spec cannot say, because several layers act as one or because it concerns depth."""

from .depth import depth_scaled_init
from .longformer import LongformerAttention
from .merged import MergedAttention

__all__ = ["LongformerAttention", "MergedAttention", "depth_scaled_init"]
