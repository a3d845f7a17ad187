"""Answers of `headwise run`: continuations and translations; classes of texts, images or
utterances.
"""

from __future__ import annotations

import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...kernels.counter_rng import RandomStream
from ...models import Transformer
from ...models.generation import PromptBatch, TextGenerator, encode_prompt
from ...models.generation.decoding_config import DecodingConfig
from ...models.generation.generate import (
    GenerationOutput,
    Prediction,
    classify,
    require_class_names,
)
from ...util.escaping import escape_page
from ..arguments import print_page, to_json
from ..options import UsageError
from . import DECODING_FIELDS
from .inputs import InputLine, InputLines, make_input_reader

DEFAULT_NEW_TOKENS = 64  # default of --max-new-tokens
NUM_SHOWN = 5  # classes printed for a single input
BAR_WIDTH = 40  # columns of a bar for probability 1


class Answer(NamedTuple):
    """The lines that are printed for an input, and its part of the JSON document."""

    lines: Sequence[str]
    data: Mapping[str, Any]


class Answerer(ABC):
    """Answers inputs. `input_name` is the name of an input in the document, `data` what the document
    has besides the answers.
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
        """Return an answer to every line, whose inputs were parsed."""


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
    """Generates texts. A single text is printed as it is decoded, unless beams or JSON are asked
    for.
    """

    def __init__(self, model: Transformer, args: Any) -> None:
        super().__init__(model, args)
        options = {name: getattr(args, name) for name in DECODING_FIELDS}
        chosen = {name: value for name, value in options.items() if value is not None}
        self.decoding = DecodingConfig(**chosen, stop=args.stop)
        self.length = DEFAULT_NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens
        self.is_streamed = args.text is not None and not args.json
        self.is_streamed &= self.decoding.beams == 1
        self.generator = TextGenerator.of(
            model,
            self.length,
            args.temperature or 0.0,
            self.decoding,
        )
        seed = secrets.randbits(63) if args.seed is None else args.seed
        self.seed = RandomStream(seed).seed  # shared by all lines

    @property
    def data(self) -> Mapping[str, Any]:
        """The seed of samples."""
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
