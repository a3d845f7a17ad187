"""Whole models that run: a Transformer built from its blueprint, decoded, saved and read back."""

from .caches import Caches, Memory
from .decoding import greedy
from .ends import Typed
from .folder import load, save, tokenizer_of
from .generating import Decoding, pick
from .starts import STARTS
from .transformer import Transformer, build

__all__ = ["STARTS", "Caches", "Decoding", "Memory", "Transformer", "Typed", "build", "greedy", "load", "pick", "save"]
__all__ += ["tokenizer_of"]
