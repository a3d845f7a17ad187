"""The file that says what a folder with a model in it holds: the description, how it is used, and checksums."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from ..errors import SpecError
from .model import Model
from .text import from_dict, to_dict, toml_document
from .usage import DOCUMENTS, Usage

MANIFEST, WEIGHTS, TOKENIZER = "headwise.toml", "model.safetensors", "tokenizer.json"
FILES = (WEIGHTS, *(f"{name}.json" for name in DOCUMENTS))
FORMAT = 1  # of the folder; a reader refuses what it does not know


class Manifest(NamedTuple):
    """A description, the SHA-256 of each file beside it, by name, and how the model is used.

    The documents of a usage are such files, and not in the text.
    """

    model: Model
    checksums: Mapping[str, str]
    usage: Usage = Usage()

    def __str__(self) -> str:
        files = [{"name": name, "sha256": checksum} for name, checksum in self.checksums.items()]
        usage = {"usage": self.usage.table} if self.usage.table else {}
        return toml_document({"format": FORMAT, "files": files, **usage, "model": to_dict(self.model)})

    @staticmethod
    def of(text: str, where: str) -> Manifest:
        """Read what `str` gives; `where` names the file in what is said of it.

        >>> from headwise.families import read
        >>> told = Manifest(read({"model_type": "gpt2"}), {WEIGHTS: "00ff"}, Usage(end=(50256,)))
        >>> Manifest.of(str(told), "here") == told
        True
        """
        said = _table(text, where)
        if said.get("format") != FORMAT:
            found = said.get("format")
            raise SpecError(f"{where} says format = {found!r}; this version reads format = {FORMAT}, no other")
        if set(said) - {"usage"} != {"format", "files", "model"}:
            raise SpecError(f"{where} holds {', '.join(said)}; it must hold format, files and model, as hw.save writes")
        checksums = dict(_checksum(row, where) for row in _rows(said["files"]))
        return Manifest(from_dict(said["model"]), checksums, _usage(said.get("usage", {}), where))


def described(text: str, where: str, usual: Mapping[str, Any]) -> Model:
    """The model that a TOML document describes, bare or in a manifest."""
    said = _table(text, where)
    return Manifest.of(text, where).model if "format" in said else from_dict(said, usual)


def _table(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise SpecError(f"{where} is not TOML: {error}; give a file as hw.save or to_toml writes it") from None


def _usage(said: Any, where: str) -> Usage:
    if not isinstance(said, dict):
        raise SpecError(f"{where}: usage = {said!r} is no table; save the model again")
    try:
        return Usage.of(cast("dict[str, Any]", said))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _rows(said: Any) -> list[Any]:
    return cast("list[Any]", said) if isinstance(said, list) else [said]


def _checksum(row: Any, where: str) -> tuple[str, str]:
    table = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    name, checksum = table.get("name"), table.get("sha256")
    if name not in FILES or not isinstance(checksum, str):
        raise SpecError(f"{where}: files = {row!r} is none of {', '.join(FILES)} with a checksum; save the model again")
    return str(name), checksum
