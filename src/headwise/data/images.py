"""Image classification from idx files, an .npz, or a folder per class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import SpecError
from .example_order import DEFAULT_HELD_OUT, check_split_shares, split_examples
from .file_task import FileTask
from .image_arrays import IMAGE_SUFFIXES, ArrayImages, ImageFiles, ImageInputs, ImageStore, read_idx, read_npz
from .labelled_examples import LabelledDataset, number_labels
from .text_files import existing_file, existing_path, find_splits, list_files

# Names of files and arrays for each split, and for images and labels: those of MNIST, Keras and plain words.
SPLIT_PREFIXES = {"train": ("train",), "valid": ("valid", "val"), "test": ("t10k", "test")}
ARRAY_NAMES = {"images": ("x", "images", "data"), "labels": ("y", "labels", "target")}

LabelledImages = tuple[ImageStore, Sequence[Any]]  # images and their labels


@dataclass(frozen=True, repr=False)
class ImageClassification(FileTask):
    """Image classification; each channel is normalised to mean 0 and standard deviation 1 on the train split.

    `path` is an idx file of images, with its labels in a file beside it or in `labels`; a folder with the files of
    MNIST; an .npz with x_train and y_train, or with images and labels; or a folder with one folder per class,
    optionally inside folders train, valid and test. Missing splits are held out from the train split by the shares
    `valid` and `test`. `size` = (height, width) resizes the images of a folder, which otherwise must have one size.
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
                f"size={self.size!r} must be a height and a width of at least 1; use for example size=(28, 28)"
            )

    def files(self) -> Sequence[Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return [path, *([] if path.suffix == ".npz" else [self._labels_file(path)])]
        if idx_files := find_idx_files(path):
            return [file for images in idx_files.values() for file in (images, self._labels_file(images))]
        if image_files := list_files(path, IMAGE_SUFFIXES):
            return image_files
        raise SpecError(f"{path} has no images ({', '.join(IMAGE_SUFFIXES)}) and no idx files; give another folder")

    def _labels_file(self, images: Path) -> Path:
        """Path of the labels of an idx file of images."""
        if self.labels:
            return existing_file(self.labels)
        name = images.name.replace("images", "labels").replace("idx3", "idx1")
        names = dict.fromkeys((name, name.removesuffix(".gz"), f"{name}.gz"))
        candidates = [images.with_name(name) for name in names]
        paths = [path for path in candidates if path.is_file() and path != images]
        if not paths:
            raise SpecError(f"there are no labels for {images}: {name} is missing; give labels=FILE")
        return paths[0]

    def read(self) -> LabelledDataset:
        path = existing_path(self.path)
        idx_files = find_idx_files(path) if path.is_dir() else {} if path.suffix == ".npz" else {"train": path}
        if idx_files:
            splits = {split: _read_idx_pair(images, self._labels_file(images)) for split, images in idx_files.items()}
        else:
            splits = _read_class_folders(path, self.size) if path.is_dir() else _read_npz_splits(path)
        if self.labels and (path.is_dir() or path.suffix == ".npz"):
            raise SpecError(f"labels={self.labels!r} is for a single idx file, not for {path}; leave it out")
        if self.size and (idx_files or not path.is_dir()):
            raise SpecError(f"size={self.size} is for folders of image files, not for {path}; leave it out")
        if "train" not in splits:
            raise SpecError(f"{path} has no train split; name it train, or remove test from the name of a single split")
        return self._make_dataset(splits)

    def _make_dataset(self, split_data: Mapping[str, LabelledImages]) -> LabelledDataset:
        store = ImageStore.joined([images for images, _ in split_data.values()])
        labels, names = number_labels([label for _, split_labels in split_data.values() for label in split_labels])
        counts = {split: len(split_labels) for split, (_, split_labels) in split_data.items()}
        splits = split_examples(counts, list(map(str, range(len(labels)))), self.valid, self.test)
        return LabelledDataset(ImageInputs(store, splits["train"]), labels, names, splits)


def find_idx_files(folder: Path) -> dict[str, Path]:
    """The idx files of images in a folder, by split."""
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.iterdir() if "images" in path.name and "idx" in path.name)
    splits = {split: [path for path in files if path.name.startswith(words)] for split, words in SPLIT_PREFIXES.items()}
    return {split: paths[0] for split, paths in splits.items() if paths}


def _read_idx_pair(images: Path, labels: Path) -> LabelledImages:
    return _check_labelled_images(read_idx(images), read_idx(labels), str(images))


def _read_npz_splits(path: Path) -> dict[str, LabelledImages]:
    """Images and labels of each split of an .npz: x_train and y_train, train_images and train_labels, or x and y."""
    arrays = read_npz(path)
    splits = {}
    for split, words in SPLIT_PREFIXES.items():
        images, labels = (_find_array(arrays, kind, words, split) for kind in ARRAY_NAMES)
        if images and labels:
            splits[split] = _check_labelled_images(arrays[images], arrays[labels], f"{path}: {images}")
        elif images:
            raise SpecError(f"{path} has {images}, but no labels for it; add y_{split}")
    if not splits:
        names = ", ".join(arrays) or "no arrays"
        raise SpecError(f"{path} holds {names}; name arrays x_train and y_train, or images and labels")
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
            f"{where} holds {images.dtype} of shape {shape}; give images as [n, height, width] or with channels last"
        )
    flat = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or flat.dtype.kind not in "uiSU":
        raise SpecError(f"the labels of {where} are {flat.dtype} {list(flat.shape)}; give one integer per image")
    if len(flat) != len(images):
        raise SpecError(f"{where} has {len(images)} images, but {len(flat)} labels; give one label per image")
    return ArrayImages(images, where), flat.tolist()


def _read_class_folders(folder: Path, size: tuple[int, ...]) -> dict[str, LabelledImages]:
    """Images of each split, labelled with the name of the folder they are in."""
    roots = {split: path for split, path in find_splits(folder).items() if path.is_dir()} or {"train": folder}
    splits: dict[str, LabelledImages] = {}
    files = {split: list_files(root, IMAGE_SUFFIXES) for split, root in roots.items()}
    for split, root in roots.items():
        unlabelled = [path for path in files[split] if path.parent == root]
        if unlabelled:
            raise SpecError(f"{unlabelled[0]} is not in the folder of a class; move it to {root}/CLASS/")
        if files[split]:
            labels = [path.relative_to(root).parts[0] for path in files[split]]
            splits[split] = ImageFiles(files[split], size), labels
    return splits
