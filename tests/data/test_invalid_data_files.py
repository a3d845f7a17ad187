"""Invalid data files give one line with the fact, the place and the remedy."""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

import headwise as hw
from headwise.data import open_data
from headwise.data.language_modelling import TextTask

LINES = "".join(f"sentence number {n}\n" for n in range(40))
PAIRS = "".join(f"source {n}\ttarget {n}\n" for n in range(40))
IMAGE_LABELS = np.arange(12) % 3
PICTURES = np.arange(12 * 6 * 5, dtype=np.uint8).reshape(12, 6, 5)


def write(name: str, content: bytes | str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def npy(name: str, array: Any, cut: int | None = None) -> None:
    np.save(name, array)
    write(name, Path(name).read_bytes()[:cut])


def npz(cut: int | None = None, **arrays: Any) -> None:
    np.savez("a.npz", **arrays)
    write("a.npz", Path("a.npz").read_bytes()[:cut])


def picture(name: str, size: tuple[int, int] = (5, 6), mode: str = "L") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(name)


def frames(*labels: str, broken: float = 1.0) -> None:
    for n in range(3):
        one = np.ones((4, 2))
        one[2, 1] = broken if n == 1 else 1.0
        np.save(f"u{n}.npy", one)
    write("labels.tsv", "\n".join(labels))


def meta(**options: Any) -> None:
    write("a.json", json.dumps(options))


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
        lambda: open_data("a.tsv", {"form": "bucket"}),
        "form='bucket' .. 'bucketed'",
    ),
    (
        lambda: write("a.tsv", PAIRS),
        lambda: open_data("a.tsv", {"longest": 2}),
        "at most longest=2 .. larger longest=",
    ),
    (
        lambda: write("a.tsv", PAIRS),
        lambda: open_data("a.tsv", {"form": "budget", "vocab": 258}).batch(0, 5),
        "5 tokens is too small for an example of .. use batch=",
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
    # tokens
    (lambda: npy("a.npy", np.zeros(0, np.int64)), "a.npy", "a.npy is empty"),
    (
        lambda: npy("a.npy", np.zeros(99)),
        "a.npy",
        "holds float64 of shape 99 .. integers in one dimension",
    ),
    (lambda: npy("a.npy", np.zeros((3, 9), int)), "a.npy", "int64 of shape 3 x 9 .. one dimension"),
    (lambda: npy("a.npy", np.zeros(99, int), cut=300), "a.npy", "cannot read a.npy as .npy"),
    (lambda: npy("a.npy", np.array([{}] * 9)), "a.npy", "cannot read a.npy as .npy"),
    (lambda: write("a.npy", ""), "a.npy", "cannot read a.npy as .npy"),
    (
        lambda: npy("a.npy", np.array([3] * 99 + [-2])),
        "a.npy",
        "id -2 at index 99, outside any vocabulary",
    ),
    (
        lambda: npy("a.npy", np.array([3] * 4_200_000 + [512, 513])),
        lambda: open_data("a.npy", {"vocab": 512}),
        "id 512 at index 4200000, outside the vocabulary of 512 .. tokenizer",
    ),
    (lambda: npy("a.npy", np.zeros(9, int)), "a.npy", "8 tokens .. length=64"),
    (
        lambda: write("a.bin", b"\1\0" * 99),
        "a.bin",
        "the dtype of a.bin is unknown .. dtype='uint16' .. a.json",
    ),
    (
        lambda: [write("a.bin", b"\1\0\1"), meta(dtype="uint16")],
        "a.bin",
        "3 bytes .. multiple of the 2 of uint16",
    ),
    (lambda: [write("a.bin", ""), meta(dtype="uint16")], "a.bin", "a.bin is empty"),
    (
        lambda: [write("a.bin", b"\1\0" * 9), meta(dtype="float16")],
        "a.bin",
        "a.json: dtype='float16' .. int32",
    ),
    (
        lambda: [write("a.bin", b"\1\0" * 9), meta(vocab="many")],
        "a.bin",
        "a.json holds .. vocab as an integer",
    ),
    (
        lambda: [write("a.bin", b"\1\0" * 9), write("a.json", "{")],
        "a.bin",
        "a.json is not valid JSON",
    ),
    (
        lambda: [write("a.bin", b"\1\0" * 9), write("a.json", "[]")],
        "a.bin",
        "a.json holds list .. an object",
    ),
    (
        lambda: [write("a.bin", b"\1\0" * 9), meta(dtype="uint16", vocab=7)],
        lambda: open_data("a.bin", {"vocab": 8}),
        "vocab=8, but a.json has vocab=7",
    ),
    (
        lambda: write("a.safetensors", b"\x10\0\0\0\0\0\0\0{}"),
        "a.safetensors",
        "a.safetensors as safetensors",
    ),
    (
        lambda: save_file({"a": np.zeros(3), "b": np.zeros(2)}, "a.safetensors"),
        "a.safetensors",
        "tensors a, b .. tensor=",
    ),
    (
        lambda: save_file({"a": np.zeros(3)}, "a.safetensors"),
        "a.safetensors",
        "holds float64 of shape 3 .. integers",
    ),
    (
        lambda: save_file({"ids": np.zeros(99, int)}, "a.safetensors"),
        lambda: open_data("a.safetensors", {"tensor": "idz"}),
        "no tensor 'idz' .. 'ids'",
    ),
    (
        lambda: [
            npy("train.npy", IMAGE_LABELS),
            npy("val.npy", IMAGE_LABELS),
            npy("dev.npy", IMAGE_LABELS),
        ],
        ".",
        "dev.npy and val.npy, both",
    ),
    (
        lambda: [npy("test.npy", IMAGE_LABELS), npy("val.npy", IMAGE_LABELS)],
        "tokens:.",
        "nothing named train",
    ),
    # jsonl
    (lambda: write("a.jsonl", ""), "a.jsonl", "a.jsonl is empty"),
    (
        lambda: write("a.jsonl", '{"text": "a"}\n{"text": '),
        "a.jsonl",
        "line 2 of a.jsonl is not valid JSON",
    ),
    (lambda: write("a.jsonl", "[" * 99_999), "a.jsonl", "line 1 of a.jsonl is not valid JSON"),
    (
        lambda: write("a.jsonl", '"a"'),
        "a.jsonl",
        "line 1 of a.jsonl holds str .. one object per line",
    ),
    (
        lambda: write("a.jsonl", '{"txt": "a"}'),
        "a.jsonl",
        "line 1 of a.jsonl has no field 'text' .. as text_field=",
    ),
    (
        lambda: write("a.jsonl", '{"text": 3}'),
        "a.jsonl",
        "'text' in line 1 of a.jsonl is of type int; write text",
    ),
    (
        lambda: write("a.jsonl", '{"text": "a", "kind": null}'),
        lambda: open_data("a.jsonl", {"label_field": "kind"}),
        "'kind' in line 1 of a.jsonl is of type NoneType; write text or an integer",
    ),
    (
        lambda: write("a.jsonl", '{"text": "a", "kind": 1}\n{"text": "b"}'),
        lambda: open_data("a.jsonl", {"label_field": "kind"}),
        "line 2 of a.jsonl has no field 'kind' .. label_field=",
    ),
    (
        lambda: write("a.jsonl", '{"text": "a", "kind": 1}\n' * 9),
        lambda: open_data("a.jsonl", {"label_field": "kind"}),
        "1 different examples",
    ),
    (
        lambda: write("a.jsonl", "".join(f'{{"text": "{n}", "kind": 1}}\n' for n in range(9))),
        lambda: open_data("a.jsonl", {"label_field": "kind"}),
        "all 9 labels are '1' .. two classes",
    ),
    (
        lambda: write("a.jsonl", "{}"),
        lambda: open_data("a.jsonl", {"source_field": "a"}),
        "two fields .. target",
    ),
    # images
    (lambda: write("a-idx3-ubyte", ""), "images:a-idx3-ubyte", "no labels for a-idx3-ubyte"),
    (
        lambda: [write("a-images-idx3-ubyte", idx(PICTURES))],
        "a-images-idx3-ubyte",
        "a-labels-idx1-ubyte is missing",
    ),
    (
        lambda: [
            write("images-idx3-ubyte", idx(PICTURES)[:-1]),
            write("labels-idx1-ubyte", idx(IMAGE_LABELS)),
        ],
        "images-idx3-ubyte",
        "has 375 bytes, but 12 x 6 x 5 numbers of 1 bytes need 376",
    ),
    (
        lambda: [
            write("images-idx3-ubyte", idx(PICTURES) + b"x"),
            write("labels-idx1-ubyte", idx(IMAGE_LABELS)),
        ],
        "images-idx3-ubyte",
        "has 377 bytes .. need 376",
    ),
    (
        lambda: [
            write("images-idx3-ubyte", idx(PICTURES)[:9]),
            write("labels-idx1-ubyte", idx(IMAGE_LABELS)),
        ],
        "images-idx3-ubyte",
        "has 9 bytes, fewer than its header of 16",
    ),
    (
        lambda: [
            write("images-idx3-ubyte", b"\x89PNG"),
            write("labels-idx1-ubyte", idx(IMAGE_LABELS)),
        ],
        "images-idx3-ubyte",
        "not an idx file: it starts with the bytes 89 50 4e 47",
    ),
    (
        lambda: [
            write("images-idx3-ubyte", idx(PICTURES)),
            write("labels-idx1-ubyte", idx(IMAGE_LABELS[:-1])),
        ],
        "images-idx3-ubyte",
        "12 images, but 11 labels",
    ),
    (
        lambda: [
            write("images-idx3-ubyte", idx(PICTURES[:0])),
            write("labels-idx1-ubyte", idx(IMAGE_LABELS[:0])),
        ],
        "images-idx3-ubyte",
        "uint8 of shape 0 x 6 x 5",
    ),
    (
        lambda: [
            write("images-idx3-ubyte.gz", gzip.compress(idx(PICTURES))[:-9]),
            write("labels-idx1-ubyte", idx(IMAGE_LABELS)),
        ],
        "images-idx3-ubyte.gz",
        "damaged gzip",
    ),
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
        "4 x 5 x 1 .. 6 x 5 x 1 .. one size",
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
    (
        lambda: npz(x=PICTURES, y=IMAGE_LABELS),
        lambda: open_data("a.npz", {"labels": "a.npz"}),
        "not for a.npz .. leave it out",
    ),
    (lambda: picture("b/test/x/0.png"), "b", "b has test, but nothing named train"),
    (
        lambda: npz(x=PICTURES, y=IMAGE_LABELS),
        lambda: open_data("a.npz", {"size": [3, 3]}),
        "size=(3, 3) .. leave it out",
    ),
    # frames
    (
        lambda: frames("u0\ta", "u1\tb", "u2\ta", broken=float("nan")),
        ".",
        "frame 2 of utterance u1 .. NaN or inf",
    ),
    (
        lambda: frames("u0\ta", "u1\tb", "u2\ta", broken=float("inf")),
        ".",
        "frame 2 of utterance u1 .. NaN or inf",
    ),
    (lambda: frames("u0\ta", "u1\tb"), ".", "u2.npy has no label in labels.tsv"),
    (lambda: frames("u0\ta", "u1", "u2\ta"), ".", "line 2 of labels.tsv has no label"),
    (lambda: frames("u0\ta", "u1\tb", "u1\ta"), ".", "line 3 of labels.tsv names u1 again"),
    (lambda: frames("u0\ta", "u3\tb"), ".", "no file 'u3.npy'"),
    (
        lambda: frames("u0\ta b a b", "u1\ta b", "u2\ta a a a"),
        ".",
        "u1 of . has 4 frames, but 2 labels",
    ),
    (lambda: frames(""), ".", "labels.tsv is empty"),
    (
        lambda: [frames("u0\ta", "u1\tb", "u2\ta"), npy("u1.npy", np.ones((4, 3)))],
        ".",
        "u1 of . has 3 features .. 2",
    ),
    (
        lambda: [frames("u0\ta", "u1\tb", "u2\ta"), npy("u0.npy", np.ones(4))],
        ".",
        "u0 of . holds float64 [4]",
    ),
    (lambda: npz(frames=np.ones((3, 4, 2))), "a.npz", "has frames, but no 'labels'"),
    (
        lambda: npz(frames=np.ones((3, 4, 2)), labels=np.ones(5, int)),
        "a.npz",
        "labels [5] for 3 utterances of 12 frames",
    ),
    (
        lambda: npz(frames=np.ones((9, 2)), lengths=[4, 4], labels=[0, 1]),
        "a.npz",
        "[9, 2] and lengths that sum to 8",
    ),
    (lambda: npy("b.npy", np.ones((4, 2))), "frames:.", "has no labels.tsv"),
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


def test_a_tokenizer_of_another_vocabulary_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write("a.txt", LINES)
    write("t.json", TextTask("a.txt", "bpe", 270).tokenizer or "")
    npy("a.npy", np.arange(300))
    with pytest.raises(
        hw.SpecError, match=r"id 270 at index 270, outside the vocabulary of 270; .*tokenizer"
    ):
        open_data("a.npy", {"tokenizer_path": "t.json"})
    with pytest.raises(
        hw.SpecError, match=r"t.json has 270 tokens, more than vocab=260; .*tokenizer"
    ):
        open_data("a.npy", {"tokenizer_path": "t.json", "vocab": 260})


def test_an_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text(LINES)

    def refused(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(hw.SpecError, match=r"cannot read .*a.txt: Permission denied; "):
        open_data(str(tmp_path / "a.txt"))
