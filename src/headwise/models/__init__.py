"""Whole models that run: a Transformer built from its blueprint, decoded, saved and read back."""

from .embeddings_heads import TokenTypeInput
from .initialisation import INIT_SCHEMES
from .model_cache import ModelCache, EncoderOutput
from .save_load import load, save, read_tokenizer
from .transformer import Transformer, build

__all__ = ["INIT_SCHEMES", "ModelCache", "EncoderOutput", "Transformer", "TokenTypeInput", "build", "load", "save", "read_tokenizer"]
