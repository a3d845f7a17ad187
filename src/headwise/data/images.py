"""Image classification from idx files, an .npz, or a folder per class."""

from __future__ import annotations

import struct
import tokenize
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import EmbeddingSpec, ModelSpec, PositionSpec, ProcessorSpec
from .example_order import DEFAULT_HELD_OUT, IndexArray, check_split_shares, split_examples
from .file_task import (
    ClassifierInputs,
    FileTask,
    LabelledDataset,
    make_classifier,
    make_patches,
    number_labels,
)
from .text_files import (
    check_unpacked_size,
    existing_file,
    existing_path,
    find_splits,
    is_gzipped,
    list_files,
    read_chunks,
)

# --- Arrays and pixels ----------------------------------------------------------------------------


# What zipfile and numpy raise for damaged arrays: encrypted members, unknown methods, headers that
# are no Python, impossible shapes.
ARRAY_ERRORS = (
    *(
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
        MemoryError,
    ),
    *(KeyError, TypeError, OverflowError, SyntaxError, tokenize.TokenError),
)
MAX_PIXELS = 1 << 26  # of one image
IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Any:
    """Read an idx file: two zero bytes, a type byte, the number of axes, their lengths, and
    big-endian data.

    An uncompressed file is memory-mapped.
    """
    head = next(read_chunks(path), b"")[:4]
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES or not head[3]:
        raise SpecError(
            f"{path} is not an idx file: it starts with the bytes {head.hex(' ') or '(none)'}; "
            "give an idx file or .npz"
        )
    dtype, axes = np.dtype(IDX_DTYPES[head[2]]), head[3]
    content = b"".join(read_chunks(path)) if is_gzipped(path) else None  # None: memory-mapped
    start = 4 + 4 * axes
    size = path.stat().st_size if content is None else len(content)
    if size < start:
        raise SpecError(
            f"{path} has {size} bytes, fewer than its header of {start}; download it again"
        )
    lengths = next(read_chunks(path))[4:start] if content is None else content[4:start]
    shape = struct.unpack(f">{axes}I", lengths)
    expected_size = start + dtype.itemsize * int(np.prod(shape, dtype=object))
    if size != expected_size:
        dimensions = " x ".join(map(str, shape))
        raise SpecError(
            f"{path} has {size} bytes, but {dimensions} numbers of {dtype.itemsize} bytes need "
            f"{expected_size}; "
            "download it again"
        )
    if size == start:
        return np.empty(shape, dtype)
    if content is None:
        return np.memmap(path, dtype, "r", offset=start, shape=shape)
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def read_npz(path: Path) -> dict[str, Any]:
    """Read the arrays of an .npz file, by name."""
    try:
        with path.open("rb") as file:  # np.load(path) does not close a damaged file
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            members = archive.zip.infolist() if archive.zip else []
            check_unpacked_size(path, sum(member.file_size for member in members))
            return {name: archive[name] for name in archive.files}
    except SpecError:
        raise
    except ARRAY_ERRORS as error:
        reason = " ".join(str(error).split())
        raise SpecError(
            f"cannot read {path} as .npz: {reason}; write it again with numpy.savez"
        ) from None


