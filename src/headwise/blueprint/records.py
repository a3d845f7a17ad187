"""heads.json: what was done to the heads of a model, and what its folder holds that config.json does not say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..errors import SpecError
from .model import Model
from .text import from_dict

HEADS = "heads.json"
FORMAT = 1  # of the file; a reader refuses what it does not know
KINDS = ("ours", "transformers", "resized")


class Record(NamedTuple):
    """What heads.json says: the kind of folder it lies in, and the SHA-256 of each file beside it, by name.

    A "resized" folder has the tensors of transformers in shapes that its config.json cannot say: `model` describes
    them, `constants` are numbers of attentions that files do not hold, `besides` names tensors that mean nothing now.
    """

    kind: str
    sentence: str
    done: Mapping[str, Any]
    source: Mapping[str, str]
    files: Mapping[str, str]
    model: Model | None = None
    constants: Mapping[str, Any] = {}
    besides: tuple[str, ...] = ()

    @staticmethod
    def of(path: Path) -> Record:
        """Read the file."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SpecError(f"{path} cannot be read: {error}; copy the folder again") from None
        told = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        if told.get("format") != FORMAT:
            raise SpecError(f"{path} says format = {told.get('format')!r}; this version reads format = {FORMAT}")
        if told.get("kind") not in KINDS:
            raise SpecError(
                f"{path} says kind = {told.get('kind')!r}, none of {', '.join(KINDS)}; copy the folder again"
            )
        tables = {name: _table(path, told, name) for name in ("done", "source", "files", "constants")}
        besides, described = told.get("besides", []), told.get("model")
        if not isinstance(besides, list) or (described is None) != (told["kind"] != "resized"):
            raise SpecError(f"{path} does not say what a folder of kind {told['kind']!r} holds; copy the folder again")
        model = None if described is None else from_dict(_table(path, told, "model"))
        return Record(
            told["kind"],
            str(told.get("sentence", "")),
            **tables,
            model=model,
            besides=tuple(str(one) for one in cast("list[Any]", besides)),
        )


def _table(path: Path, said: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = said.get(name, {})
    if not isinstance(found, dict):
        raise SpecError(f"{path}: {name} = {found!r} is no table; copy the folder again")
    return cast("dict[str, Any]", found)


def record_in(folder: Path) -> Record | None:
    """What the heads.json of a folder says; None where there is none."""
    path = folder / HEADS
    return Record.of(path) if path.is_file() else None
