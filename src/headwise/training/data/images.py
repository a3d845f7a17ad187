"""Classification of images (an .npz, or a folder per class) and of feature sequences."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...models.model_spec import EmbeddingSpec, ModelSpec, PatchSpec, PositionSpec, ProcessorSpec
from ...util.errors import SpecError
from .file_task import (
    DEFAULT_HELD_OUT,
    ChannelStatistics,
    ClassificationTask,
    ClassifierInputs,
    IndexArray,
    LabelledDataset,
    check_split_shares,
    make_classifier,
    number_labels,
    split_examples,
)
from .text_files import (
    existing_file,
    existing_path,
    find_splits,
    format_shape,
    list_files,
    read_npz,
)

# --- Images ---------------------------------------------------------------------------------------

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_PIXELS = 1 << 26  # of one image
TARGET_NUM_PATCHES = 64  # approximate number of patches per image
STATISTICS_SAMPLE = 10_000  # images from which mean and standard deviation are estimated
GREY_MODES = ("1", "L", "LA")
COLOUR_MODES = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")


class ArrayImages:
    """Images of an array [n, height, width], [n, height, width, channels] or [n, channels, height,
    width]; integer pixels are scaled to 0..1. `description` names them in error messages.
    """

    def __init__(self, images: Any, description: str) -> None:
        if images.ndim == 3:
            images = images[..., None]
        elif images.shape[3] > 4 and images.shape[1] <= 4:
            images = images.transpose(0, 2, 3, 1)
        if images.shape[3] > 4:
            raise SpecError(
                f"{description} is {format_shape(images.shape)}, with more than 4 channels; give "
                "[n, height, width, channels]"
            )
        self.images = images
        self.count = len(images)
        self.where = description
        self.shape: tuple[int, int, int] = images.shape[1:]
        self._scale = np.float32(1 / np.iinfo(images.dtype).max if images.dtype.kind in "ui" else 1)

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        """Load images as [n, height, width, channels]."""
        pixels = self.images[indices].astype(np.float32) * self._scale
        if not np.isfinite(pixels).all():
            index = int(indices[~np.isfinite(pixels).all((1, 2, 3))][0])
            raise SpecError(
                f"image {index} of {self.where} holds NaN or inf; remove it from the data"
            )
        return pixels


class ImageFiles:
    """Images with one file each, loaded when a batch needs them; resized to `size` if that is not
    empty.
    """

    def __init__(self, paths: Sequence[Path], size: tuple[int, ...]) -> None:
        self.paths = paths
        self.count = len(paths)
        self.where = str(paths[0].parent.parent)
        headers = [_read_header(path) for path in paths]
        high, wide = size or headers[0][:2]
        for path, header in zip(paths, headers, strict=True):
            if not size and header[:2] != (high, wide):
                raise SpecError(
                    f"{path} is {header[0]} x {header[1]} pixels, {paths[0]} is {high} x {wide}; "
                    f"use size={(high, wide)} to resize all images"
                )
        is_grey = all(mode in GREY_MODES for *_, mode in headers)
        self.shape: tuple[int, int, int] = (high, wide, 1 if is_grey else 3)

    def take(self, indices: IndexArray) -> NDArray[np.float32]:
        """Load images as [n, height, width, channels], with pixels from 0 to 1."""
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


ImageStore = ArrayImages | ImageFiles


def _read_header(path: Path) -> tuple[int, int, str]:
    """Height, width and pixel mode of an image, without decoding it."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                wide, high = image.size
                mode = image.mode
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
        size = min(len(train), STATISTICS_SAMPLE)
        sample = train[np.linspace(0, len(train) - 1, size).astype(np.int64)]
        statistics = ChannelStatistics(store.shape[2])
        for start in range(0, size, 1000):
            statistics.add(store.take(sample[start : start + 1000]))
        self.mean = statistics.mean
        self.deviation = statistics.deviation
        self.usage = ProcessorSpec(
            size=tuple(store.shape[:2]),
            mean=tuple(self.mean.tolist()),
            std=tuple(self.deviation.tolist()),
        )

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        images = (self.store.take(indices) - self.mean) / self.deviation
        return torch.from_numpy(images.astype(np.float32).transpose(0, 3, 1, 2).copy()), None

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        patches = make_patches(*self.store.shape)
        positions = PositionSpec("learned", patches.num_patches)
        embedding = EmbeddingSpec(patches=patches, positions=positions)
        return make_classifier("vision", embedding, num_classes, pooling, kind="vision")