def open_npy(path: Path) -> Any:
    """Memory-map the array of an .npy file."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ARRAY_ERRORS as error:
        reason = " ".join(str(error).split())
        raise SpecError(
            f"cannot read {path} as .npy: {reason}; write it again with numpy.save"
        ) from None


# --- Images ---------------------------------------------------------------------------------------

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
STATISTICS_SAMPLE = 10_000  # images from which mean and standard deviation are estimated
GREY_MODES = ("1", "L", "LA")
COLOUR_MODES = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")


class ImageStore(ABC):
    """Base class of `count` images of one `shape` (height, width, channels); `where` names them in
    error messages.
    """

    count: int
    shape: tuple[int, int, int]
    where: str

    @abstractmethod
    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        """Load images as [n, height, width, channels]; integer pixels are scaled to 0..1."""

    @staticmethod
    def joined(stores: Sequence[ImageStore]) -> ImageStore:
        """Concatenation of several stores, whose images must have the same shape."""
        for other in stores[1:]:
            if other.shape != stores[0].shape:
                shapes = [" x ".join(map(str, store.shape)) for store in (other, stores[0])]
                raise SpecError(
                    f"{other.where} has images of {shapes[0]}, {stores[0].where} of {shapes[1]}; "
                    "use one size"
                )
        return stores[0] if len(stores) == 1 else ConcatenatedImages(stores)


class ConcatenatedImages(ImageStore):
    """Concatenation of several image stores."""

    def __init__(self, stores: Sequence[ImageStore]) -> None:
        self.stores = stores
        self.count, self.shape, self.where = (
            sum(store.count for store in stores),
            stores[0].shape,
            stores[0].where,
        )

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        out = np.empty((len(indices), *self.shape), np.float32)
        first = 0
        for store in self.stores:
            in_store = (indices >= first) & (indices < first + store.count)
            out[in_store] = store.take(indices[in_store] - first)
            first += store.count
        return out


class ArrayImages(ImageStore):
    """Images of an array [n, height, width], [n, height, width, channels] or [n, channels, height,
    width].
    """

    def __init__(self, images: Any, description: str) -> None:
        if images.ndim == 3:
            images = images[..., None]
        elif images.shape[3] > 4 and images.shape[1] <= 4:
            images = images.transpose(0, 2, 3, 1)
        if images.shape[3] > 4:
            shape = " x ".join(map(str, images.shape))
            raise SpecError(
                f"{description} is {shape}, with more than 4 channels; give [n, height, width, "
                "channels]"
            )
        self.images, self.count, self.where = images, len(images), description
        _, high, wide, channels = images.shape
        self.shape = high, wide, channels
        self._scale = np.float32(1 / np.iinfo(images.dtype).max if images.dtype.kind in "ui" else 1)

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        pixels = self.images[indices].astype(np.float32) * self._scale
        if not np.isfinite(pixels).all():
            index = int(indices[~np.isfinite(pixels).all((1, 2, 3))][0])
            raise SpecError(
                f"image {index} of {self.where} holds NaN or inf; remove it from the data"
            )
        return pixels


class ImageFiles(ImageStore):
    """Images with one file each, loaded when a batch needs them; resized to `size` if that is not
    empty.
    """

    def __init__(self, paths: Sequence[Path], size: tuple[int, ...]) -> None:
        self.paths, self.count, self.where = paths, len(paths), str(paths[0].parent.parent)
        headers = [_read_header(path) for path in paths]
        first = size or headers[0][:2]
        for path, (high, wide, _) in zip(paths, headers, strict=True):
            if not size and (high, wide) != first:
                fact = f"{path} is {high} x {wide} pixels, {paths[0]} is {first[0]} x {first[1]}"
                raise SpecError(f"{fact}; use size={first} to resize all images")
        self.shape = first[0], first[1], 1 if all(mode in GREY_MODES for *_, mode in headers) else 3

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        images = [self._load_image(self.paths[n]) for n in indices]
        return np.stack(images) if images else np.empty((0, *self.shape), np.float32)

    def _load_image(self, path: Path) -> NDArray[np.float32]:
        from PIL import Image

        high, wide, channels = self.shape
        try:
            with Image.open(path) as image:
                converted = image.convert("L" if channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise SpecError(
                f"{path} is a damaged image: {error}; remove it or download it again"
            ) from None
        if converted.size != (wide, high):
            converted = converted.resize((wide, high), Image.Resampling.BILINEAR)
        return np.asarray(converted, np.float32).reshape(self.shape) / np.float32(255)


def _read_header(path: Path) -> tuple[int, int, str]:
    """Height, width and pixel mode of an image, without decoding it."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                (wide, high), mode = image.size, image.mode
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise SpecError(
            f"cannot read {path} as an image: {error}; remove it or download it again"
        ) from None
    if wide * high > MAX_PIXELS:
        raise SpecError(
            f"{path} has {wide} x {high} pixels; give images of {MAX_PIXELS:,} pixels or less"
        )
    if mode not in (*GREY_MODES, *COLOUR_MODES):
        raise SpecError(
            f"{path} has pixels of mode {mode!r}, not 8 bits per channel; convert it, or use an "
            ".npz"
        )
    return high, wide, mode


