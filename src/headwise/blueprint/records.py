"""heads.json: what was done to the heads of a model, and what its folder holds that config.json does not say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..errors import SpecError
from .model import ModelSpec
from .text import from_dict

RECORD_FILE = "heads.json"
RECORD_FORMAT = 1  # of the file; a reader refuses what it does not know
RECORD_KINDS = ("ours", "transformers", "resized")


class SurgeryRecord(NamedTuple):
    """What heads.json says: the kind of folder it lies in, and the SHA-256 of each file beside it, by name.

    A "resized" folder has the tensors of transformers in shapes that its config.json cannot say: `model` describes
    them, `constants` are numbers of attentions that files do not hold, `besides` names tensors that mean nothing now.
    """

    kind: str
    sentence: str
    done: Mapping[str, Any]
    source: Mapping[str, str]
    files: Mapping[str, str]
    model: ModelSpec | None = None
    constants: Mapping[str, Any] = {}
    besides: tuple[str, ...] = ()

    @staticmethod
    def from_file(path: Path) -> SurgeryRecord:
        """Read the file."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SpecError(f"{path} cannot be read: {error}; copy the folder again") from None
        told = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        if told.get("format") != RECORD_FORMAT:
            raise SpecError(f"{path} says format = {told.get('format')!r}; this version reads format = {RECORD_FORMAT}")
        if told.get("kind") not in RECORD_KINDS:
            raise SpecError(
                f"{path} says kind = {told.get('kind')!r}, none of {', '.join(RECORD_KINDS)}; copy the folder again"
            )
        tables = {name: _read_table(path, told, name) for name in ("done", "source", "files", "constants")}
        besides, described = told.get("besides", []), told.get("model")
        if not isinstance(besides, list) or (described is None) != (told["kind"] != "resized"):
            raise SpecError(f"{path} does not say what a folder of kind {told['kind']!r} holds; copy the folder again")
        model = None if described is None else from_dict(_read_table(path, told, "model"))
        return SurgeryRecord(
            told["kind"],
            str(told.get("sentence", "")),
            **tables,
            model=model,
            besides=tuple(str(one) for one in cast("list[Any]", besides)),
        )


def _read_table(path: Path, said: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = said.get(name, {})
    if not isinstance(found, dict):
        raise SpecError(f"{path}: {name} = {found!r} is no table; copy the folder again")
    return cast("dict[str, Any]", found)


def find_record(folder: Path) -> SurgeryRecord | None:
    """What the heads.json of a folder says; None where there is none."""
    path = folder / RECORD_FILE
    return SurgeryRecord.from_file(path) if path.is_file() else None
