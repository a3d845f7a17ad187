"""Numbers measured over time, such as the features of speech, and a class for each frame or each utterance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import EmbeddingSpec, ModelSpec, PatchSpec, ProcessorSpec
from .example_order import DEFAULT_HELD_OUT, IndexArray, check_split_shares, split_examples
from .file_task import FileTask, make_classifier
from .image_arrays import open_npy, read_npz
from .labelled_examples import ClassifierInputs, LabelledDataset, number_labels
from .text_files import existing_file, existing_path, list_files, read_lines

LABEL_TABLE = "labels.tsv"


@dataclass(frozen=True, repr=False)
class FrameClassification(FileTask):
    """The class of each frame, or of an utterance as a whole, its features brought to mean 0 and deviation 1.

    `path` is an .npz with `frames`, [n, time, features] or all of them in one row beside `lengths`, and `labels`, one
    for each utterance or for each frame; or a folder of .npy files [time, features] and a labels.tsv, whose lines are
    a file's name, a tab, and a label or, parted by spaces, as many as it has frames.
    """

    name: ClassVar[str] = "frames"
    path: str
    valid: float = DEFAULT_HELD_OUT
    test: float = DEFAULT_HELD_OUT

    def check(self) -> None:
        check_split_shares(self.valid, self.test)

    def files(self) -> Sequence[Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return [path]
        if not (found := list_files(path, (".npy",))):
            raise SpecError(f"{path} has no .npy files; give one [time, features] for each utterance, or an .npz")
        if not (path / LABEL_TABLE).is_file():
            raise SpecError(f"{path} has no {LABEL_TABLE}; write a line NAME<tab>LABEL for each .npy")
        return [path / LABEL_TABLE, *found]

    def read(self) -> LabelledDataset:
        path = existing_path(self.path)
        spoken, labels, keys = _read_folder(path) if path.is_dir() else _read_npz_frames(path)
        names = [f"utterance {key} of {path}" for key in keys]
        for one, name in zip(spoken, names, strict=True):
            _check_frames(one, spoken[0], name)
        each = isinstance(labels[0], list)
        if each:
            for one, label, name in zip(spoken, labels, names, strict=True):
                if len(label) != len(one):
                    raise SpecError(f"{name} has {len(one)} frames, but {len(label)} labels; give one for each")
        flat, classes = number_labels([one for label in labels for one in label] if each else labels)
        ends = np.cumsum([len(one) for one in spoken])[:-1]
        splits = split_examples({"train": len(spoken)}, keys, self.valid, self.test)
        inputs = UtteranceInputs(spoken, splits["train"])
        return LabelledDataset(inputs, np.split(flat, ends) if each else flat, classes, splits)


FrameData = tuple[list[Any], list[Any], list[str]]  # the frames of each utterance, its label or labels, its name


def _read_npz_frames(path: Path) -> FrameData:
    arrays = read_npz(path)
    if missing := [name for name in ("frames", "labels") if name not in arrays]:
        held = ", ".join(arrays) or "nothing"
        raise SpecError(f"{path} has no {missing[0]!r}, but {held}; name the arrays frames, labels and lengths")
    frames, labels = arrays["frames"], arrays["labels"]
    spoken = _split_utterances(frames, arrays, path)
    if labels.dtype.kind not in "uiSU" or labels.ndim > 2:
        raise SpecError(f"the labels of {path} are {labels.dtype} {list(labels.shape)}; give whole numbers")
    names = [str(n) for n in range(len(spoken))]
    if labels.shape == (len(spoken),):
        return spoken, labels.tolist(), names
    if labels.ndim == 2 and "lengths" not in arrays and len(labels) == len(spoken):
        return spoken, labels.tolist(), names
    if labels.shape == (sum(map(len, spoken)),):
        ends = np.cumsum([len(one) for one in spoken])[:-1]
        return spoken, [one.tolist() for one in np.split(labels, ends)], names
    told = f"labels {list(labels.shape)} for {len(spoken)} utterances of {sum(map(len, spoken))} frames"
    raise SpecError(f"{path} has {told}; give one for each utterance or for each frame")


def _split_utterances(frames: Any, arrays: Mapping[str, Any], path: Path) -> list[Any]:
    """The frames of each utterance."""
    if "lengths" not in arrays and frames.ndim == 3:
        return list(frames)
    lengths = arrays.get("lengths", np.zeros(0))
    if frames.ndim != 2 or lengths.ndim != 1 or lengths.dtype.kind not in "ui" or lengths.sum() != len(frames):
        fact = f"{path} has frames {list(frames.shape)} and lengths that sum to {lengths.sum():g}"
        raise SpecError(f"{fact}; give frames [n, time, features], or all in one row with the length of each")
    return np.split(frames, np.cumsum(lengths)[:-1])


def _read_folder(path: Path) -> FrameData:
    spoken, labels, known = list[Any](), list[Any](), dict[str, int]()
    for n, line in enumerate(read_lines(path / LABEL_TABLE), 1):
        name, _, said = line.partition("\t")
        name = name.removesuffix(".npy")
        if not line.strip():
            continue
        if not said.strip():
            raise SpecError(f"line {n} of {path / LABEL_TABLE} has no label; write NAME<tab>LABEL")
        if name in known:
            raise SpecError(f"line {n} of {path / LABEL_TABLE} names {name} again, as line {known[name]}; keep one")
        known[name] = n
        labels.append(said.split())
        spoken.append(open_npy(existing_file(str(path / f"{name}.npy"))))
    if not labels:
        raise SpecError(f"{path / LABEL_TABLE} is empty; write a line NAME<tab>LABEL for each .npy")
    beside = {file.relative_to(path).as_posix().removesuffix(".npy") for file in list_files(path, (".npy",))}
    if unsaid := sorted(beside - set(known)):
        raise SpecError(f"{path / unsaid[0]}.npy has no label in {LABEL_TABLE}; add a line for it")
    alone = all(len(label) == 1 for label in labels)
    return spoken, [label[0] for label in labels] if alone else labels, list(known)


def _check_frames(utterance: Any, first: Any, name: str) -> None:
    if utterance.ndim != 2 or utterance.dtype.kind not in "fui" or not utterance.size:
        raise SpecError(
            f"{name} holds {utterance.dtype} {list(utterance.shape)}; give numbers [time, features], at least one frame"
        )
    if utterance.shape[1:] != first.shape[1:]:
        fact = f"{name} has {utterance.shape[1]} features, the first utterance {first.shape[1]}"
        raise SpecError(f"{fact}; give as many for each")
    whole = np.isfinite(utterance).all(1)
    if not whole.all():
        at = int(np.argmin(whole))
        raise SpecError(f"frame {at} of {name} holds numbers that are not finite; take it out, with its label")


class UtteranceInputs(ClassifierInputs):
    """Utterances of several lengths, each feature brought to mean 0 and deviation 1 over those to train on."""

    def __init__(self, utterances: Sequence[Any], train: IndexArray) -> None:
        self.utterances = utterances
        self.longest, self.width = max(map(len, utterances)), utterances[0].shape[1]
        count, sums = 0, np.zeros((2, self.width))
        for n in train:
            some = np.asarray(utterances[n], np.float64)
            count, sums = count + len(some), sums + np.stack([some.sum(0), (some**2).sum(0)])
        mean, square = sums / count
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        self.mean, self.deviation = mean, np.where(deviation > 1e-6, deviation, 1.0)  # of a feature that never changes

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        lengths = [len(self.utterances[n]) for n in indices]
        out = np.zeros((len(indices), max(lengths), self.width), np.float32)
        for row, n in zip(out, indices, strict=True):
            row[: len(self.utterances[n])] = (self.utterances[n] - self.mean) / self.deviation
        x = torch.from_numpy(out)
        return x, SequenceInfo.from_batch(x, lengths=lengths)

    @property
    def usage(self) -> ProcessorSpec:
        return ProcessorSpec(mean=tuple(self.mean.tolist()), deviation=tuple(self.deviation.tolist()))

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """Frames are an image of one column: a linear map of each, up to the longest utterance there is."""
        column = PatchSpec(rows=self.longest, columns=1, high=1, wide=self.width, channels=1)
        return make_classifier("frames", EmbeddingSpec(patches=column), num_classes, pooling)
