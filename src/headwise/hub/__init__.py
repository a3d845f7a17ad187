"""Import and export of checkpoints: folders of transformers.

In reading order:

- `model_names`: turn a name into a folder or a module: the one place that does.
- `pretrained_models`: `load` a model from any folder, or copy a live transformers model; `export`
  one.
- `gguf_files`: unpack a GGUF file into a folder of transformers; read its settings.
- `transformers_loading`: load folders with transformers without running code that they name; read
  their tokenizers and special ids, and attach a tokenizer to a model.
- `checkpoint_weights`: read safetensors into headwise tensors, with all checks before reading.
- `cost_targets`: `cost` of a spec, a name or the keys of a config; `module_counting` describes
  models that headwise has no reader for, by the short runs in `counting_runs`.
- `transformers_backend`: "headwise" as an attention implementation of transformers.

Importing this package registers that implementation once.
"""

from .pretrained_models import export, load
from .transformers_backend import MODELS_MODULE, register_after_import, register_backend

__all__ = ["export", "load"]

register_after_import(MODELS_MODULE, register_backend)
