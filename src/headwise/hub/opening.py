"""A model in a folder as whoever wrote it runs it: ours as ours, transformers' as transformers'."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blueprint.manifest import MANIFEST_FILE
from ..errors import SpecError
from .loading import load
from .pretrained import CONFIG_FILE

WEIGHT_GLOBS = ("*.safetensors", "*.safetensors.index.json")


def load_original(path: Path | str) -> nn.Module:
    """The model in a folder; of one with a config.json and no weights, its layers on the meta device."""
    folder = Path(path)
    if (folder / MANIFEST_FILE).is_file() or folder.is_file():
        return load(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise SpecError(f"{str(path)!r} is no folder of a model; give one with {MANIFEST_FILE} or {CONFIG_FILE}")
    if find_spec("transformers") is None:
        return load(folder)
    return _load_with_transformers(folder)


def _load_with_transformers(folder: Path) -> nn.Module:
    """What transformers makes of a folder; code that lies in it is never run, pickles are never read."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = _find_class(transformers, json.loads((folder / CONFIG_FILE).read_text()))
        if any(next(folder.glob(pattern), None) for pattern in WEIGHT_GLOBS):
            return kind.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()
        with torch.device("meta"):
            make = getattr(kind, "from_config", None) or kind._from_config
            return make(config).eval()
    except Exception as error:  # whatever a folder makes transformers raise
        raise SpecError(f"{folder} cannot be read by transformers: {' '.join(str(error).split())[:300]}") from None


def _find_class(transformers: Any, said: dict[str, Any]) -> Any:
    """The class that a config names, or the bare model."""
    named = (said.get("architectures") or [""])[0]
    return getattr(transformers, named, None) or transformers.AutoModel
