"""Paths of the real data, which is in `shared/data` beside the repository, never in it."""

from __future__ import annotations

import gzip
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def find_files(*names: str) -> list[Path] | None:
    """Return the paths of these files; None, with a printed notice, if one is missing."""
    paths = [DATA / name for name in names]
    missing = [path for path in paths if not path.exists()]
    if missing:
        print(f"skipped: there is no {missing[0].name} in shared/data beside this repository")
        return None
    return paths


def unpack(paths: list[Path], folder: Path) -> list[str]:
    """Unpack the files target a folder; returns the new paths."""
    unpacked_paths = []
    for path in paths:
        target = folder / path.name.removesuffix(".gz")
        target.write_bytes(gzip.decompress(path.read_bytes()))
        unpacked_paths.append(str(target))
    return unpacked_paths
