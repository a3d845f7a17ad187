"""Classification of feature sequences, such as speech features: one class per utterance, or one per
frame.
"""

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
from .file_task import ClassifierInputs, FileTask, LabelledDataset, make_classifier, number_labels
from .images import open_npy, read_npz
from .text_files import existing_file, existing_path, list_files, read_lines

LABEL_TABLE = "labels.tsv"


@dataclass(frozen=True, repr=False)
class FrameClassification(FileTask):
    """Classification of utterances or of their frames, with each feature normalised to mean 0 and
    standard deviation 1.

    `path` is an .npz or a folder. The .npz holds `frames`, [n, time, features], or [total,
    features] together with `lengths`; and `labels`, one per utterance or one per frame. The folder
    holds .npy files [time, features] and a labels.tsv with a line for each: its name, a tab, and
    one label, or one label per frame separated by spaces.
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
        if not (npy_files := list_files(path, (".npy",))):
            raise SpecError(
                f"{path} has no .npy files; add one [time, features] per utterance, or give an .npz"
            )
        if not (path / LABEL_TABLE).is_file():
            raise SpecError(
                f"{path} has no {LABEL_TABLE}; write a line NAME<tab>LABEL for each .npy"
            )
        return [path / LABEL_TABLE, *npy_files]

    def read(self) -> LabelledDataset:
        path = existing_path(self.path)
        utterances, labels, keys = _read_folder(path) if path.is_dir() else _read_npz_frames(path)
        names = [f"utterance {key} of {path}" for key in keys]
        for utterance, name in zip(utterances, names, strict=True):
            _check_frames(utterance, utterances[0], name)
        per_frame = isinstance(labels[0], list)
        if per_frame:
            for utterance, frame_labels, name in zip(utterances, labels, names, strict=True):
                if len(frame_labels) != len(utterance):
                    raise SpecError(
                        f"{name} has {len(utterance)} frames, but {len(frame_labels)} labels; "
                        "give one label per frame"
                    )
        flat, classes = number_labels(
            [label for frame_labels in labels for label in frame_labels] if per_frame else labels
        )
        ends = np.cumsum([len(utterance) for utterance in utterances])[:-1]
        splits = split_examples({"train": len(utterances)}, keys, self.valid, self.test)
        inputs = UtteranceInputs(utterances, splits["train"])
        return LabelledDataset(inputs, np.split(flat, ends) if per_frame else flat, classes, splits)


FrameData = tuple[
    list[Any], list[Any], list[str]
]  # for each utterance its frames, its label or labels, its name


def _read_npz_frames(path: Path) -> FrameData:
    arrays = read_npz(path)
    if missing := [name for name in ("frames", "labels") if name not in arrays]:
        present = ", ".join(arrays) or "no arrays"
        raise SpecError(
            f"{path} has {present}, but no {missing[0]!r}; name the arrays frames, labels and "
            "lengths"
        )
    frames, labels = arrays["frames"], arrays["labels"]
    utterances = _split_utterances(frames, arrays, path)
    if labels.dtype.kind not in "uiSU" or labels.ndim > 2:
        raise SpecError(
            f"the labels of {path} are {labels.dtype} {list(labels.shape)}; give integers or text"
        )
    names = [str(n) for n in range(len(utterances))]
    if labels.shape == (len(utterances),):
        return utterances, labels.tolist(), names
    if labels.ndim == 2 and "lengths" not in arrays and len(labels) == len(utterances):
        return utterances, labels.tolist(), names
    num_frames = sum(map(len, utterances))
    if labels.shape == (num_frames,):
        ends = np.cumsum([len(utterance) for utterance in utterances])[:-1]
        return utterances, [frame_labels.tolist() for frame_labels in np.split(labels, ends)], names
    fact = f"labels {list(labels.shape)} for {len(utterances)} utterances of {num_frames} frames"
    raise SpecError(f"{path} has {fact}; give one label per utterance or one per frame")


def _split_utterances(frames: Any, arrays: Mapping[str, Any], path: Path) -> list[Any]:
    if "lengths" not in arrays and frames.ndim == 3:
        return list(frames)
    lengths = arrays.get("lengths", np.zeros(0))
    if (
        frames.ndim != 2
        or lengths.ndim != 1
        or lengths.dtype.kind not in "ui"
        or lengths.sum() != len(frames)
    ):
        fact = f"{path} has frames {list(frames.shape)} and lengths that sum to {lengths.sum():g}"
        raise SpecError(
            f"{fact}; give frames [n, time, features], or frames [total, features] with matching "
            "lengths"
        )
    return np.split(frames, np.cumsum(lengths)[:-1])


def _read_folder(path: Path) -> FrameData:
    utterances, labels = list[Any](), list[Any]()
    line_of_name: dict[str, int] = {}
    for n, line in enumerate(read_lines(path / LABEL_TABLE), 1):
        name, _, label_text = line.partition("\t")
        name = name.removesuffix(".npy")
        if not line.strip():
            continue
        if not label_text.strip():
            raise SpecError(f"line {n} of {path / LABEL_TABLE} has no label; write NAME<tab>LABEL")
        if name in line_of_name:
            raise SpecError(
                f"line {n} of {path / LABEL_TABLE} names {name} again, as line "
                f"{line_of_name[name]}; keep one"
            )
        line_of_name[name] = n
        labels.append(label_text.split())
        utterances.append(open_npy(existing_file(str(path / f"{name}.npy"))))
    if not labels:
        raise SpecError(f"{path / LABEL_TABLE} is empty; write a line NAME<tab>LABEL for each .npy")
    file_names = {
        file.relative_to(path).as_posix().removesuffix(".npy")
        for file in list_files(path, (".npy",))
    }
    if unlabelled := sorted(file_names - set(line_of_name)):
        raise SpecError(
            f"{path / unlabelled[0]}.npy has no label in {LABEL_TABLE}; add a line for it"
        )
    per_utterance = all(len(label) == 1 for label in labels)
    return (
        utterances,
        [label[0] for label in labels] if per_utterance else labels,
        list(line_of_name),
    )


def _check_frames(utterance: Any, first: Any, name: str) -> None:
    if utterance.ndim != 2 or utterance.dtype.kind not in "fui" or not utterance.size:
        raise SpecError(
            f"{name} holds {utterance.dtype} {list(utterance.shape)}; give numbers [time, "
            "features], at least one frame"
        )
    if utterance.shape[1:] != first.shape[1:]:
        fact = f"{name} has {utterance.shape[1]} features, the first utterance {first.shape[1]}"
        raise SpecError(f"{fact}; give the same number for each")
    is_finite = np.isfinite(utterance).all(1)
    if not is_finite.all():
        at = int(np.argmin(is_finite))
        raise SpecError(f"frame {at} of {name} holds NaN or inf; remove it and its label")


class UtteranceInputs(ClassifierInputs):
    """Utterances of different lengths, normalised per feature with mean and deviation of the train
    split.
    """

    def __init__(self, utterances: Sequence[Any], train: IndexArray) -> None:
        self.utterances = utterances
        self.longest, self.width = max(map(len, utterances)), utterances[0].shape[1]
        count, sums = 0, np.zeros((2, self.width))
        for n in train:
            frames = np.asarray(utterances[n], np.float64)
            count, sums = count + len(frames), sums + np.stack([frames.sum(0), (frames**2).sum(0)])
        mean, mean_square = sums / count
        deviation = np.sqrt(np.maximum(mean_square - mean**2, 0))
        self.mean, self.deviation = (
            mean,
            np.where(deviation > 1e-6, deviation, 1.0),
        )  # 1 for a constant feature

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        lengths = [len(self.utterances[n]) for n in indices]
        out = np.zeros((len(indices), max(lengths), self.width), np.float32)
        for row, n in zip(out, indices, strict=True):
            row[: len(self.utterances[n])] = (self.utterances[n] - self.mean) / self.deviation
        x = torch.from_numpy(out)
        return x, SequenceInfo.from_batch(x, lengths=lengths)

    @property
    def usage(self) -> ProcessorSpec:
        return ProcessorSpec(
            mean=tuple(self.mean.tolist()), deviation=tuple(self.deviation.tolist())
        )

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """An encoder that embeds each frame linearly: an utterance is an image of one column, a
        frame one patch.
        """
        column = PatchSpec(rows=self.longest, columns=1, high=1, wide=self.width, channels=1)
        return make_classifier("frames", EmbeddingSpec(patches=column), num_classes, pooling)
