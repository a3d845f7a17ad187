"""What is classified, brought to what the model reads: texts, image files, frames in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import SpecError
from ...models import Transformer
from ...models.generating import side_by_side
from ...models.generating.prompts import read
from ...models.labelling import scaled
from ...tasks.arrays import npy
from ...tasks.pixels import SUFFIXES, Arrays, Files
from ...tasks.reading import file_at
from ...tokens import SequenceInfo


class InputReader(ABC):
    """How a line becomes an input, and inputs a batch."""

    def __init__(self, net: Transformer) -> None:
        self.net = net

    @abstractmethod
    def read(self, said: str) -> Any:
        """The input that a line stands for."""

    @abstractmethod
    def collate(self, read: Sequence[Any]) -> tuple[Tensor, SequenceInfo | None]:
        """Several side by side, and where their tokens stand."""


def make_input_reader(net: Transformer) -> InputReader:
    """What a model reads: texts, images if it knows their size, frames if its patches are one column of them."""
    embedding = net.described.stacks[0].embedding
    patches = embedding.patches if embedding else None
    if patches is None:
        return TextReader(net)
    if net.usage.mean and (net.usage.size or patches.columns == 1):
        return ImageReader(net) if net.usage.size else FrameReader(net)
    fact = f"{net.described.name} does not say how its inputs were brought to size and scale"
    raise SpecError(f"{fact}; say it, as in net.usage = Usage(size=(28, 28), mean=(0.13,), deviation=(0.31,))")


class TextReader(InputReader):
    """Texts as ids."""

    def read(self, said: str) -> list[int]:
        return read(self.net, said)

    def collate(self, read: Sequence[list[int]]) -> tuple[Tensor, SequenceInfo | None]:
        return side_by_side(read, torch.device("cpu"))


class ImageReader(InputReader):
    """Files of images by their paths, brought to the size and the channels that were trained on."""

    def read(self, said: str) -> Tensor:
        path, (high, wide) = file_at(said), self.net.usage.size
        shape = high, wide, len(self.net.usage.mean)
        if path.suffix == ".npy":
            store = Arrays(_check_image(npy(path), said)[None], said)
            if store.shape != shape:
                sizes = [" x ".join(map(str, told)) for told in (store.shape, shape)]
                raise SpecError(f"{said} holds {sizes[0]}, the model reads {sizes[1]}; give high, wide and channels so")
        elif path.suffix.lower() in SUFFIXES:
            store = Files([path], (high, wide))
            store.shape = shape
        else:
            raise SpecError(f"{said} is none of {', '.join((*SUFFIXES, '.npy'))}; give an image")
        return scaled(self.net, store.take(np.arange(1)))

    def collate(self, read: Sequence[Tensor]) -> tuple[Tensor, SequenceInfo | None]:
        return torch.cat(list(read)), None


class FrameReader(InputReader):
    """Frames [time, features] in .npy files."""

    def read(self, said: str) -> Tensor:
        frames = npy(file_at(said)) if Path(said).suffix == ".npy" else np.empty(0)
        if frames.ndim != 2 or frames.dtype.kind not in "fui" or not frames.size or not np.isfinite(frames).all():
            raise SpecError(f"{said} holds no finite numbers [time, features]; give such an .npy")
        return scaled(self.net, frames[None])[0]

    def collate(self, read: Sequence[Tensor]) -> tuple[Tensor, SequenceInfo | None]:
        lengths = [len(frames) for frames in read]
        x = torch.nn.utils.rnn.pad_sequence(list(read), batch_first=True)
        return x, SequenceInfo.from_batch(x, lengths=lengths)


def _check_image(numbers: Any, said: str) -> Any:
    if numbers.ndim not in (2, 3) or numbers.dtype.kind not in "uif" or not numbers.size:
        shape = " x ".join(map(str, numbers.shape))
        raise SpecError(f"{said} holds {numbers.dtype}, {shape}; give one image, [high, wide] or with channels")
    return numbers
