"""Whatever a folder or a file holds, as a model that runs."""

from __future__ import annotations

from pathlib import Path

from .. import models
from ..blueprint.manifest import MANIFEST_FILE
from ..errors import SpecError
from ..models import Transformer
from . import llama2c, pretrained

MODEL_FILE_SUFFIXES = (".safetensors", ".json", ".toml")  # of a folder


def load(what: Path | str, *, dropout: float = 0.0, tokenizer: Path | str | None = None) -> Transformer:
    """The model that a folder or a file holds, in the dtype it was saved in, set to answer and not to train.

    A folder as `hw.save` writes it, one as transformers does (config.json beside model.safetensors, or beside shards
    with their index), or a file of llama2.c, such as stories260K.bin. `net.tokenizer` is the document of the tokenizer
    that lies beside it; `tokenizer` names that of a llama2.c file where it lies elsewhere. Nothing that is read is run:
    pickles are refused, and code that a config.json names is left alone.

    >>> import headwise as hw, tempfile
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hw.save(net, f"{folder}/ours")
    ...     hw.export_weights(net, f"{folder}/theirs")
    ...     [load(f"{folder}/{name}").described.name for name in ("ours", "theirs")]
    ['gpt2', 'gpt2']
    """
    path = Path(what)
    if path.is_file() and path.suffix in MODEL_FILE_SUFFIXES:
        raise SpecError(f"{path} is one of the files of a model; give the folder that it lies in")
    if path.is_file():
        return llama2c.load_llama2c(path, dropout, None if tokenizer is None else Path(tokenizer))
    if tokenizer is not None:
        raise SpecError(f"{path} is a folder, whose tokenizer lies in it; leave tokenizer out, or name a llama2.c file")
    if (path / MANIFEST_FILE).is_file():
        return models.load(path, dropout=dropout)
    if (path / pretrained.CONFIG_FILE).is_file():
        return pretrained.load_transformers_folder(path, dropout)
    raise SpecError(_not_loadable_message(path))


def _not_loadable_message(path: Path) -> str:
    """Why there is nothing to load."""
    kinds = "a folder that hw.save or transformers wrote, or a file of llama2.c"
    if not path.is_dir():
        return f"there is no folder or file {str(path)!r}; give {kinds}"
    if pickle := pretrained.find_pickle(path):
        return f"{path} holds {pickle}, a pickle, which runs code when it is read; give {kinds}"
    return f"{path} holds neither {MANIFEST_FILE} nor {pretrained.CONFIG_FILE}; give {kinds}"
