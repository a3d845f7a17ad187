"""Invalid data files give one line with the fact, the place and the remedy."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import headwise as hw
from headwise.training.data import open_data
from headwise.training.data.language_modelling import TextTask

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
BAD: list[tuple[Callable[[], object], Callable[[], object] | str, str]] = [
    # text
    (lambda: write("b.txt", ""), "a.txt", "no file 'a.txt' .. did you mean 'b.txt'?"),
    (lambda: write("a.txt", ""), "a.txt", "a.txt is empty .. give a file with text"),
    (lambda: write("a.txt.gz", gzip.compress(b"")), "a.txt.gz", "a.txt.gz is empty"),
    (lambda: write("a.txt", "a line\n"), "a.txt", "6 tokens .. length=64 .. more text"),
    (
        lambda: write("a.txt", LINES + "\0"),
        "a.txt",
        f"NUL byte at offset {len(LINES)}, in line 41 .. plain text in UTF-8",
    ),
    (
        lambda: write("a.txt", LINES.encode("utf-16")),
        "a.txt",
        "byte 0xff at offset 0, in line 1 .. iconv",
    ),
    (
        lambda: write("a.txt", b"ok\nna\xefve\n" * 99),
        "a.txt",
        "byte 0xef at offset 5, in line 2 .. iconv",
    ),
    (
        lambda: write("a.txt", "ä".encode() * (1 << 19) + b"\nabc\xe4"),
        "a.txt",
        f"offset {(1 << 20) + 4}, in line 2",
    ),
    (
        lambda: write("a.txt.gz", gzip.compress(LINES.encode())[:-20]),
        "a.txt.gz",
        "damaged gzip .. download",
    ),
    (lambda: write("a.txt.gz", b"\x1f\x8b" + b"junk" * 9), "a.txt.gz", "damaged gzip .. download"),
    (lambda: write("b/a.xyz", "x"), "text:b", "no files with the suffixes .txt, .md .. suffixes="),
    (lambda: os.mkdir("b"), "b", "no files with the suffixes .txt"),
    (lambda: write("a.xyz", LINES), "a.xyz", "'a.xyz' has no adapter .. text:a.xyz"),
    (lambda: write("a.txt", LINES), "txt:a.txt", "no adapter 'txt' .. 'text'"),
    (lambda: os.mkfifo("a.txt"), "a.txt", "neither a regular file nor a folder"),
    (lambda: None, "x" * 999 + ".txt", "not a valid path"),
    (lambda: None, "a\0.txt", "no file 'a\\x00.txt'"),
    (lambda: None, "", "there is no file ''"),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt", tokens="byte"),
        "tokens='byte' .. did you mean 'bytes'?",
    ),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt", tokens="bpe", vocab=200),
        "vocab=200 .. 256 .. use 256",
    ),
    (lambda: write("a.txt", LINES), lambda: TextTask("a.txt", tokens="a.json"), "no file 'a.json'"),
    (
        lambda: [write("a.txt", LINES), write("a.json", "{}")],
        lambda: TextTask("a.txt", "a.json"),
        "a.json is not a tokenizer document",
    ),
    (lambda: write("a.txt", LINES), lambda: TextTask("a.txt", length=0), "length=0 .. length=64"),
    (lambda: write("a.txt", LINES), lambda: TextTask("a.txt", valid=1.2), "valid=1.2 .. valid=0.1"),
    (lambda: write("a.txt", LINES), lambda: TextTask("a.txt", valid=float("nan")), "valid=nan"),
    (lambda: write("a.txt", LINES), lambda: TextTask("a.txt", seed=-1), "seed=-1 .. 0 or more"),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt", length="9"),
        "length='9' .. str .. give int",
    ),  # pyright: ignore[reportArgumentType] - that is what is refused
    (
        lambda: write("a.txt", LINES),
        lambda: open_data("a.txt", {"lenght": 9}),
        "'lenght' .. did you mean 'length'?",
    ),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt", "chars").ids("Q"),
        "'Q' at offset 0 .. vocabulary of 21",
    ),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt").text([300]),
        "id 300 .. 256 .. 0..255",
    ),
    (lambda: write("a.txt", LINES), lambda: TextTask("a.txt").batch(-1, 2), "index=-1 .. from 0"),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt").batch(0, 0),
        "batch of 0 .. 1 or more",
    ),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt").batch(0, 2, "tset"),
        "'tset' .. did you mean 'test'?",
    ),
    (
        lambda: write("a.txt", LINES),
        lambda: TextTask("a.txt", test=0.0).batch(0, 2, "test"),
        "no test split, only train and valid .. test=0.05",
    ),
    # parallel
    (
        lambda: [write("a.de", "a\nb\n"), write("a.en", "a\nb\nc\n")],
        "a.de,a.en",
        "a.de has 2 lines, a.en has 3",
    ),
    (lambda: [write("a.de", ""), write("a.en", "")], "a.de,a.en", "no pair has text on both sides"),
    (
        lambda: [write("a.de", "a\n"), write("a.en", "a\n")],
        "a.de,a.en",
        "1 different .. too few for 3 splits .. add examples",
    ),
    (lambda: write("a.de", PAIRS), "a.de,a.en", "no file 'a.en' .. did you mean 'a.de'?"),
    (
        lambda: write("a.tsv", PAIRS + "alone\n"),
        "a.tsv",
        "line 41 of a.tsv has 1 column, .. (1, 2) .. tab",
    ),
    (lambda: write("a.tsv", ""), "a.tsv", "no pair has text"),
    (
        lambda: write("a.tsv", PAIRS.encode() + b"\xff\tx\n"),
        "a.tsv",
        f"0xff at offset {len(PAIRS)}, in line 41",
    ),
    (
        lambda: write("a.tsv", PAIRS),
        lambda: open_data("a.tsv", {"columns": [0, 1]}),
        "columns=(0, 1) .. counted from 1",
    ),
    (
        lambda: write("a.tsv", PAIRS),
        lambda: open_data("a.tsv", {"vocabularies": "share"}),
        "vocabularies='share' .. 'shared'",
    ),
    (
        lambda: write("a.tsv", PAIRS),
        lambda: open_data("a.tsv", {"longest": 2}),
        "at most longest=2 .. larger longest=",
    ),
    (
        lambda: [write("a.tsv", PAIRS), write("v.tsv", "")],
        lambda: open_data("a.tsv", {"valid": "v.tsv"}),
        "v.tsv' is empty",
    ),
    (
        lambda: write("a.tsv", PAIRS),
        lambda: open_data("a.tsv", {"valid": "a.tsv"}),
        "every training pair .. held out",
    ),
    (
        lambda: write("a.tsv", PAIRS),
        lambda: open_data("a.tsv", {"valid": ["x"]}),
        "valid=('x',) names 1 file .. give two",
    ),
    # images
    (
        lambda: npz(x=PICTURES, y=IMAGE_LABELS[:-1]),
        "a.npz",
        "12 images, but 11 labels",
    ),
    (lambda: npz(x=PICTURES[:0], y=IMAGE_LABELS[:0]), "a.npz", "uint8 of shape 0 x 6 x 5"),
    (lambda: write("a.png", "no"), "images:a.png", "cannot read a.png as .npz"),
    (
        lambda: npz(x_train=PICTURES, y_train=IMAGE_LABELS, cut=300),
        "a.npz",
        "cannot read a.npz as .npz",
    ),
    (lambda: write("a.npz", ""), "a.npz", "cannot read a.npz as .npz"),
    (lambda: npz(x_train=PICTURES), "a.npz", "has x_train, but no labels .. y_train"),
    (lambda: npz(pixels=PICTURES), "a.npz", "holds pixels .. x_train and y_train"),
    (lambda: npz(x_test=PICTURES, y_test=IMAGE_LABELS), "a.npz", "has no train split"),
    (lambda: npz(x=PICTURES, y=IMAGE_LABELS / 2), "a.npz", "labels .. float64 .. integer"),
    (lambda: npz(x=np.full((12, 6, 5), np.nan), y=IMAGE_LABELS), "a.npz", "image .. NaN or inf"),
    (
        lambda: npz(x=PICTURES, y=IMAGE_LABELS, x_test=PICTURES[:, :4], y_test=IMAGE_LABELS),
        "a.npz",
        "x_test has images of 4 x 5 as uint8, x of 6 x 5 as uint8 .. one size",
    ),
    (
        lambda: npz(x=PICTURES, y=IMAGE_LABELS, x_test=PICTURES / 2, y_test=IMAGE_LABELS),
        "a.npz",
        "x_test has images of 6 x 5 as float64, x of 6 x 5 as uint8 .. one type",
    ),
    (
        lambda: [picture("b/x/0.png"), picture("b/y/1.png", (7, 6))],
        "b",
        "y/1.png is 6 x 7 .. 6 x 5 .. size=(6, 5)",
    ),
    (lambda: [picture("b/x/0.png"), write("b/y/1.png", "no")], "b", "y/1.png as an image"),
    (
        lambda: [picture("b/x/0.png"), picture("b/1.png")],
        "b",
        "1.png is not in the folder of a class",
    ),
    (lambda: [picture("b/x/0.png"), picture("b/x/1.png", mode="I;16")], "b", "'I;16', not 8 bits"),
    (
        lambda: [picture(f"b/x/{n}.png") for n in range(9)],
        "b",
        "all 9 labels are 'x' .. two classes",
    ),
    (lambda: os.mkdir("b"), "images:b", "b has no images"),
    (lambda: picture("b/test/x/0.png"), "b", "b has test, but nothing named train"),
    (
        lambda: npz(x=PICTURES, y=IMAGE_LABELS),
        lambda: open_data("a.npz", {"size": [3, 3]}),
        "size=(3, 3) .. leave it out",
    ),
    # frames
    (lambda: frames([0, 1, 0], broken=float("nan")), "a.npz", "frame 6 of a.npz .. NaN or inf"),
    (lambda: frames([0, 1, 0], broken=float("inf")), "a.npz", "frame 6 of a.npz .. NaN or inf"),
    (lambda: npz(frames=np.ones((3, 4, 2))), "a.npz", "has frames, but no 'labels'"),
    (lambda: frames(np.arange(5)), "a.npz", "labels [5] for 3 utterances of 12 frames"),
    (lambda: frames(np.ones(3)), "a.npz", "labels of a.npz are float64 .. integers or text"),
    (lambda: frames([1, 1, 1]), "a.npz", "all 3 labels are '1' .. two classes"),
    (
        lambda: npz(frames=np.ones((9, 2)), lengths=[4, 4], labels=[0, 1]),
        "a.npz",
        "[9, 2] and lengths that sum to 8",
    ),
    (
        lambda: npz(frames=np.ones((9, 2)), lengths=[9, 0], labels=[0, 1]),
        "a.npz",
        "[9, 2] .. lengths of at least 1",
    ),
    (lambda: npz(frames=np.ones(4), labels=[0, 1]), "a.npz", "frames [4] .. give frames"),
    (
        lambda: npz(frames=np.full((2, 2, 2), "x"), labels=[0, 1]),
        "a.npz",
        "frames of <U1 .. give numbers",
    ),
    (lambda: os.mkdir("b"), "frames:b", "b is a folder .. path of a file"),
]


@pytest.mark.parametrize(
    ("arrange", "ask", "words"), BAD, ids=[f"{n}-{row[2][:40]}" for n, row in enumerate(BAD)]
)
def test_one_line_gives_problem_place_and_remedy(
    arrange: Callable[[], object],
    ask: Callable[[], object] | str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
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
