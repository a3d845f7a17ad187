"""Names of models: a folder, a GGUF file, a Hub id, or a function of a Python file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

NAME_KINDS = (
    "a folder with a model, a Hub id (org/name or org/name@revision), a .gguf file, or "
    "FILE.py:FACTORY, a function that returns a model"
)
# Names of the Hub as it allows them. No part can leave the folder of its cache.
HUB_ID = re.compile(
    r"(?!.*\.\.)(?![^@]*--)(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
MAX_REPO_LENGTH = 96  # characters, a limit of the Hub
FILE_SUFFIXES = re.compile(
    r".*\.(py|toml|json|jsonl|trace|txt|csv|html|npy|bin|pt|safetensors|gguf)", re.IGNORECASE
)
CACHED_FOLDER = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/[0-9a-f]{40}/?")


class HubId(NamedTuple):
    """A model of the Hugging Face Hub, and its branch, tag or commit (None: the main branch)."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_hub_id(name: str | Path) -> HubId | None:
    """Return the Hub id that a name is; None for paths of existing files, and for other names.

    >>> parse_hub_id("org/name"), parse_hub_id("org/name@v1.0")
    (HubId(repo='org/name', revision=None), HubId(repo='org/name', revision='v1.0'))
    >>> [parse_hub_id(name) for name in ("name", "../name", "a/b/c", "/a/b", "a/b.toml")]
    [None, None, None, None, None]
    """
    text = str(name)
    match = HUB_ID.fullmatch(text)
    if not match or len(match["repo"]) > MAX_REPO_LENGTH or FILE_SUFFIXES.fullmatch(text):
        return None
    return None if Path(name).exists() else HubId(match["repo"], match["revision"])


class Factory(NamedTuple):
    """A function without arguments in a Python file that returns a model."""

    file: Path
    function: str


def parse_factory(name: str | Path) -> Factory | None:
    """Return the factory that a name is, as in FILE.py:FACTORY; None for other names.

    >>> parse_factory("models.py:make_model").function
    'make_model'
    """
    file, _, function = str(name).rpartition(":")
    return Factory(Path(file), function) if file.endswith(".py") else None


def is_gguf_file(path: Path) -> bool:
    """True if this is a file with the name of a GGUF file."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def label_model(name: str | Path) -> str:
    """Return a short label of a model: the last part of its path or Hub id.

    >>> label_model("runs/dates"), label_model("org/Qwen3-0.6B@main")
    ('dates', 'Qwen3-0.6B')
    >>> label_model(f"/cache/models--org--Qwen3-0.6B/snapshots/{'0' * 40}")
    'Qwen3-0.6B'
    """
    cached = CACHED_FOLDER.fullmatch(str(name))
    hub_id = parse_hub_id(name)
    if cached:
        return cached[2]
    return hub_id.repo.partition("/")[2] if hub_id else Path(name).name
