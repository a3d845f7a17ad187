"""Runnable models: `build` turns a `ModelSpec` into a `Transformer`, `save` and `load` store it in
a folder.

In reading order:

- `transformer`: `build` and the `Transformer` module, with encoding, caching and probes;
  `ModelCache`
- `block`: one layer (attention, cross-attention, feed-forward and their norms; a gated recurrent
  unit or a causal
  convolution in place of self-attention) and a stack of layers
- `feed_forward`: activations, norms, feed-forwards and mixtures of experts
- `embeddings_heads`: token, patch and position embeddings; output heads and their pooling
- `initialisation`: initial weights ("xavier", "depth", "gpt2")
- `save_load`: the folder format, with checksums and the tokenizer
"""

from .embeddings_heads import TokenTypeInput
from .initialisation import INIT_SCHEMES
from .save_load import load, save
from .transformer import EncoderOutput, ModelCache, Transformer, build

__all__ = [
    "INIT_SCHEMES",
    "EncoderOutput",
    "ModelCache",
    "TokenTypeInput",
    "Transformer",
    "build",
    "load",
    "save",
]
