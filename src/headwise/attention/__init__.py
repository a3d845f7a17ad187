"""Attention layers as torch modules.

Described by `spec`, `interfaces`, `parts` (one file for each published idea) and `presets`;
`masking` and `cache` hold positions, masks and past tokens; `backends` are implementations of the
core. In reading order:

- `attention`: the layer, which runs the steps of attention in order; `attention_base` creates its
  weights, and `core_extras` runs what only some layers need.
- `attention_call`: checks, completes and plans one call, and asks `backends` which one runs.
- `bound_parts`: the parts of a layer with their weights.
- `composite_attention`: layers that combine several; `multihead_attention`: layers that are called
  as torch's and other
  well-known ones; `tensor_attention`: attention over tensors in hand.
- `position_embeddings`: added to the input; `initialisation`: depth-aware initialisation, and
  random features sampled
  again; `head_axis_ops`: removes, shares and splits heads along named axes.
- `reference`: the slow float64 definition that every backend is tested against.
- `op_trace`: records every tensor operation, and numbers the steps of attention among them.

The names are imported when they are first used, so that descriptions of layers and models do without
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULE_OF_NAME = {
    "LongformerAttention": "composite_attention",
    "MergedAttention": "composite_attention",
    "MultiHeadAttention": "multihead_attention",
    "MultiheadAttention": "multihead_attention",
    "depth_scaled_init": "initialisation",
    "redraw_features": "initialisation",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of this package."""
    if name in _MODULE_OF_NAME:
        return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__} has no {name!r}")
