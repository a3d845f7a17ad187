"""Whole models that run: a Transformer built from its blueprint, decoded, saved and read back."""

from .embeddings_heads import Typed
from .initialisation import STARTS
from .model_cache import Caches, Memory
from .save_load import load, save, tokenizer_of
from .transformer import Transformer, build

__all__ = ["STARTS", "Caches", "Memory", "Transformer", "Typed", "build", "load", "save", "tokenizer_of"]
