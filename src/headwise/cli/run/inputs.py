"""What is to be answered: one text, or the lines of stdin, a few at a time."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...data.image_arrays import IMAGE_SUFFIXES, ArrayImages, ImageFiles, open_npy
from ...data.text_files import existing_file
from ...errors import SpecError
from ...generation import pad_left
from ...generation.classification import scale_inputs
from ...generation.prompts import encode_text
from ...masking.sequence_info import SequenceInfo
from ...models import Transformer
from ..arguments import UsageError

MAX_LINE_BYTES = 2**20  # bytes of a line
InputT = TypeVar("InputT")


@dataclass
class InputLine(Generic[InputT]):
    """A line by its number, counted from 1: what it says, and what was made of it, or why nothing could be."""

    number: int
    text: str
    read: InputT | None = None
    error: str = ""


@dataclass
class InputLines:
    """Lines of stdin in batches, in order. A line that cannot be read is told on stderr, and the others go on.

    `refused` counts those; an empty line is answered by an empty one.
    """

    batch_size: int
    num_failed: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[InputLine[Any]]]:
        lines, size = enumerate(_read_stdin_lines(), 1), 1 if sys.stdin.isatty() else self.batch_size
        while some := [_decode_line(number, raw) for number, raw in islice(lines, size)]:
            yield some

    def read(self, lines: list[InputLine[Any]], make: Callable[[str], Any]) -> list[InputLine[Any]]:
        """What is made of each line that is not empty; those that something could be made of."""
        for line in lines:
            if line.error or not line.text.strip():
                continue
            try:
                line.read = make(line.text)
            except (ValueError, OSError) as error:
                line.error = " ".join(str(error).split())
        for line in lines:
            if line.error:
                self.num_failed += 1
                print(f"headwise: line {line.number}: {line.error}", file=sys.stderr)
        return [line for line in lines if line.read is not None]


def _read_stdin_lines() -> Iterator[bytes]:
    while raw := sys.stdin.buffer.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise UsageError(f"a line of stdin is longer than {MAX_LINE_BYTES:,} bytes; give text, a sentence a line")
        yield raw


def _decode_line(number: int, raw: bytes) -> InputLine[Any]:
    try:
        return InputLine(number, raw.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return InputLine(number, "", error=f"byte {error.start} is no text: {error.reason}; give UTF-8")


# --- What is classified, brought to what the model reads -----------------------------------------------


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
    embedding = net.spec.stacks[0].embedding
    patches = embedding.patches if embedding else None
    if patches is None:
        return TextReader(net)
    if net.usage.mean and (net.usage.size or patches.columns == 1):
        return ImageReader(net) if net.usage.size else FrameReader(net)
    fact = f"{net.spec.name} does not say how its inputs were brought to size and scale"
    raise SpecError(f"{fact}; say it, as in net.usage = Usage(size=(28, 28), mean=(0.13,), deviation=(0.31,))")


class TextReader(InputReader):
    """Texts as ids."""

    def read(self, said: str) -> list[int]:
        return encode_text(self.net, said)

    def collate(self, read: Sequence[list[int]]) -> tuple[Tensor, SequenceInfo | None]:
        return pad_left(read, torch.device("cpu"))


class ImageReader(InputReader):
    """Files of images by their paths, brought to the size and the channels that were trained on."""

    def read(self, said: str) -> Tensor:
        path, (high, wide) = existing_file(said), self.net.usage.size
        shape = high, wide, len(self.net.usage.mean)
        if path.suffix == ".npy":
            store = ArrayImages(_check_image(open_npy(path), said)[None], said)
            if store.shape != shape:
                sizes = [" x ".join(map(str, told)) for told in (store.shape, shape)]
                raise SpecError(f"{said} holds {sizes[0]}, the model reads {sizes[1]}; give high, wide and channels so")
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            store = ImageFiles([path], (high, wide))
            store.shape = shape
        else:
            raise SpecError(f"{said} is none of {', '.join((*IMAGE_SUFFIXES, '.npy'))}; give an image")
        return scale_inputs(self.net, store.take(np.arange(1)))

    def collate(self, read: Sequence[Tensor]) -> tuple[Tensor, SequenceInfo | None]:
        return torch.cat(list(read)), None


class FrameReader(InputReader):
    """Frames [time, features] in .npy files."""

    def read(self, said: str) -> Tensor:
        frames = open_npy(existing_file(said)) if Path(said).suffix == ".npy" else np.empty(0)
        if frames.ndim != 2 or frames.dtype.kind not in "fui" or not frames.size or not np.isfinite(frames).all():
            raise SpecError(f"{said} holds no finite numbers [time, features]; give such an .npy")
        return scale_inputs(self.net, frames[None])[0]

    def collate(self, read: Sequence[Tensor]) -> tuple[Tensor, SequenceInfo | None]:
        lengths = [len(frames) for frames in read]
        x = torch.nn.utils.rnn.pad_sequence(list(read), batch_first=True)
        return x, SequenceInfo.from_batch(x, lengths=lengths)


def _check_image(numbers: Any, said: str) -> Any:
    if numbers.ndim not in (2, 3) or numbers.dtype.kind not in "uif" or not numbers.size:
        shape = " x ".join(map(str, numbers.shape))
        raise SpecError(f"{said} holds {numbers.dtype}, {shape}; give one image, [high, wide] or with channels")
    return numbers
