"""A model in a folder as whoever wrote it runs it: ours as ours, transformers' as transformers'."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blueprint.manifest import MANIFEST
from ..errors import SpecError
from .loading import load
from .pretrained import CONFIG

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def opened(what: Path | str) -> nn.Module:
    """The model in a folder; of one with a config.json and no weights, its layers on the meta device."""
    folder = Path(what)
    if (folder / MANIFEST).is_file() or folder.is_file():
        return load(folder)
    if not (folder / CONFIG).is_file():
        raise SpecError(f"{str(what)!r} is no folder of a model; give one with {MANIFEST} or {CONFIG}")
    if find_spec("transformers") is None:
        return load(folder)
    return _theirs(folder)


def _theirs(folder: Path) -> nn.Module:
    """What transformers makes of a folder; code that lies in it is never run, pickles are never read."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = _kind(transformers, json.loads((folder / CONFIG).read_text()))
        if any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
            return kind.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()
        with torch.device("meta"):
            make = getattr(kind, "from_config", None) or kind._from_config
            return make(config).eval()
    except Exception as error:  # whatever a folder makes transformers raise
        raise SpecError(f"{folder} cannot be read by transformers: {' '.join(str(error).split())[:300]}") from None


def _kind(transformers: Any, said: dict[str, Any]) -> Any:
    """The class that a config names, or the bare model."""
    named = (said.get("architectures") or [""])[0]
    return getattr(transformers, named, None) or transformers.AutoModel
