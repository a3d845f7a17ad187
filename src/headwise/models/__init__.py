"""Whole models that run: a Transformer built from its blueprint, decoded, saved and read back."""

from .caches import Caches, Memory
from .decoding import greedy
from .ends import Typed
from .folder import load, save, tokenizer_of
from .generating import Decoding, Said, generate, pick, stream
from .starts import STARTS
from .transformer import Transformer, build

__all__ = ["STARTS", "Caches", "Decoding", "Memory", "Said", "Transformer", "Typed", "build", "generate", "greedy"]
__all__ += ["load", "pick", "save", "stream", "tokenizer_of"]
