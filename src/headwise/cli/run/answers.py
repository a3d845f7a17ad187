"""Answers of `headwise run`: continuations and translations, with BLEU and chrF of them (--score);
classes of texts, images or utterances; and masked tokens.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ...kernels.counter_rng import RandomStream
from ...models import Transformer
from ...models.generation import PromptBatch, TextGenerator, encode_prompt
from ...models.generation.decoding_config import DecodingConfig
from ...models.generation.decoding_state import CompileDecision, ignore_decision
from ...models.generation.generate import GenerationOutput
from ...models.generation.prompts import get_decoder_start_ids
from ...models.generation.single_pass import (
    FilledText,
    Prediction,
    classify,
    fill_masks,
    require_class_names,
)
from ...models.generation.text_output import TokenScore, load_tokenizers, score_tokens
from ...training.data.translation import SacreBleuScores, score_translations
from ...util.errors import pluralise
from ...util.escaping import escape_page, escape_terminal
from ...util.files import read_text_file
from ..arguments import print_note, print_page, to_json
from ..options import UsageError
from . import DECODING_FIELDS
from .inputs import InputLine, InputLines, make_input_reader

DEFAULT_NEW_TOKENS = 64  # default of --max-new-tokens


def answer(model: Transformer, args: Any) -> int:
    """Generate for TEXT, printed as it is decoded, or for every line of stdin."""
    decoding = parse_decoding(args)
    max_new_tokens = parse_length(args)
    notices = CompileNotices()
    on_decision = ignore_decision if args.compile is None else notices.print_once
    generator = TextGenerator.of(
        model, max_new_tokens, args.temperature or 0.0, decoding, on_decision
    )
    seed = RandomStream(
        secrets.randbits(63) if args.seed is None else args.seed
    ).seed  # shared by all lines
    form = "document" if args.json else "lines"
    scores = TranslationScores.from_file(args.score, args.score_tokenize)
    writer = AnswerWriter(generator, seed, form, scores, notices, args.logprobs)
    read = partial(encode_prompt, model, max_new_tokens=max_new_tokens, window=decoding.window)
    if args.text is not None:
        writer.write_one(InputLine(1, args.text, read(args.text)))
        writer.finish()
        return 0
    lines = InputLines(args.batch)
    for batch in lines:
        writer.write_batch(batch, lines.read(batch, read))
    writer.finish()
    return 2 if lines.num_failed else 0


def parse_decoding(args: Any) -> DecodingConfig:
    """Return the decoding configuration that the options describe."""
    options = {name: getattr(args, name) for name in DECODING_FIELDS}
    chosen = {name: value for name, value in options.items() if value is not None}
    return DecodingConfig(**chosen, stop=args.stop)


def parse_length(args: Any) -> int:
    """Return --max-new-tokens or its default."""
    return DEFAULT_NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens


@dataclass
class CompileNotices:
    """Prints every reason for compiling or not compiling the decode step once, on stderr."""

    messages: list[str] = field(default_factory=list)

    def print_once(self, decision: CompileDecision) -> None:
        """Print the reason of a decision, unless it has been printed."""
        if decision.reason not in self.messages:
            self.messages.append(decision.reason)
            print_note(f"steps are {decision.reason}")


@dataclass
class AnswerWriter:
    """Prints answers: lines as they finish, or with form="document" one JSON
    document at the end.
    """

    generation: TextGenerator
    seed: int
    form: str
    scores: TranslationScores | None
    compile_notices: CompileNotices
    num_logprobs: int | None = (
        None  # the likeliest tokens to print beside each token; None for no log-probabilities
    )
    documents: list[dict[str, Any]] = field(default_factory=list)

    def write_one(self, line: InputLine[list[int]]) -> None:
        """Generate and print one answer, token by token unless beams or JSON are requested."""
        if (
            self.form == "document"
            or self.generation.how.beams > 1
            or self.num_logprobs is not None
        ):
            self.write_batch([line], [line])
            return
        text = ""
        for piece in self.generation.pieces(
            _generation_inputs([line]), self._random_streams([line])
        ):
            text += piece
            _write_piece(piece)
        _write_piece("\n")
        self._score(text)

    def write_batch(
        self, lines: Sequence[InputLine[list[int]]], ready: Sequence[InputLine[list[int]]]
    ) -> None:
        """Generate answers to the `ready` lines of a batch, and print one for every line."""
        results = (
            self.generation.answers(_generation_inputs(ready), self._random_streams(ready))
            if ready
            else []
        )
        outputs_of_line = {
            line.number: outputs for line, outputs in zip(ready, results, strict=True)
        }
        for line in lines:
            outputs = outputs_of_line.get(line.number, [])
            token_scores = [self._score_tokens(line, output) for output in outputs]
            self._score(outputs[0].text if outputs else "")
            if self.form == "document":
                self.documents.append(_answer_to_dict(line, outputs, token_scores))
            else:
                self._write_answer(line, outputs)
                for table in token_scores if self.num_logprobs is not None else ():
                    print_page(format_token_scores(table))

    def finish(self) -> None:
        """Print the JSON document and the scores."""
        has_scores = self.form == "document" and (self.scores is None or self.scores.is_complete)
        if self.form == "document":
            seed = {"seed": self.seed} if self.generation.temperature else {}
            scores = {"scores": self.scores.data} if self.scores and has_scores else {}
            steps = (
                {"steps": self.compile_notices.messages} if self.compile_notices.messages else {}
            )
            print_page(
                to_json(
                    {
                        "model": self.generation.net.spec.name,
                        **seed,
                        **steps,
                        "answers": self.documents,
                        **scores,
                    }
                )
            )
        if self.scores and not has_scores:
            print_note(self.scores)

    def _write_answer(
        self, line: InputLine[list[int]], outputs: Sequence[GenerationOutput]
    ) -> None:
        for output in outputs:
            text = re.sub(r"[\r\n]+", " ", output.text or "")  # one output line per input line
            print_page(
                text
                if self.generation.how.best == 1
                else f"{line.number}\t{output.score:.4f}\t{text}"
            )
        if not outputs:
            print_page("" if self.generation.how.best == 1 else f"{line.number}\t\t")
        sys.stdout.flush()

    def _score_tokens(
        self, line: InputLine[list[int]], output: GenerationOutput
    ) -> list[TokenScore]:
        """Log-probabilities of the tokens of an output; empty without --logprobs."""
        if self.num_logprobs is None or line.read is None:
            return []
        net = self.generation.net
        is_translation = net.spec.kind == "encoder-decoder"
        prompt = list(get_decoder_start_ids(net)) if is_translation else line.read
        source = line.read if is_translation else ()
        tokenizer = load_tokenizers(net)[1]
        return score_tokens(
            net, tokenizer, [*prompt, *output.ids], len(prompt), self.num_logprobs, source
        )

    def _score(self, text: str | None) -> None:
        if self.scores:
            self.scores.hypotheses.append(re.sub(r"[\r\n]+", " ", text or ""))

    def _random_streams(self, lines: Sequence[InputLine[list[int]]]) -> list[RandomStream]:
        return (
            [RandomStream(self.seed, line.number - 1) for line in lines]
            if self.generation.temperature
            else []
        )


def _generation_inputs(lines: Sequence[InputLine[list[int]]]) -> PromptBatch:
    return PromptBatch([line.read for line in lines if line.read is not None], "text", "together")


def format_token_scores(scores: Sequence[TokenScore]) -> str:
    """A table of tokens with their log-probabilities (natural logarithm), and the likeliest tokens
    at each place.

    >>> print(format_token_scores([TokenScore("fox", -0.25, [("fox", -0.25), ("dog", -1.75)])]))
    token               logprob  likeliest
    'fox'               -0.2500  'fox' -0.2500, 'dog' -1.7500
    """
    lines = [f"{'token':<18}{'logprob':>9}  likeliest".rstrip()]
    for score in scores:
        likeliest = ", ".join(f"{_quote(text)} {value:.4f}" for text, value in score.top)
        logprob = "" if score.logprob is None else f"{score.logprob:.4f}"
        lines.append(f"{_quote(score.text):<18}{logprob:>9}  {likeliest}".rstrip())
    return "\n".join(lines)


def _quote(token: str) -> str:
    return f"'{escape_terminal(token)}'" if token.strip() == token else repr(token)


def _answer_to_dict(
    line: InputLine[list[int]],
    outputs: Sequence[GenerationOutput],
    token_scores: Sequence[Sequence[TokenScore]],
) -> dict[str, Any]:
    line_info = {"line": line.number, "prompt": line.text}
    if line.error:
        return line_info | {"error": line.error}
    candidates = [
        {name: value for name, value in output._asdict().items() if value is not None}
        for output in outputs
    ]
    for candidate, scores in zip(candidates, token_scores, strict=True):
        if scores:
            candidate["logprobs"] = [
                {"token": score.text, "logprob": score.logprob, "top": dict(score.top)}
                for score in scores
            ]
    first = {name: value for fields in candidates[:1] for name, value in fields.items()}
    return line_info | first | ({"best": candidates} if candidates[1:] else {})


def _write_piece(piece: str) -> None:
    """Write part of a line and flush."""
    sys.stdout.write(escape_page(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


# --- --score: BLEU and chrF against a file of references ------------------------------------------


@dataclass
class TranslationScores:
    """Generated `hypotheses` and the `references` read from a file."""

    path: str
    references: list[str]
    tokenize: str | None
    hypotheses: list[str] = field(default_factory=list)

    @staticmethod
    def from_file(path: str | None, tokenize: str | None) -> TranslationScores | None:
        """Read the references, or return None without --score; raises before
        anything is generated.
        """
        if path is None:
            if tokenize is not None:
                raise UsageError("--score-tokenize needs --score; add --score REF")
            return None
        references = read_text_file(path).split("\n")
        references = references[:-1] if references[-1] == "" else references
        scores = TranslationScores(path, [line.rstrip("\r") for line in references], tokenize)
        score_translations(
            ["a"], ["a"], scores.tokenize
        )  # raises if sacreBLEU or the tokenizer is missing
        return scores

    @property
    def is_complete(self) -> bool:
        """Whether every hypothesis has a reference."""
        return len(self.hypotheses) == len(self.references)

    @property
    def metrics(self) -> SacreBleuScores:
        """Return BLEU and chrF over all lines."""
        if not self.is_complete:
            fact = (
                f"{pluralise(len(self.hypotheses), 'line')} answered, but {self.path} has "
                f"{len(self.references)}"
            )
            raise UsageError(f"{fact}; give one reference per line")
        return score_translations(self.hypotheses, self.references, self.tokenize)

    @property
    def data(self) -> dict[str, Any]:
        """Scores as plain values."""
        return asdict(self.metrics)

    def __str__(self) -> str:
        metrics = self.metrics
        bleu = (
            f"{metrics.bleu:6.2f}"
            if metrics.bleu is not None
            else "not computed, no reference has four tokens"
        )
        return "\n".join(
            [
                f"BLEU {bleu}   {metrics.bleu_signature}",
                f"chrF {metrics.chrf:6.2f}   {metrics.chrf_signature}",
            ]
        )


MAX_CLASSES_SHOWN = 5  # classes printed for a single input; for lines of stdin, one
BAR_WIDTH = 40  # columns of a bar for probability 1
MAX_TOKENS_SHOWN = 5  # tokens printed for each mask


def answer_classes(model: Transformer, args: Any) -> int:
    """Print the likeliest classes of TEXT with their probabilities, or one line for each line of
    stdin.
    """
    names = require_class_names(model)
    if args.top_k is not None and not 1 <= args.top_k <= len(names):
        raise UsageError(
            f"--top-k {args.top_k} is not between 1 and the {len(names)} classes; give "
            f"1..{len(names)}"
        )
    inputs = make_input_reader(model)
    answered = list[InputLine[Any]]()
    if args.text is not None:
        predictions = classify(model, *inputs.collate([inputs.read(args.text)]))[0][
            : args.top_k or MAX_CLASSES_SHOWN
        ]
        print_page(
            to_json(_classes_to_dict(model, [InputLine(1, args.text, predictions)]))
            if args.json
            else _format_classes(predictions)
        )
        return 0
    lines = InputLines(args.batch)
    for batch in lines:
        ready = lines.read(batch, inputs.read)
        results = classify(model, *inputs.collate([line.read for line in ready])) if ready else []
        for line, predictions in zip(ready, results, strict=True):
            line.read = predictions[: args.top_k or 1]
        answered += batch if args.json else []
        for line in batch if not args.json else ():
            print_page("\t".join(f"{guess.name}\t{guess.share:.4f}" for guess in line.read or ()))
    if args.json:
        print_page(to_json(_classes_to_dict(model, answered)))
    return 2 if lines.num_failed else 0


def _format_classes(predictions: Sequence[Prediction]) -> str:
    width = max(len(guess.name) for guess in predictions)
    return "\n".join(
        f"{name:<{width}}  {share:6.1%}  {'█' * round(BAR_WIDTH * share)}".rstrip()
        for name, share in predictions
    )


def _classes_to_dict(model: Transformer, lines: Sequence[InputLine[Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        result = (
            {"error": line.error}
            if line.error
            else {"classes": [guess._asdict() for guess in line.read or ()]}
        )
        rows.append({"line": line.number, "input": line.text, **result})
    return {"model": model.spec.name, "answers": rows}


def answer_masks(model: Transformer, args: Any) -> int:
    """Print the likeliest tokens for each mask of TEXT, or every line of stdin with its masks
    filled in.
    """
    top = MAX_TOKENS_SHOWN if args.top_k is None else args.top_k
    if args.text is not None:
        filled = fill_masks(model, [args.text], top=top)[0]
        line = InputLine(1, args.text, filled)
        print_page(to_json(_masks_to_dict(model, [line])) if args.json else _format_masks(filled))
        return 0
    lines = InputLines(args.batch)
    answered = list[InputLine[Any]]()
    for batch in lines:
        lines.read(batch, lambda text: fill_masks(model, [text], top=top)[0])
        answered += batch if args.json else []
        for line in batch if not args.json else ():
            print_page(line.read.text if line.read else "")
    if args.json:
        print_page(to_json(_masks_to_dict(model, answered)))
    return 2 if lines.num_failed else 0


def _format_masks(filled: FilledText) -> str:
    lines = [filled.text]
    for number, predictions in enumerate(filled.predictions, 1):
        width = max(len(guess.name) for guess in predictions)
        lines += ["", f"mask {number}"] if len(filled.predictions) > 1 else [""]
        lines += [f"  {name:<{width}}  {share:6.1%}" for name, share in predictions]
    return "\n".join(lines)


def _masks_to_dict(model: Transformer, lines: Sequence[InputLine[Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        result: dict[str, Any] = {"error": line.error} if line.error else {}
        if line.read:
            result = {
                "text": line.read.text,
                "masks": [
                    [guess._asdict() for guess in predictions]
                    for predictions in line.read.predictions
                ],
            }
        rows.append({"line": line.number, "prompt": line.text, **result})
    return {"model": model.spec.name, "answers": rows}
