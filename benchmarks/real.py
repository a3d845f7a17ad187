"""Where real data lies: beside the repository, never in it."""

from __future__ import annotations

import gzip
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def found(*names: str) -> list[Path] | None:
    """These files, or None with a word about it when one is not there."""
    paths = [DATA / name for name in names]
    if missing := [path for path in paths if not path.exists()]:
        print(f"skipped: there is no {missing[0].name} in shared/data beside this repository")
        return None
    return paths


def unpacked(paths: list[Path], folder: Path) -> list[str]:
    """The same files, unpacked into a folder."""
    made = []
    for path in paths:
        into = folder / path.name.removesuffix(".gz")
        into.write_bytes(gzip.decompress(path.read_bytes()))
        made.append(str(into))
    return made
