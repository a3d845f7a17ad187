"""What was proven of a model that was changed, as plain values, as a file, as a page and on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .agreement import ModelAgreement
from .equality import OutputDifference
from .examples import ChangedExample
from .quality import QualityReport
from .savings import CostComparison
from .speeds import SpeedComparison

PROOF_VERSION = 1  # of the JSON document
PROOF_JSON, PROOF_PAGE = "proof.json", "PROOF.md"


@dataclass(frozen=True)
class ModelProof:
    """What was done to which model; that silencing, cutting and reading again say the same; what was saved, how fast
    both are, how well they speak, where they part, and the texts that changed most."""

    model: str
    what: str
    keep: Mapping[str, tuple[int, ...]]
    num_texts: int
    equal: tuple[OutputDifference, ...]
    savings: CostComparison
    speeds: SpeedComparison
    quality: QualityReport
    agreement: ModelAgreement
    examples: tuple[ChangedExample, ...]
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
            "version": PROOF_VERSION, "model": self.model, "what": self.what, "command": self.command, "texts": self.num_texts,
            "keep": {site: list(heads) for site, heads in self.keep.items()}, "holds": self.holds,
            "equal": [one.data for one in self.equal], "savings": self.savings.data, "speeds": self.speeds.data,
            "quality": self.quality.data, "agreement": self.agreement.data,
            "examples": [one.data for one in self.examples],
            "versions": dict(self.versions or {}), "notes": list(self.notes),
        }  # fmt: skip
        return replace_non_finite(told)


def write_proof(proof: ModelProof, folder: Path | str) -> tuple[Path, Path]:
    """The proof as a file for programs and a page for people, in a folder, made where it is missing."""
    from .page import render_proof

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / PROOF_JSON, folder / PROOF_PAGE
    write_atomically(paths[0], (json.dumps(proof.data, indent=1, allow_nan=False) + "\n").encode())
    write_atomically(paths[1], render_proof(proof).encode())
    return paths


def replace_non_finite(value: Any) -> Any:
    """Plain values with None for every number that is not finite.

    >>> replace_non_finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {name: replace_non_finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
