"""A folder of transformers with attentions that its config.json cannot say, and a loader for who has no headwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..blueprint import to_dict
from ..blueprint.records import RECORD_FORMAT, RECORD_FILE
from ..errors import SpecError
from ..files import sha256
from ..models import Transformer
from .folders_modules import list_module_changes
from .folders_shards import ShardRewrite, fsync_file
from .folders_trying import check_load

LOADER_NAME = "load_model.py"
LOADER_SOURCE = Path(__file__).with_name("load_model.txt")  # text for people without headwise; nothing here runs it


class ResizedFolder(NamedTuple):
    """What is to be said of such a folder, and what its heads.json holds besides."""

    summary: str
    document: Mapping[str, Any]


def add_loader(folder: Path, rewrite: ShardRewrite, net: Transformer, reason: str) -> ResizedFolder | str:
    """Add the loader to a folder whose weights are written, once it was seen to work; else the reason why it cannot."""
    form = rewrite.form
    odd = form.find_extra_constants(rewrite.weight_names)
    document: dict[str, Any] = {
        "model": to_dict(form.model_spec),
        "constants": {name: tensor.tolist() for name, tensor in odd.items()},
        "besides": rewrite.unused_tensors,
    }
    not_plain = f"Not a plain transformers checkpoint, because {reason}; load it with headwise.load"
    if find_spec("transformers") is None:
        return ResizedFolder(f"{not_plain} (transformers is not installed, so that no loader could be tried).", document)
    (folder / LOADER_NAME).write_bytes(LOADER_SOURCE.read_bytes())
    fsync_file(folder / LOADER_NAME)
    early = {"format": RECORD_FORMAT, "kind": "resized"} | document
    (folder / RECORD_FILE).write_text(json.dumps(early), encoding="utf-8")
    try:
        found = list_module_changes(folder, rewrite)
        trial = check_load(folder, net, form, found)
    except SpecError as error:
        return str(error)
    (folder / RECORD_FILE).unlink()
    if not trial.agrees:
        return f"its own loader was tried in vain ({trial.message})"
    document |= {"modules": found[trial.candidate], "checked": trial.message}
    document |= {"loader": {"name": LOADER_NAME, "sha256": sha256(folder / LOADER_NAME)}}
    return ResizedFolder(f"{not_plain} or {LOADER_NAME}.", document)
