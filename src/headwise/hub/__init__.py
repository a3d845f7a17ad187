"""Models as others keep them: folders of transformers, files of llama2.c; read into ours, and written back.

Importing it lets transformers run its own models on headwise (`registered`).
"""

from .model_export import export
from .model_import import load
from .transformers_backend import register_on_import

__all__ = ["export", "load"]

register_on_import()
