"""Classification of feature sequences, such as speech features: one class per utterance, or one per
frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...models.model_spec import EmbeddingSpec, ModelSpec, PatchSpec, ProcessorSpec
from ...util.errors import SpecError
from .example_order import DEFAULT_HELD_OUT, IndexArray, check_split_shares, split_examples
from .file_task import (
    ChannelStatistics,
    ClassificationTask,
    ClassifierInputs,
    LabelledDataset,
    make_classifier,
    number_labels,
)
from .images import read_npz
from .text_files import existing_file


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
        """The frames of each utterance; raises SpecError unless all are finite numbers."""
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
            mean=tuple(self.mean.tolist()), deviation=tuple(self.deviation.tolist())
        )

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        rows: list[Tensor] = []
        for n in indices:
            frames = (self.utterances[n] - self.mean) / self.deviation
            rows.append(torch.from_numpy(frames.astype(np.float32)))
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return x, SequenceInfo.from_batch(x, lengths=[len(row) for row in rows])

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """An encoder that embeds each frame linearly: an utterance is an image of one column, a
        frame one patch.
        """
        longest = max(map(len, self.utterances))
        width = self.utterances[0].shape[1]
        column = PatchSpec(rows=longest, columns=1, high=1, wide=width, channels=1)
        return make_classifier("frames", EmbeddingSpec(patches=column), num_classes, pooling)
