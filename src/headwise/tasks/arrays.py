"""Files of arrays: the idx format of MNIST, and numpy's .npz."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SpecError
from .reading import pieces, zipped

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx(path: Path) -> Any:
    """The array of an idx file: two zeros, a type, how many axes, their lengths, and the numbers, big end first.

    One that is not compressed stays on disk.
    """
    head = next(pieces(path), b"")[:4]
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not head[3]:
        raise SpecError(f"{path} begins with {head.hex(' ') or 'nothing'}, as no idx file does; give one, or an .npz")
    dtype, axes = np.dtype(TYPES[head[2]]), head[3]
    whole = b"".join(pieces(path)) if zipped(path) else None
    start = 4 + 4 * axes
    have = path.stat().st_size if whole is None else len(whole)
    if have < start:
        raise SpecError(f"{path} ends after {have} bytes, inside its header of {start}; fetch it again")
    told = next(pieces(path))[4:start] if whole is None else whole[4:start]
    shape = struct.unpack(f">{axes}I", told)
    wanted = start + dtype.itemsize * int(np.prod(shape, dtype=object))
    if have != wanted:
        size = " x ".join(map(str, shape))
        raise SpecError(
            f"{path} has {have} bytes, but {size} numbers of {dtype.itemsize} need {wanted}; fetch it again"
        )
    if have == start:
        return np.empty(shape, dtype)
    if whole is None:
        return np.memmap(path, dtype, "r", offset=start, shape=shape)
    return np.frombuffer(whole, dtype, offset=start).reshape(shape)


def npz(path: Path) -> dict[str, Any]:
    """The arrays of an .npz by their names."""
    try:
        with path.open("rb") as file:  # numpy leaves a broken one open
            held = np.load(file, allow_pickle=False)
            if not isinstance(held, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            return {name: held[name] for name in held.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError) as error:
        told = " ".join(str(error).split())
        raise SpecError(f"{path} is no whole .npz of numbers: {told}; write it again with numpy.savez") from None


def npy(path: Path) -> Any:
    """The array of an .npy file, which stays on disk."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        told = " ".join(str(error).split())
        raise SpecError(f"{path} is no whole .npy of numbers: {told}; write it again with numpy.save") from None
