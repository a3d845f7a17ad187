"""Runnable models: `build` turns a `ModelSpec` into a `Transformer`, `save` and `load` store it in
a folder.

In reading order:

- `transformer`: `build` and the `Transformer` module, with encoding, caching, probes and
  initial weights ("xavier", "depth", "gpt2"); `ModelCache`
- `block`: one layer (attention, cross-attention, feed-forward and their norms; a gated recurrent
  unit or a causal
  convolution in place of self-attention) and a stack of layers
- `feed_forward`: activations, norms, feed-forwards and mixtures of experts
- `embeddings_heads`: token, patch and position embeddings; output heads and their pooling
- `save_load`: the folder format, with checksums and the tokenizer
- `hub_files`: fetch a model of the Hub into its cache
- `batch`: inputs with labels; `vocabulary`: vocabularies and calls of tokenizers

In packages: `model_spec`, the description of a model; `families`, readers of config.json;
`generation`, decoding and the engine; `distributed`, ranks, shards and collectives.

The names are imported when they are first used, so that descriptions of layers and models do
without torch.
"""

from typing import TYPE_CHECKING

from ..util.lazy_names import import_lazily

if TYPE_CHECKING:
    from .embeddings_heads import TokenTypeInput
    from .save_load import load, save
    from .transformer import INIT_SCHEMES, EncoderOutput, ModelCache, Transformer, build

_MODULE_OF_NAME = {
    "EncoderOutput": "transformer",
    "INIT_SCHEMES": "transformer",
    "ModelCache": "transformer",
    "TokenTypeInput": "embeddings_heads",
    "Transformer": "transformer",
    "build": "transformer",
    "load": "save_load",
    "save": "save_load",
}
__all__ = sorted(_MODULE_OF_NAME)
__getattr__ = import_lazily(__name__, _MODULE_OF_NAME)
__dir__ = __all__.copy
