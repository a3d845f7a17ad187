"""The file that says what a folder with a model in it holds: the description, how it is used, and checksums."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from ..errors import SpecError
from .model import ModelSpec
from .text import from_dict, to_dict, dump_toml
from .usage import TOKENIZER_FIELDS, ProcessorSpec

MANIFEST_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "headwise.toml", "model.safetensors", "tokenizer.json"
CHECKED_FILES = (WEIGHTS_FILE, *(f"{name}.json" for name in TOKENIZER_FIELDS))
MANIFEST_FORMAT = 1  # of the folder; a reader refuses what it does not know


class ModelManifest(NamedTuple):
    """A description, the SHA-256 of each file beside it, by name, and how the model is used.

    The documents of a usage are such files, and not in the text.
    """

    model: ModelSpec
    checksums: Mapping[str, str]
    usage: ProcessorSpec = ProcessorSpec()

    def __str__(self) -> str:
        files = [{"name": name, "sha256": checksum} for name, checksum in self.checksums.items()]
        usage = {"usage": self.usage.to_dict} if self.usage.to_dict else {}
        return dump_toml({"format": MANIFEST_FORMAT, "files": files, **usage, "model": to_dict(self.model)})

    @staticmethod
    def from_toml(text: str, source: str) -> ModelManifest:
        """Read what `str` gives; `where` names the file in what is said of it.

        >>> from headwise.families import read
        >>> told = ModelManifest(read({"model_type": "gpt2"}), {WEIGHTS_FILE: "00ff"}, ProcessorSpec(end=(50256,)))
        >>> ModelManifest.of(str(told), "here") == told
        True
        """
        said = _parse_toml(text, source)
        if said.get("format") != MANIFEST_FORMAT:
            found = said.get("format")
            raise SpecError(f"{source} says format = {found!r}; this version reads format = {MANIFEST_FORMAT}, no other")
        if set(said) - {"usage"} != {"format", "files", "model"}:
            raise SpecError(f"{source} holds {', '.join(said)}; it must hold format, files and model, as hw.save writes")
        checksums = dict(_read_checksum(row, source) for row in _as_rows(said["files"]))
        return ModelManifest(from_dict(said["model"]), checksums, _read_processor(said.get("usage", {}), source))


def read_model_toml(text: str, source: str, defaults: Mapping[str, Any]) -> ModelSpec:
    """The model that a TOML document describes, bare or in a manifest."""
    said = _parse_toml(text, source)
    return ModelManifest.from_toml(text, source).model if "format" in said else from_dict(said, defaults)


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise SpecError(f"{where} is not TOML: {error}; give a file as hw.save or to_toml writes it") from None


def _read_processor(said: Any, where: str) -> ProcessorSpec:
    if not isinstance(said, dict):
        raise SpecError(f"{where}: usage = {said!r} is no table; save the model again")
    try:
        return ProcessorSpec.from_dict(cast("dict[str, Any]", said))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _as_rows(said: Any) -> list[Any]:
    return cast("list[Any]", said) if isinstance(said, list) else [said]


def _read_checksum(row: Any, where: str) -> tuple[str, str]:
    table = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    name, checksum = table.get("name"), table.get("sha256")
    if name not in CHECKED_FILES or not isinstance(checksum, str):
        raise SpecError(f"{where}: files = {row!r} is none of {', '.join(CHECKED_FILES)} with a checksum; save the model again")
    return str(name), checksum
