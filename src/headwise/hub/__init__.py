"""Models as others keep them: folders of transformers, files of llama2.c; read into ours, and written back."""

from .exporting import export
from .loading import load

__all__ = ["export", "load"]
