"""Answers of `headwise run`: continuations and translations; classes of texts, images or
utterances.
"""

from __future__ import annotations

import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.counter_rng import RandomStream
from ...models import Transformer
from ...models.generation import PromptBatch, TextGenerator, encode_prompt, pad_left
from ...models.generation.decoding_config import DecodingConfig
from ...models.generation.generate import (
    GenerationOutput,
    Prediction,
    classify,
    encode_text,
    require_class_names,
    scale_inputs,
)
from ...training.data.images import IMAGE_SUFFIXES, ArrayImages, ImageFiles
from ...training.data.text_files import existing_file, open_npy
from ...util.errors import SpecError
from ...util.escaping import escape_page
from ..arguments import print_page, to_json
from ..exit_status import print_error
from ..options import UsageError
from . import DECODING_FIELDS

DEFAULT_NEW_TOKENS = 64  # default of --max-new-tokens
NUM_SHOWN = 5  # classes printed for a single input
BAR_WIDTH = 40  # columns of a bar for probability 1


class Answer(NamedTuple):
    """Printed lines for an input, and its part of the JSON document."""

    lines: Sequence[str]
    data: Mapping[str, Any]


class Answerer(ABC):
    """Answers inputs. `input_name` is the name of an input in the document, `data` its other
    fields.
    """

    input_name = "prompt"

    def __init__(self, model: Transformer, args: Any) -> None:
        self.model = model
        self.args = args

    @property
    def data(self) -> Mapping[str, Any]:
        return {}

    def empty(self, number: int) -> Answer:
        """Return the answer to an empty line, or one that failed."""
        return Answer([""], {})

    @abstractmethod
    def read(self, text: str) -> Any:
        """Return the parsed input."""

    @abstractmethod
    def answer(self, lines: Sequence[InputLine[Any]]) -> list[Answer]:
        """Answer every line; their inputs are already parsed."""


def answer(model: Transformer, args: Any, kind: str) -> int:
    """Answer TEXT, or every line of stdin; return 2 if a line failed."""
    answerer = ANSWERERS[kind](model, args)
    lines = InputLines(args.batch)
    rows: list[dict[str, Any]] = []
    batches = lines
    if args.text is not None:
        batches = [[InputLine(1, args.text, answerer.read(args.text))]]
    for batch in batches:
        ready = batch if args.text is not None else lines.read(batch, answerer.read)
        numbers = [line.number for line in ready]
        answers = answerer.answer(ready) if ready else []
        answer_of_line = dict(zip(numbers, answers, strict=True))
        for line in batch:
            line_answer = answer_of_line.get(line.number) or answerer.empty(line.number)
            if args.json:
                data = {"error": line.error} if line.error else line_answer.data
                rows.append({"line": line.number, answerer.input_name: line.text, **data})
            else:
                for text in line_answer.lines:
                    print_page(text)
                sys.stdout.flush()
    if args.json:
        print_page(to_json({"model": model.spec.name, **answerer.data, "answers": rows}))
    return 2 if lines.num_failed else 0


# --- Texts ----------------------------------------------------------------------------------------


class TextAnswerer(Answerer):
    """Generates texts. A single text is streamed, except with beams or JSON."""

    def __init__(self, model: Transformer, args: Any) -> None:
        super().__init__(model, args)
        options = {name: getattr(args, name) for name in DECODING_FIELDS}
        chosen = {name: value for name, value in options.items() if value is not None}
        self.decoding = DecodingConfig(**chosen, stop=args.stop)
        self.length = DEFAULT_NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens
        self.is_streamed = args.text is not None and not args.json
        self.is_streamed &= self.decoding.beams == 1
        self.generator = TextGenerator.from_options(
            model,
            self.length,
            args.temperature or 0.0,
            self.decoding,
        )
        seed = secrets.randbits(63) if args.seed is None else args.seed
        self.seed = RandomStream(seed).seed  # shared by all lines

    @property
    def data(self) -> Mapping[str, Any]:
        """Return the sampling seed."""
        return {"seed": self.seed} if self.args.temperature else {}

    def empty(self, number: int) -> Answer:
        """Return the answer to an empty line: no text, or no score and text."""
        return Answer([""] if self.decoding.best == 1 else [f"{number}\t\t"], {})

    def read(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        return encode_prompt(self.model, text, self.length)

    def answer(self, lines: Sequence[InputLine[list[int]]]) -> list[Answer]:
        """Generate one text for each line, or several with their scores."""
        prompts = PromptBatch([line.read or [] for line in lines], "text", "together")
        streams: list[RandomStream] = []
        if self.args.temperature:
            streams = [RandomStream(self.seed, line.number - 1) for line in lines]
        if self.is_streamed:
            for piece in self.generator.pieces(prompts, streams):
                _write_piece(piece)
            _write_piece("\n")
            return [Answer([], {})]
        results = self.generator.answers(prompts, streams)
        return [self._describe(*pair) for pair in zip(lines, results, strict=True)]

    def _describe(self, line: InputLine[list[int]], outputs: Sequence[GenerationOutput]) -> Answer:
        shown: list[str] = []
        candidates: list[dict[str, Any]] = []
        for output in outputs:
            text = re.sub(r"[\r\n]+", " ", output.text or "")
            is_only = self.decoding.best == 1
            shown.append(text if is_only else f"{line.number}\t{output.score:.4f}\t{text}")
            values = output._asdict().items()
            candidates.append({name: value for name, value in values if value is not None})
        best = {"best": candidates} if candidates[1:] else {}
        return Answer(shown, candidates[0] | best)


def _write_piece(piece: str) -> None:
    """Write part of a line and flush."""
    sys.stdout.write(escape_page(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


# --- Classes --------------------------------------------------------------------------------------


class ClassAnswerer(Answerer):
    """Classifies texts, images or utterances: a table for TEXT, one line for each line of stdin."""

    input_name = "input"

    def __init__(self, model: Transformer, args: Any) -> None:
        super().__init__(model, args)
        count = len(require_class_names(model))
        if args.top_k is not None and args.top_k > count:
            fact = f"--top-k {args.top_k} is not between 1 and the {count} classes"
            raise UsageError(f"{fact}; give 1..{count}")
        self.reader = make_input_reader(model)

    def read(self, text: str) -> Any:
        """Return the input that a line names."""
        return self.reader.read(text)

    def answer(self, lines: Sequence[InputLine[Any]]) -> list[Answer]:
        """Return the likeliest classes of each input."""
        is_single = self.args.text is not None
        top = self.args.top_k or (NUM_SHOWN if is_single else 1)
        answers: list[Answer] = []
        for all_classes in classify(self.model, *self.reader.collate([one.read for one in lines])):
            likeliest = all_classes[:top]
            cells = [f"{guess.name}\t{guess.share:.4f}" for guess in likeliest]
            shown = _format_predictions(likeliest, BAR_WIDTH) if is_single else ["\t".join(cells)]
            answers.append(Answer(shown, {"classes": [guess._asdict() for guess in likeliest]}))
        return answers


def _format_predictions(predictions: Sequence[Prediction], bar_width: int = 0) -> list[str]:
    width = max(len(guess.name) for guess in predictions)
    return [
        f"{name:<{width}}  {share:6.1%}  {'█' * round(bar_width * share)}".rstrip()
        for name, share in predictions
    ]


ANSWERERS = {"texts": TextAnswerer, "classes": ClassAnswerer}


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
