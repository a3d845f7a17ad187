"""Whole models that run: a Transformer built from its description.

`transformer` is the model, `block` one layer with its norms, `feed_forward` and `embeddings_heads` what stands
around attention; `model_cache` holds the caches of all layers, `initialisation` the starting weights, `save_load`
the folder format.
"""

from .embeddings_heads import TokenTypeInput
from .initialisation import INIT_SCHEMES
from .model_cache import EncoderOutput, ModelCache
from .save_load import load, read_tokenizer, save
from .transformer import Transformer, build

__all__ = [
    "INIT_SCHEMES",
    "EncoderOutput",
    "ModelCache",
    "TokenTypeInput",
    "Transformer",
    "build",
    "load",
    "read_tokenizer",
    "save",
]
