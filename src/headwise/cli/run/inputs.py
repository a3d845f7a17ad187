"""Inputs of `headwise run`: batches of stdin lines, and conversion of texts, images and frames to
tensors.
"""

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

from ...attention.masking.sequence_info import SequenceInfo
from ...models import Transformer
from ...models.generation import pad_left
from ...models.generation.generate import encode_text, scale_inputs
from ...training.data.images import IMAGE_SUFFIXES, ArrayImages, ImageFiles
from ...training.data.text_files import existing_file, open_npy
from ...util.errors import SpecError
from ..exit_status import print_error
from ..options import UsageError

MAX_LINE_BYTES = 2**20  # longest line that is accepted
InputT = TypeVar("InputT")


@dataclass
class InputLine(Generic[InputT]):
    """An input line (numbers count from 1), with the parsed input in `read`, or the reason it
    failed in `error`.
    """

    number: int
    text: str
    read: InputT | None = None
    error: str = ""


@dataclass
class InputLines:
    """Batches of stdin lines, in order. A line that fails is reported on stderr and counted in
    `num_failed`; the others continue. An empty line gets an empty answer.
    """

    batch_size: int
    num_failed: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[InputLine[Any]]]:
        stdin_lines = enumerate(_read_stdin_lines(), 1)
        size = 1 if sys.stdin.isatty() else self.batch_size
        while batch := [_decode_line(number, raw) for number, raw in islice(stdin_lines, size)]:
            yield batch

    def read(
        self, lines: list[InputLine[Any]], parse: Callable[[str], Any]
    ) -> list[InputLine[Any]]:
        """Parse every line that is not empty with `parse`; return the lines that succeeded."""
        for line in lines:
            if line.error or not line.text.strip():
                continue
            try:
                line.read = parse(line.text)
            except (ValueError, OSError) as error:
                line.error = " ".join(str(error).split())
        for line in lines:
            if line.error:
                self.num_failed += 1
                print_error(f"line {line.number}: {line.error}")
        return [line for line in lines if line.read is not None]


def _read_stdin_lines() -> Iterator[bytes]:
    while raw := sys.stdin.buffer.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise UsageError(
                f"a line of stdin is longer than {MAX_LINE_BYTES:,} bytes; give text with one "
                "sentence per line"
            )
        yield raw


def _decode_line(number: int, raw: bytes) -> InputLine[Any]:
    try:
        return InputLine(number, raw.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return InputLine(
            number, "", error=f"byte {error.start} is not UTF-8: {error.reason}; give UTF-8 text"
        )


# --- Inputs of classifiers ------------------------------------------------------------------------


class InputReader(ABC):
    """Converts a line to an input, and inputs to a batch."""

    def __init__(self, net: Transformer) -> None:
        self.net = net

    @abstractmethod
    def read(self, line: str) -> Any:
        """Return the input that a line names."""

    @abstractmethod
    def collate(self, read: Sequence[Any]) -> tuple[Tensor, SequenceInfo | None]:
        """Return a batch of inputs, and the sequence info of its tokens if they are padded."""


def make_input_reader(net: Transformer) -> InputReader:
    """Return the reader for a model: of texts, images (if their size is known) or frames
    (one-column patches).
    """
    embedding = net.spec.stacks[0].embedding
    patches = embedding.patches if embedding else None
    if patches is None:
        return TextReader(net)
    if net.usage.mean and (net.usage.size or patches.columns == 1):
        return ImageReader(net) if net.usage.size else FrameReader(net)
    fact = f"{net.spec.name} does not record the size and normalisation of its inputs"
    raise SpecError(
        f"{fact}; add image_mean and image_std in a preprocessor_config.json to its folder"
    )


class TextReader(InputReader):
    """Reads texts as token ids."""

    def read(self, line: str) -> list[int]:
        return encode_text(self.net, line)

    def collate(self, read: Sequence[list[int]]) -> tuple[Tensor, SequenceInfo | None]:
        return pad_left(read, torch.device("cpu"))


class ImageReader(InputReader):
    """Reads image files, resized to the size and channels of the training images."""

    def read(self, line: str) -> Tensor:
        path = existing_file(line)
        (height, width) = self.net.usage.size
        shape = height, width, len(self.net.usage.mean)
        if path.suffix == ".npy":
            store = ArrayImages(_check_image(open_npy(path), line)[None], line)
            if store.shape != shape:
                sizes = [" x ".join(map(str, size)) for size in (store.shape, shape)]
                raise SpecError(
                    f"{line} is {sizes[0]}, but the model needs {sizes[1]} (height x width x "
                    "channels); resize it"
                )
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            store = ImageFiles([path], (height, width))
            store.shape = shape
        else:
            raise SpecError(
                f"{line} is not an image file; give one of {', '.join((*IMAGE_SUFFIXES, '.npy'))}"
            )
        return scale_inputs(self.net, store.take(np.arange(1)))

    def collate(self, read: Sequence[Tensor]) -> tuple[Tensor, SequenceInfo | None]:
        return torch.cat(list(read)), None


class FrameReader(InputReader):
    """Reads frames [time, features] from .npy files."""

    def read(self, line: str) -> Tensor:
        frames = open_npy(existing_file(line)) if Path(line).suffix == ".npy" else np.empty(0)
        if (
            frames.ndim != 2
            or frames.dtype.kind not in "fui"
            or not frames.size
            or not np.isfinite(frames).all()
        ):
            raise SpecError(
                f"{line} is not an array [time, features] of finite numbers; give an .npy file "
                "with one"
            )
        return scale_inputs(self.net, frames[None])[0]

    def collate(self, read: Sequence[Tensor]) -> tuple[Tensor, SequenceInfo | None]:
        lengths = [len(frames) for frames in read]
        x = torch.nn.utils.rnn.pad_sequence(list(read), batch_first=True)
        return x, SequenceInfo.from_batch(x, lengths=lengths)


def _check_image(array: Any, name: str) -> Any:
    if array.ndim not in (2, 3) or array.dtype.kind not in "uif" or not array.size:
        shape = " x ".join(map(str, array.shape))
        raise SpecError(
            f"{name} is {array.dtype}, {shape}; give one image, [height, width] or [height, "
            "width, channels]"
        )
    return array
