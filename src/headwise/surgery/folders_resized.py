"""A folder of transformers with attentions that its config.json cannot say, and a loader for who has no headwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..blueprint import to_dict
from ..blueprint.records import FORMAT, HEADS
from ..errors import SpecError
from ..files import sha256
from ..models import Transformer
from .folders_modules import ways
from .folders_shards import Rewriting, synced
from .folders_trying import tried

LOADER = "load_model.py"
TEXT = Path(__file__).with_name("load_model.txt")  # text for people without headwise; nothing here runs it


class Resized(NamedTuple):
    """What is to be said of such a folder, and what its heads.json holds besides."""

    sentence: str
    document: Mapping[str, Any]


def fill(folder: Path, way: Rewriting, net: Transformer, why: str) -> Resized | str:
    """Add the loader to a folder whose weights are written, once it was seen to work; else the reason why it cannot."""
    form = way.form
    odd = form.constants(way.names)
    document: dict[str, Any] = {
        "model": to_dict(form.described),
        "constants": {name: tensor.tolist() for name, tensor in odd.items()},
        "besides": way.besides,
    }
    not_plain = f"Not a plain transformers checkpoint, because {why}; load it with headwise.load"
    if find_spec("transformers") is None:
        return Resized(f"{not_plain} (transformers is not installed, so that no loader could be tried).", document)
    (folder / LOADER).write_bytes(TEXT.read_bytes())
    synced(folder / LOADER)
    early = {"format": FORMAT, "kind": "resized"} | document
    (folder / HEADS).write_text(json.dumps(early), encoding="utf-8")
    try:
        found = ways(folder, way)
        trial = tried(folder, net, form, found)
    except SpecError as error:
        return str(error)
    (folder / HEADS).unlink()
    if not trial.agrees:
        return f"its own loader was tried in vain ({trial.said})"
    document |= {"modules": found[trial.way], "checked": trial.said}
    document |= {"loader": {"name": LOADER, "sha256": sha256(folder / LOADER)}}
    return Resized(f"{not_plain} or {LOADER}.", document)
