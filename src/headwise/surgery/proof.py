"""What was proven of a model that was changed, as plain values, as a file, as a page and on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .agreement import Agreement
from .equality import Difference
from .examples import Example
from .quality import Quality
from .savings import Savings
from .speeds import Speeds

VERSION = 1  # of the JSON document
JSON, PAGE = "proof.json", "PROOF.md"


@dataclass(frozen=True)
class Proof:
    """What was done to which model; that silencing, cutting and reading again say the same; what was saved, how fast
    both are, how well they speak, where they part, and the texts that changed most."""

    model: str
    what: str
    keep: Mapping[str, tuple[int, ...]]
    texts: int
    equal: tuple[Difference, ...]
    savings: Savings
    speeds: Speeds
    quality: Quality
    agreement: Agreement
    examples: tuple[Example, ...]
    command: str = ""
    versions: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether everything that must say the same does, as far as rounding allows."""
        return all(one.same for one in self.equal)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values; what is no finite number is None."""
        told = {
            "version": VERSION, "model": self.model, "what": self.what, "command": self.command, "texts": self.texts,
            "keep": {site: list(heads) for site, heads in self.keep.items()}, "holds": self.holds,
            "equal": [one.data for one in self.equal], "savings": self.savings.data, "speeds": self.speeds.data,
            "quality": self.quality.data, "agreement": self.agreement.data,
            "examples": [one.data for one in self.examples],
            "versions": dict(self.versions or {}), "notes": list(self.notes),
        }  # fmt: skip
        return finite(told)


def write(proof: Proof, folder: Path | str) -> tuple[Path, Path]:
    """The proof as a file for programs and a page for people, in a folder, made where it is missing."""
    from .page import page

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / JSON, folder / PAGE
    write_atomically(paths[0], (json.dumps(proof.data, indent=1, allow_nan=False) + "\n").encode())
    write_atomically(paths[1], page(proof).encode())
    return paths


def finite(told: Any) -> Any:
    """Plain values with None for every number that is not finite.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(told, Mapping):
        return {name: finite(one) for name, one in told.items()}
    if isinstance(told, (list, tuple)):
        return [finite(one) for one in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told
