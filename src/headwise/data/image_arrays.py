"""Files of arrays: the idx format of MNIST, and numpy's .npz."""

from __future__ import annotations

import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import EmbeddingSpec, ModelSpec, PositionSpec, ProcessorSpec
from .example_order import IndexArray
from .file_task import make_classifier, make_patches
from .labelled_examples import ClassifierInputs
from .text_files import is_gzipped, read_chunks

IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Any:
    """The array of an idx file: two zeros, a type, how many axes, their lengths, and the numbers, big end first.

    One that is not compressed stays on disk.
    """
    head = next(read_chunks(path), b"")[:4]
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES or not head[3]:
        raise SpecError(f"{path} begins with {head.hex(' ') or 'nothing'}, as no idx file does; give one, or an .npz")
    dtype, axes = np.dtype(IDX_DTYPES[head[2]]), head[3]
    whole = b"".join(read_chunks(path)) if is_gzipped(path) else None
    start = 4 + 4 * axes
    have = path.stat().st_size if whole is None else len(whole)
    if have < start:
        raise SpecError(f"{path} ends after {have} bytes, inside its header of {start}; fetch it again")
    told = next(read_chunks(path))[4:start] if whole is None else whole[4:start]
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


def read_npz(path: Path) -> dict[str, Any]:
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


def open_npy(path: Path) -> Any:
    """The array of an .npy file, which stays on disk."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        told = " ".join(str(error).split())
        raise SpecError(f"{path} is no whole .npy of numbers: {told}; write it again with numpy.save") from None


# --- Images wherever they lie --------------------------------------------------------------------------

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
STATISTICS_SAMPLE = 10_000  # images that mean and deviation are taken over
GREY_MODES = ("1", "L", "LA")
COLOUR_MODES = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")


class ImageStore(ABC):
    """So many images of one `shape`: high, wide, channels. `where` names them in a message."""

    count: int
    shape: tuple[int, int, int]
    where: str

    @abstractmethod
    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        """These images [n, high, wide, channels], whole pixels from 0 to 1."""

    @staticmethod
    def joined(stores: Sequence[ImageStore]) -> ImageStore:
        """Several as one, of images of one shape."""
        for other in stores[1:]:
            if other.shape != stores[0].shape:
                shapes = [" x ".join(map(str, one.shape)) for one in (other, stores[0])]
                raise SpecError(
                    f"{other.where} has images of {shapes[0]}, {stores[0].where} of {shapes[1]}; use one size"
                )
        return stores[0] if len(stores) == 1 else ConcatenatedImages(stores)


class ConcatenatedImages(ImageStore):
    """Stores one after the other."""

    def __init__(self, stores: Sequence[ImageStore]) -> None:
        self.stores = stores
        self.count, self.shape, self.where = sum(one.count for one in stores), stores[0].shape, stores[0].where

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        out = np.empty((len(indices), *self.shape), np.float32)
        first = 0
        for store in self.stores:
            own = (indices >= first) & (indices < first + store.count)
            out[own] = store.take(indices[own] - first)
            first += store.count
        return out


class ArrayImages(ImageStore):
    """Images of an array [n, high, wide], with channels last or first if it has any."""

    def __init__(self, images: Any, description: str) -> None:
        if images.ndim == 3:
            images = images[..., None]
        elif images.shape[3] > 4 and images.shape[1] <= 4:
            images = images.transpose(0, 2, 3, 1)
        if images.shape[3] > 4:
            shape = " x ".join(map(str, images.shape))
            raise SpecError(f"{description} is {shape}, with more than 4 channels; give [n, high, wide, channels]")
        self.images, self.count, self.where = images, len(images), description
        _, high, wide, channels = images.shape
        self.shape = high, wide, channels
        self._scale = np.float32(1 / np.iinfo(images.dtype).max if images.dtype.kind in "ui" else 1)

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        found = self.images[indices].astype(np.float32) * self._scale
        if not np.isfinite(found).all():
            wrong = int(indices[~np.isfinite(found).all((1, 2, 3))][0])
            raise SpecError(f"image {wrong} of {self.where} holds numbers that are not finite; take it out")
        return found


class ImageFiles(ImageStore):
    """Images of one file each, opened when they are asked for; brought to `size` if it is given."""

    def __init__(self, paths: Sequence[Path], size: tuple[int, ...]) -> None:
        self.paths, self.count, self.where = paths, len(paths), str(paths[0].parent.parent)
        known = [_read_header(path) for path in paths]
        first = size or known[0][:2]
        for path, (high, wide, _) in zip(paths, known, strict=True):
            if not size and (high, wide) != first:
                fact = f"{path} is {high} x {wide} pixels, {paths[0]} is {first[0]} x {first[1]}"
                raise SpecError(f"{fact}; give size={first} to bring all to one size")
        self.shape = first[0], first[1], 1 if all(mode in GREY_MODES for *_, mode in known) else 3

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        found = [self._load_image(self.paths[n]) for n in indices]
        return np.stack(found) if found else np.empty((0, *self.shape), np.float32)

    def _load_image(self, path: Path) -> NDArray[np.float32]:
        from PIL import Image

        high, wide, channels = self.shape
        try:
            with Image.open(path) as image:
                plain = image.convert("L" if channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise SpecError(f"{path} is no whole image: {error}; take it away or fetch it again") from None
        plain = plain if plain.size == (wide, high) else plain.resize((wide, high), Image.Resampling.BILINEAR)
        return np.asarray(plain, np.float32).reshape(self.shape) / np.float32(255)


def _read_header(path: Path) -> tuple[int, int, str]:
    """How high and wide an image is, and the kind of its pixels, without decoding it."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            (wide, high), mode = image.size, image.mode
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise SpecError(f"{path} is no image: {error}; take it away or fetch it again") from None
    if mode not in (*GREY_MODES, *COLOUR_MODES):
        raise SpecError(f"{path} has pixels of kind {mode!r}, not of 8 bits; convert it, or give an .npz")
    return high, wide, mode


class ImageInputs(ClassifierInputs):
    """Images with the mean of each channel taken off, in its deviation, both over images to train on."""

    def __init__(self, store: ImageStore, train: IndexArray) -> None:
        self.store = store
        evenly = train[np.linspace(0, len(train) - 1, min(len(train), STATISTICS_SAMPLE)).astype(np.int64)]
        sums = np.zeros((2, store.shape[2]))
        for at in range(0, len(evenly), 1000):
            some = store.take(evenly[at : at + 1000]).astype(np.float64)
            sums += some.sum((0, 1, 2)), (some**2).sum((0, 1, 2))
        mean, square = sums / (len(evenly) * store.shape[0] * store.shape[1])
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        self.mean, self.deviation = mean, np.where(deviation > 1e-6, deviation, 1.0)  # of a channel all of one value

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        found = (self.store.take(indices) - self.mean) / self.deviation
        return torch.from_numpy(found.astype(np.float32).transpose(0, 3, 1, 2).copy()), None

    @property
    def usage(self) -> ProcessorSpec:
        mean, deviation = (tuple(told.tolist()) for told in (self.mean, self.deviation))
        return ProcessorSpec(size=self.store.shape[:2], mean=mean, deviation=deviation)

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        embedding = EmbeddingSpec(
            patches=(patches := make_patches(*self.store.shape)), positions=PositionSpec("learned", patches.num_patches)
        )
        return make_classifier("vision", embedding, num_classes, pooling, kind="vision")
