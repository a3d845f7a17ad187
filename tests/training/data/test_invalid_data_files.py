"""Invalid data files give one line with the fact, the place and the remedy."""

from __future__ import annotations

import gzip  # noqa: F401 - used in refused.txt
import os  # noqa: F401 - used in refused.txt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import headwise as hw
from headwise.training.data import open_data
from headwise.training.data.language_modelling import TextTask  # noqa: F401 - used in refused.txt
from support.refusals import refused_cases

LINES = "".join(f"sentence number {n}\n" for n in range(40))
PAIRS = "".join(f"source {n}\ttarget {n}\n" for n in range(40))
IMAGE_LABELS = np.arange(12) % 3
PICTURES = np.arange(12 * 6 * 5, dtype=np.uint8).reshape(12, 6, 5)


def write(name: str, content: bytes | str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def npz(cut: int | None = None, **arrays: Any) -> None:
    np.savez("a.npz", **arrays)
    write("a.npz", Path("a.npz").read_bytes()[:cut])


def picture(name: str, size: tuple[int, int] = (5, 6), mode: str = "L") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(name)


def frames(labels: Any, broken: float = 1.0) -> None:
    values = np.ones((3, 4, 2))
    values[1, 2, 1] = broken
    npz(frames=values, labels=labels)


# What is in the folder, what is opened, and the words of the message in their order.


@pytest.mark.parametrize(
    ("arrange", "ask", "words"), refused_cases(__file__, "data files", globals(), 2)
)
def test_one_line_gives_problem_place_and_remedy(arrange, ask, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrange()
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    with pytest.raises((hw.SpecError, ValueError)) as caught:
        open_data(ask) if isinstance(ask, str) else ask()
    message = str(caught.value)
    assert "\n" not in message
    at = 0
    for word in words.split(" .. "):
        assert word in message[at:], message
        at = message.index(word, at) + len(word)
    assert ";" in message, "no remedy"
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


def test_an_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text(LINES)

    def refused(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(hw.SpecError, match=r"cannot read .*a.txt: Permission denied; "):
        open_data(str(tmp_path / "a.txt"))