class ImageInputs(ClassifierInputs):
    """Images normalised per channel with mean and standard deviation of (a sample of) the train
    split.
    """

    def __init__(self, store: ImageStore, train: IndexArray) -> None:
        self.store = store
        sample = train[
            np.linspace(0, len(train) - 1, min(len(train), STATISTICS_SAMPLE)).astype(np.int64)
        ]
        sums = np.zeros((2, store.shape[2]))
        for start in range(0, len(sample), 1000):
            images = store.take(sample[start : start + 1000]).astype(np.float64)
            sums += images.sum((0, 1, 2)), (images**2).sum((0, 1, 2))
        mean, mean_square = sums / (len(sample) * store.shape[0] * store.shape[1])
        deviation = np.sqrt(np.maximum(mean_square - mean**2, 0))
        self.mean, self.deviation = (
            mean,
            np.where(deviation > 1e-6, deviation, 1.0),
        )  # 1 for a constant channel

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        images = (self.store.take(indices) - self.mean) / self.deviation
        return torch.from_numpy(images.astype(np.float32).transpose(0, 3, 1, 2).copy()), None

    @property
    def usage(self) -> ProcessorSpec:
        mean, deviation = (tuple(array.tolist()) for array in (self.mean, self.deviation))
        return ProcessorSpec(size=self.store.shape[:2], mean=mean, deviation=deviation)

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        patches = make_patches(*self.store.shape)
        embedding = EmbeddingSpec(
            patches=patches, positions=PositionSpec("learned", patches.num_patches)
        )
        return make_classifier("vision", embedding, num_classes, pooling, kind="vision")


# --- Image tasks ----------------------------------------------------------------------------------

# Names of files and arrays for each split, and for images and labels: those of MNIST, Keras and
# plain words.
SPLIT_PREFIXES = {"train": ("train",), "valid": ("valid", "val"), "test": ("t10k", "test")}
ARRAY_NAMES = {"images": ("x", "images", "data"), "labels": ("y", "labels", "target")}

LabelledImages = tuple[ImageStore, Sequence[Any]]  # images and their labels