def make_patches(high: int, wide: int, channels: int) -> PatchSpec:
    """Square patches for images of this size, about 64 of them; a size that divides the image
    evenly is preferred.

    >>> make_patches(28, 28, 1)
    PatchSpec(rows=7, columns=7, patch_height=4, patch_width=4, channels=1)
    """
    target = max(1, round((high * wide / TARGET_NUM_PATCHES) ** 0.5))
    candidates = range(target, 2 * target + 1)
    divisors = [size for size in candidates if high % size == 0 == wide % size]
    size = min([*divisors, target][0], high, wide)
    return PatchSpec(high // size, wide // size, size, size, channels)


# --- Image tasks ----------------------------------------------------------------------------------

# Names of arrays for each split, and for images and labels: Keras's names and plain words.
SPLIT_PREFIXES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}
ARRAY_NAMES = {"images": ("x", "images", "data"), "labels": ("y", "labels", "target")}

LabelledImages = tuple[Any, list[Any]]  # the images of a split, an array or paths, and their labels


@dataclass(frozen=True, repr=False)
class ImageClassification(ClassificationTask):
    """Image classification; each channel is normalised to mean 0 and standard deviation 1 on the
    train split.

    `path` is an .npz with x_train and y_train, or with images and labels; or a folder with one
    folder per class, optionally inside folders train, valid and test. Missing
    splits are held out from the train split by the shares `valid` and `test`. `size` = (height,
    width) resizes the images of a folder, which otherwise must have one size.
    """

    name: ClassVar[str] = "images"
    path: str
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
            return [path]
        files = list_files(path, IMAGE_SUFFIXES)
        if not files:
            raise SpecError(
                f"{path} has no images ({', '.join(IMAGE_SUFFIXES)}); give another folder"
            )
        return files

    def read(self) -> LabelledDataset:
        path = existing_path(self.path)
        if self.size and not path.is_dir():
            raise SpecError(
                f"size={self.size} is for folders of image files, not for {path}; leave it out"
            )
        splits = _read_class_folders(path) if path.is_dir() else _read_npz_splits(path)
        if "train" not in splits:
            raise SpecError(
                f"{path} has no train split; name it train, or remove test from the name of a "
                "single split"
            )
        parts = [images for images, _ in splits.values()]
        if path.is_dir():
            store = ImageFiles(list(chain(*parts)), self.size)
        else:
            store = ArrayImages(np.concatenate(parts), str(path))
        all_labels = list(chain(*(split_labels for _, split_labels in splits.values())))
        labels, names = number_labels(all_labels)
        counts = {split: len(split_labels) for split, (_, split_labels) in splits.items()}
        indices = split_examples(counts, list(map(str, range(len(labels)))), self.valid, self.test)
        return LabelledDataset(ImageInputs(store, indices["train"]), labels, names, indices)


def _read_npz_splits(path: Path) -> dict[str, LabelledImages]:
    """Images and labels of each split of an .npz: x_train and y_train, train_images and
    train_labels, or x and y.
    """
    arrays = read_npz(path)
    splits: dict[str, LabelledImages] = {}
    first = ""  # the array of the first split
    for split in SPLIT_PREFIXES:
        images = _find_array(arrays, "images", split)
        labels = _find_array(arrays, "labels", split)
        if images and not labels:
            raise SpecError(f"{path} has {images}, but no labels for it; add y_{split}")
        if images:
            first = first or images
            one = arrays[images]
            other = arrays[first]
            if (one.shape[1:], one.dtype) != (other.shape[1:], other.dtype):
                raise SpecError(
                    f"{path}: {images} has images of {format_shape(one.shape[1:])} as {one.dtype}, "
                    f"{first} of {format_shape(other.shape[1:])} as {other.dtype}; use one size "
                    "and one type"
                )
            splits[split] = _check_labelled_images(one, arrays[labels], f"{path}: {images}")
    if not splits:
        names = ", ".join(arrays) or "no arrays"
        raise SpecError(
            f"{path} holds {names}; name arrays x_train and y_train, or images and labels"
        )
    return splits


def _find_array(arrays: Mapping[str, Any], kind: str, split: str) -> str:
    """Return the name of the array with the images or labels of a split; "" if there is none."""
    names: list[str] = []
    for name in ARRAY_NAMES[kind]:
        for word in SPLIT_PREFIXES[split]:
            names += [f"{name}_{word}", f"{word}_{name}"]
    if split == "train":
        names += ARRAY_NAMES[kind]
    return next((name for name in names if name in arrays), "")


