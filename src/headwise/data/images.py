"""Images and their classes: idx files, an .npz, or a folder for each class."""

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

# What files and arrays are called: MNIST's names, those of Keras, and plain words.
SPLIT_PREFIXES = {"train": ("train",), "valid": ("valid", "val"), "test": ("t10k", "test")}
ARRAY_NAMES = {"images": ("x", "images", "data"), "labels": ("y", "labels", "target")}

LabelledImages = tuple[ImageStore, Sequence[Any]]  # images, and what they show


@dataclass(frozen=True, repr=False)
class ImageClassification(FileTask):
    """The class of an image, its channels brought to mean 0 and deviation 1 over the train split.

    `path` is an idx file of images, beside that of their `labels`; a folder with MNIST's files; an .npz with x_train
    and y_train, or with images and labels; or a folder with one folder for each class, perhaps inside folders train,
    valid and test. Where a split is not there, `valid` or `test` of the images to train on are held out. `size`, high
    and wide, is what images of a folder are brought to, if they are not all alike.
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
            raise SpecError(f"size={self.size!r} is none of an image; give size=(28, 28), high and wide")

    def files(self) -> Sequence[Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return [path, *([] if path.suffix == ".npz" else [self._labels_file(path)])]
        if found := find_idx_files(path):
            return [file for images in found.values() for file in (images, self._labels_file(images))]
        if found := list_files(path, IMAGE_SUFFIXES):
            return found
        raise SpecError(f"{path} has no images ({', '.join(IMAGE_SUFFIXES)}) and no idx files; give another folder")

    def _labels_file(self, images: Path) -> Path:
        """The file of the labels that belong to an idx file of images."""
        if self.labels:
            return existing_file(self.labels)
        name = images.name.replace("images", "labels").replace("idx3", "idx1")
        names = dict.fromkeys((name, name.removesuffix(".gz"), f"{name}.gz"))
        found = [path for path in (images.with_name(one) for one in names) if path.is_file() and path != images]
        if not found:
            raise SpecError(f"the labels of {images} are missing: there is no {name} beside it; give labels=FILE")
        return found[0]

    def read(self) -> LabelledDataset:
        path = existing_path(self.path)
        found = find_idx_files(path) if path.is_dir() else {} if path.suffix == ".npz" else {"train": path}
        if found:
            own = {split: _read_idx_pair(images, self._labels_file(images)) for split, images in found.items()}
        else:
            own = _read_class_folders(path, self.size) if path.is_dir() else _read_npz_splits(path)
        if self.labels and (path.is_dir() or path.suffix == ".npz"):
            raise SpecError(f"labels={self.labels!r} is for one idx file of images; {path} has its own; leave it out")
        if self.size and (found or not path.is_dir()):
            raise SpecError(f"size={self.size} is for folders of images; {path} holds images of one size; leave it out")
        if "train" not in own:
            raise SpecError(f"{path} has no images to train on; name them train, or leave out the word test")
        return self._make_dataset(own)

    def _make_dataset(self, own: Mapping[str, LabelledImages]) -> LabelledDataset:
        store = ImageStore.joined([images for images, _ in own.values()])
        labels, names = number_labels([label for _, shown in own.values() for label in shown])
        counts = {split: len(shown) for split, (_, shown) in own.items()}
        splits = split_examples(counts, list(map(str, range(len(labels)))), self.valid, self.test)
        return LabelledDataset(ImageInputs(store, splits["train"]), labels, names, splits)


def find_idx_files(folder: Path) -> dict[str, Path]:
    """The idx files of images in a folder, by split."""
    if not folder.is_dir():
        return {}
    found = sorted(path for path in folder.iterdir() if "images" in path.name and "idx" in path.name)
    named = {split: [path for path in found if path.name.startswith(words)] for split, words in SPLIT_PREFIXES.items()}
    return {split: paths[0] for split, paths in named.items() if paths}


def _read_idx_pair(images: Path, labels: Path) -> LabelledImages:
    return _check_labelled_images(read_idx(images), read_idx(labels), str(images))


def _read_npz_splits(path: Path) -> dict[str, LabelledImages]:
    """The arrays of an .npz for each split: x_train and y_train, train_images and train_labels, or x and y."""
    arrays = read_npz(path)
    found = {}
    for split, words in SPLIT_PREFIXES.items():
        images, labels = (_find_array(arrays, kind, words, split) for kind in ARRAY_NAMES)
        if images and labels:
            found[split] = _check_labelled_images(arrays[images], arrays[labels], f"{path}: {images}")
        elif images:
            raise SpecError(f"{path} has {images}, but no labels for it; add y_{split}")
    if not found:
        held_ = ", ".join(arrays) or "nothing"
        raise SpecError(f"{path} holds {held_}; name arrays x_train and y_train, or images and labels")
    return found


def _find_array(arrays: Mapping[str, Any], kind: str, words: Sequence[str], split: str) -> str:
    """Which array holds this, if any."""
    plain = ARRAY_NAMES[kind] if split == "train" else ()
    ways = [
        f"{first}_{last}" for one in ARRAY_NAMES[kind] for word in words for first, last in ((one, word), (word, one))
    ]
    return next((name for name in (*ways, *plain) if name in arrays), "")


def _check_labelled_images(images: Any, labels: Any, where: str) -> LabelledImages:
    """Images of an array and their labels, which fit."""
    if images.ndim not in (3, 4) or images.dtype.kind not in "uif" or not images.size:
        shape = " x ".join(map(str, images.shape))
        raise SpecError(f"{where} holds {images.dtype}, {shape}; give images as [n, high, wide] or with channels last")
    flat = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or flat.dtype.kind not in "uiSU":
        raise SpecError(f"the labels of {where} are {flat.dtype} {list(flat.shape)}; give a whole number for each")
    if len(flat) != len(images):
        raise SpecError(f"{where} has {len(images)} images, but {len(flat)} labels; give one for each")
    return ArrayImages(images, where), flat.tolist()


def _read_class_folders(folder: Path, size: tuple[int, ...]) -> dict[str, LabelledImages]:
    """Images whose class is the name of the folder they are in, for each split."""
    roots = {split: path for split, path in find_splits(folder).items() if path.is_dir()} or {"train": folder}
    found: dict[str, LabelledImages] = {}
    files = {split: list_files(root, IMAGE_SUFFIXES) for split, root in roots.items()}
    for split, root in roots.items():
        loose = [path for path in files[split] if path.parent == root]
        if loose:
            raise SpecError(f"{loose[0]} is in no folder of a class; put it into {root}/NAME-OF-CLASS/")
        if files[split]:
            shown = [path.relative_to(root).parts[0] for path in files[split]]
            found[split] = ImageFiles(files[split], size), shown
    return found
