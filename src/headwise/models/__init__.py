"""Whole models that run: a Transformer built from its blueprint, decoded, saved and read back."""

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