def _check_labelled_images(images: Any, labels: Any, where: str) -> LabelledImages:
    """Images and labels of two arrays; raises SpecError if they do not fit together."""
    if images.ndim not in (3, 4) or images.dtype.kind not in "uif" or not images.size:
        raise SpecError(
            f"{where} holds {images.dtype} of shape {format_shape(images.shape)}; give images as "
            "[n, height, width] or with channels last"
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
    return images, flat.tolist()


def _read_class_folders(folder: Path) -> dict[str, LabelledImages]:
    """Images of each split, labelled with the name of the folder they are in."""
    roots = {split: path for split, path in find_splits(folder).items() if path.is_dir()}
    splits: dict[str, LabelledImages] = {}
    for split, root in (roots or {"train": folder}).items():
        files = list_files(root, IMAGE_SUFFIXES)
        for path in files:
            if path.parent == root:
                raise SpecError(f"{path} is not in the folder of a class; move it to {root}/CLASS/")
        if files:
            labels = [path.relative_to(root).parts[0] for path in files]
            splits[split] = (files, labels)
    return splits


# --- Classification of feature sequences, such as speech features ---------------------------------


@dataclass(frozen=True, repr=False)
class FrameClassification(ClassificationTask):
    """Classification of utterances or of their frames, with each feature normalised to mean 0 and
    standard deviation 1.

    `path` is an .npz with `frames`, [n, time, features], or [total, features] together with
    `lengths`; and `labels`, one per utterance or one per frame.
    """

    name: ClassVar[str] = "frames"
    path: str
    valid: float = DEFAULT_HELD_OUT
    test: float = DEFAULT_HELD_OUT

    def check(self) -> None:
        check_split_shares(self.valid, self.test)

    def files(self) -> Sequence[Path]:
        return [existing_file(self.path)]

    def read(self) -> LabelledDataset:
        arrays = read_npz(Path(self.path))
        for name in ("frames", "labels"):
            if name not in arrays:
                raise SpecError(
                    f"{self.path} has {', '.join(arrays) or 'no arrays'}, but no {name!r}; name "
                    "the arrays frames, labels and lengths"
                )
        frames = arrays["frames"]
        lengths = arrays.get("lengths", np.full(*frames.shape[:2]) if frames.ndim == 3 else [])
        utterances = self._split_utterances(frames, np.asarray(lengths))
        labels = arrays["labels"]
        if labels.dtype.kind not in "uiSU":
            raise SpecError(f"the labels of {self.path} are {labels.dtype}; give integers or text")
        classes, names = number_labels(labels.ravel())
        if labels.shape != (len(utterances),):
            if labels.size != sum(map(len, utterances)):
                raise SpecError(
                    f"{self.path} has labels {list(labels.shape)} for {len(utterances)} utterances "
                    f"of {sum(map(len, utterances))} frames; give one label per utterance or one "
                    "per frame"
                )
            ends = np.cumsum([len(utterance) for utterance in utterances])[:-1]
            classes = np.split(classes, ends)
        keys = [str(n) for n in range(len(utterances))]
        splits = split_examples({"train": len(utterances)}, keys, self.valid, self.test)
        return LabelledDataset(UtteranceInputs(utterances, splits["train"]), classes, names, splits)

    def _split_utterances(self, frames: Any, lengths: Any) -> list[Any]:
        """Return the frames of each utterance; raises SpecError unless all are finite numbers."""
        flat = frames.reshape(-1, frames.shape[-1]) if frames.ndim == 3 else frames
        is_whole = lengths.ndim == 1 and lengths.dtype.kind in "ui"
        if flat.ndim != 2 or not is_whole or lengths.sum() != len(flat) or (lengths < 1).any():
            raise SpecError(
                f"{self.path} has frames {list(frames.shape)} and lengths that sum to "
                f"{lengths.sum():g}; give frames [n, time, features], or frames [total, features] "
                "with lengths of at least 1 for all of them"
            )
        if flat.dtype.kind not in "fui" or not flat.size:
            raise SpecError(f"{self.path} holds frames of {flat.dtype}; give numbers")
        is_finite = np.isfinite(flat).all(1)
        if not is_finite.all():
            raise SpecError(
                f"frame {int(np.argmin(is_finite))} of {self.path} holds NaN or inf; remove it and "
                "its label"
            )
        return np.split(flat, np.cumsum(lengths)[:-1])


class UtteranceInputs(ClassifierInputs):
    """Utterances of different lengths, normalised per feature with mean and deviation of the train
    split.
    """

    def __init__(self, utterances: Sequence[Any], train: IndexArray) -> None:
        self.utterances = utterances
        statistics = ChannelStatistics(utterances[0].shape[1])
        for n in train:
            statistics.add(utterances[n])
        self.mean = statistics.mean
        self.deviation = statistics.deviation
        self.usage = ProcessorSpec(
            mean=tuple(self.mean.tolist()), std=tuple(self.deviation.tolist())
        )

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        rows: list[Tensor] = []
        for n in indices:
            frames = (self.utterances[n] - self.mean) / self.deviation
            rows.append(torch.from_numpy(frames.astype(np.float32)))
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return x, SequenceInfo.from_batch(x, lengths=[len(row) for row in rows])

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """Return an encoder that embeds each frame linearly: an utterance is an image of one
        column, a frame one patch.
        """
        longest = max(map(len, self.utterances))
        width = self.utterances[0].shape[1]
        column = PatchSpec(rows=longest, columns=1, patch_height=1, patch_width=width, channels=1)
        return make_classifier("frames", EmbeddingSpec(patches=column), num_classes, pooling)
