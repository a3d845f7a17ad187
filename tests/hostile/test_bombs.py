"""Small files that unpack to much, or claim to, are refused before memory is used for them."""

from __future__ import annotations

import gzip
import io
import resource
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from headwise.training.data import images, open_data, text_files
from headwise.util.errors import SpecError

LIMIT = 2**20
GROWTH_KIB = 200 * 2**10  # of the peak memory, while a bomb is refused


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_UNPACKED_BYTES", LIMIT)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def make_png(width: int, height: int) -> bytes:
    """A PNG of this size with no pixels behind its header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def make_npz(shape: tuple[int, ...], content: bytes) -> bytes:
    """An archive with one array that claims a shape."""
    buffer, array = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(
        array, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", array.getvalue() + content)
    return buffer.getvalue()


def test_gzip_bombs_are_refused(tmp_path: Path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(2**28)))
    before = peak_kib()
    with pytest.raises(SpecError, match="unpacks to more than 1,048,576 bytes; unpack it"):
        list(text_files.read_chunks(path))
    assert peak_kib() - before < GROWTH_KIB


def test_an_archive_that_unpacks_to_much_is_refused(tmp_path: Path):
    (tmp_path / "a.npz").write_bytes(make_npz((2**28,), bytes(2**28)))
    before = peak_kib()
    with pytest.raises(SpecError, match="unpacks to more than 1,048,576 bytes"):
        text_files.read_npz(tmp_path / "a.npz")
    assert peak_kib() - before < GROWTH_KIB


@pytest.mark.parametrize("shape", [(2**62,), (2**40, 2**40), (2**45,), (-1, 3)])
def test_an_array_that_claims_a_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]):
    (tmp_path / "a.npz").write_bytes(make_npz(shape, b"abc"))
    with pytest.raises(SpecError, match=r"cannot read .* as \.npz"):
        text_files.read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("width", "height"), [(2**13 + 1, 2**13), (2**14, 2**14), (2**31 - 1, 2**31 - 1)]
)
def test_a_picture_of_too_many_pixels_is_refused(tmp_path: Path, width: int, height: int):
    for split in ("train", "valid"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "a.png").write_bytes(make_png(width, height))
    with pytest.raises(
        SpecError, match=r"give images of 67,108,864 pixels or less|cannot read .* as an image"
    ):
        images.ImageFiles([tmp_path / "train" / "a" / "a.png"], ())


def test_a_small_packed_file_is_read(tmp_path: Path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"ab\n" * 1000))
    assert b"".join(text_files.read_chunks(tmp_path / "a.txt.gz")) == b"ab\n" * 1000
    (tmp_path / "a.npz").write_bytes(make_npz((3,), b"abc"))
    assert text_files.read_npz(tmp_path / "a.npz")["images"].tolist() == [97, 98, 99]
    assert open_data(str(tmp_path / "a.txt.gz")) is not None
