"""Import and export of checkpoints: transformers folders and llama2.c files.

`model_import` and `checkpoint_weights` read them into our models, `model_export` writes a transformers folder,
`tokenizer_files` converts tokenizers, `llama2c` reads llama2.c. `transformers_backend` registers headwise as an
attention implementation of transformers; importing this package registers it once.
"""

from .model_export import export
from .model_import import load
from .transformers_backend import register_on_import

__all__ = ["export", "load"]

register_on_import()