@dataclass(frozen=True, repr=False)
class ImageClassification(FileTask):
    """Image classification; each channel is normalised to mean 0 and standard deviation 1 on the
    train split.

    `path` is an idx file of images, with its labels in a file beside it or in `labels`; a folder
    with the files of MNIST; an .npz with x_train and y_train, or with images and labels; or a
    folder with one folder per class, optionally inside folders train, valid and test. Missing
    splits are held out from the train split by the shares `valid` and `test`. `size` = (height,
    width) resizes the images of a folder, which otherwise must have one size.
    """

    name: ClassVar[str] = "images"
    path: str
    labels: str = ""
    size: tuple[int, ...] = ()
    valid: float = DEFAULT_HELD_OUT
    test: float = DEFAULT_HELD_OUT

    def check(self) -> None:
        check_split_shares(self.valid, self.test)
        if self.size and (len(self.size) != 2 or min(self.size) < 1):
            raise SpecError(
                f"size={self.size!r} must be a height and a width of at least 1; use for example "
                "size=(28, 28)"
            )

    def files(self) -> Sequence[Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return [path, *([] if path.suffix == ".npz" else [self._labels_file(path)])]
        if idx_files := find_idx_files(path):
            return [
                file
                for images in idx_files.values()
                for file in (images, self._labels_file(images))
            ]
        if image_files := list_files(path, IMAGE_SUFFIXES):
            return image_files
        raise SpecError(
            f"{path} has no images ({', '.join(IMAGE_SUFFIXES)}) and no idx files; give another "
            "folder"
        )

    def _labels_file(self, images: Path) -> Path:
        """Path of the labels of an idx file of images."""
        if self.labels:
            return existing_file(self.labels)
        name = images.name.replace("images", "labels").replace("idx3", "idx1")
        names = dict.fromkeys((name, name.removesuffix(".gz"), f"{name}.gz"))
        candidates = [images.with_name(name) for name in names]
        paths = [path for path in candidates if path.is_file() and path != images]
        if not paths:
            raise SpecError(
                f"there are no labels for {images}: {name} is missing; give labels=FILE"
            )
        return paths[0]

    def read(self) -> LabelledDataset:
        path = existing_path(self.path)
        idx_files = (
            find_idx_files(path)
            if path.is_dir()
            else {}
            if path.suffix == ".npz"
            else {"train": path}
        )
        if idx_files:
            splits = {
                split: _read_idx_pair(images, self._labels_file(images))
                for split, images in idx_files.items()
            }
        else:
            splits = (
                _read_class_folders(path, self.size) if path.is_dir() else _read_npz_splits(path)
            )
        if self.labels and (path.is_dir() or path.suffix == ".npz"):
            raise SpecError(
                f"labels={self.labels!r} is for a single idx file, not for {path}; leave it out"
            )
        if self.size and (idx_files or not path.is_dir()):
            raise SpecError(
                f"size={self.size} is for folders of image files, not for {path}; leave it out"
            )
        if "train" not in splits:
            raise SpecError(
                f"{path} has no train split; name it train, or remove test from the name of a "
                "single split"
            )
        return self._make_dataset(splits)

    def _make_dataset(self, split_data: Mapping[str, LabelledImages]) -> LabelledDataset:
        store = ImageStore.joined([images for images, _ in split_data.values()])
        labels, names = number_labels(
            [label for _, split_labels in split_data.values() for label in split_labels]
        )
        counts = {split: len(split_labels) for split, (_, split_labels) in split_data.items()}
        splits = split_examples(counts, list(map(str, range(len(labels)))), self.valid, self.test)
        return LabelledDataset(ImageInputs(store, splits["train"]), labels, names, splits)


def find_idx_files(folder: Path) -> dict[str, Path]:
    """The idx files of images in a folder, by split."""
    if not folder.is_dir():
        return {}
    files = sorted(
        path for path in folder.iterdir() if "images" in path.name and "idx" in path.name
    )
    splits = {
        split: [path for path in files if path.name.startswith(words)]
        for split, words in SPLIT_PREFIXES.items()
    }
    return {split: paths[0] for split, paths in splits.items() if paths}


def _read_idx_pair(images: Path, labels: Path) -> LabelledImages:
    return _check_labelled_images(read_idx(images), read_idx(labels), str(images))


def _read_npz_splits(path: Path) -> dict[str, LabelledImages]:
    """Images and labels of each split of an .npz: x_train and y_train, train_images and
    train_labels, or x and y.
    """
    arrays = read_npz(path)
    splits = {}
    for split, words in SPLIT_PREFIXES.items():
        images, labels = (_find_array(arrays, kind, words, split) for kind in ARRAY_NAMES)
        if images and labels:
            splits[split] = _check_labelled_images(
                arrays[images], arrays[labels], f"{path}: {images}"
            )
        elif images:
            raise SpecError(f"{path} has {images}, but no labels for it; add y_{split}")
    if not splits:
        names = ", ".join(arrays) or "no arrays"
        raise SpecError(
            f"{path} holds {names}; name arrays x_train and y_train, or images and labels"
        )
    return splits


def _find_array(arrays: Mapping[str, Any], kind: str, words: Sequence[str], split: str) -> str:
    """Name of the array with the images or labels of a split; "" if there is none."""
    plain_names = ARRAY_NAMES[kind] if split == "train" else ()
    split_names: list[str] = []
    for name in ARRAY_NAMES[kind]:
        for word in words:
            split_names += [f"{name}_{word}", f"{word}_{name}"]
    return next((name for name in (*split_names, *plain_names) if name in arrays), "")


def _check_labelled_images(images: Any, labels: Any, where: str) -> LabelledImages:
    """Images and labels of two arrays; raises SpecError if they do not fit together."""
    if images.ndim not in (3, 4) or images.dtype.kind not in "uif" or not images.size:
        shape = " x ".join(map(str, images.shape))
        raise SpecError(
            f"{where} holds {images.dtype} of shape {shape}; give images as [n, height, width] or "
            "with channels last"
        )
    flat = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or flat.dtype.kind not in "uiSU":
        raise SpecError(
            f"the labels of {where} are {flat.dtype} {list(flat.shape)}; give one integer per image"
        )
    if len(flat) != len(images):
        raise SpecError(
            f"{where} has {len(images)} images, but {len(flat)} labels; give one label per image"
        )
    return ArrayImages(images, where), flat.tolist()


def _read_class_folders(folder: Path, size: tuple[int, ...]) -> dict[str, LabelledImages]:
    """Images of each split, labelled with the name of the folder they are in."""
    roots = {split: path for split, path in find_splits(folder).items() if path.is_dir()} or {
        "train": folder
    }
    splits: dict[str, LabelledImages] = {}
    files = {split: list_files(root, IMAGE_SUFFIXES) for split, root in roots.items()}
    for split, root in roots.items():
        unlabelled = [path for path in files[split] if path.parent == root]
        if unlabelled:
            raise SpecError(
                f"{unlabelled[0]} is not in the folder of a class; move it to {root}/CLASS/"
            )
        if files[split]:
            labels = [path.relative_to(root).parts[0] for path in files[split]]
            splits[split] = ImageFiles(files[split], size), labels
    return splits
