"""What a model says behind prompts: all of it, or as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError
from ..models.transformer import Transformer
from ..ops.counter_rng import RandomStream
from .beam_search import BeamHypothesis, run_beam_search
from .compiled_step import CompileReporter, ignore_decision
from .decoding_config import DEFAULT_DECODING, DecodingConfig, check_decoding
from .decoding_state import DecodingState, TokenChooser, eval_mode, require_language_model, run_decode_steps
from .prompts import PromptBatch, parse_prompts, prepare_decoder_input
from .sampling import TokenHistory, sample_tokens
from .text_output import Completion, IncrementalDetokenizer, load_tokenizers

SeedOrSeeds = int | Sequence[int] | None
STEPS_FINISHED = object()  # behind the last step


class GenerationOutput(NamedTuple):
    """An answer: its ids, its text where there is a tokenizer, and its score if several were followed."""

    ids: list[int]
    text: str | None = None
    score: float | None = None


def generate(
    model: Transformer,
    ids_or_text: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    seed: SeedOrSeeds = None,
) -> Any:
    """What a model says behind a prompt: new ids behind ids, text behind text, and a list of either for a list.

    What is read is a text to go on from; or, where a second stack answers, the source. Ids are read as they are, text
    between what the model's usage says stands around it; special ids end an answer and are not told. At temperature 0
    every token is the likeliest. Else they are drawn: row n of a batch from stream n of one seed, or a list of seeds
    says for each row which stream 0 it draws from, as it would alone. With how=Decoding(best=...) each answer is a
    list, best first.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 8}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> first, second = generate(net, [[3, 1, 4], [1]], max_new_tokens=5)
    >>> len(first), generate(net, [1], max_new_tokens=5) == second
    (5, True)
    >>> generate(net, [3, 1, 4], max_new_tokens=9)
    Traceback (most recent call last):
    ValueError: 3 tokens and 9 new ones are 3 more than the 8 positions of gpt2 can take; ask for at most 6 new ...
    """
    asked = TextGenerator.of(model, max_new_tokens, temperature, config)
    given = parse_prompts(model, ids_or_text, config.window)
    found = asked.answers(given, make_random_streams(seed, len(given.rows)) if temperature else ())
    said = [[one.text if given.kind == "text" else one.ids for one in best] for best in found]
    plain = [best if config.best > 1 else best[0] for best in said]
    return plain[0] if given.form == "alone" else plain


def stream(
    model: Transformer,
    ids_or_text: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    seed: SeedOrSeeds = None,
) -> Iterator[Any]:
    """What `generate` says behind one prompt, as it comes: ids, or pieces of text that stay whatever follows.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 8}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> list(stream(net, [3, 1, 4], max_new_tokens=5)) == generate(net, [3, 1, 4], max_new_tokens=5)
    True
    """
    asked = TextGenerator.of(model, max_new_tokens, temperature, config)
    given = parse_prompts(model, ids_or_text, config.window)
    if given.form == "together":
        raise ValueError(f"{len(given.rows)} prompts cannot be told as they come; give one, or call generate")
    if config.beams > 1:
        raise SpecError(f"beams={config.beams} are decided at the end; call generate, or give beams=1")
    return asked.pieces(given, make_random_streams(seed, 1) if temperature else ())


def make_random_streams(seed: SeedOrSeeds, count: int, first_row: int = 0) -> list[RandomStream]:
    """What each of so many rows draws from; without a seed, one from torch's own generator.

    >>> [row.number for row in make_random_streams(7, 2)], [row.seed for row in make_random_streams([7, 5], 2)]
    ([0, 1], [7, 5])
    """
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [RandomStream(seed, first_row + n) for n in range(count)]
    told = list(seed) if isinstance(seed, (list, tuple, range)) else []
    if len(told) != count or not all(isinstance(one, int) and not isinstance(one, bool) for one in told):
        raise SpecError(f"seed={seed!r} is no seed for {count} rows; give a whole number, or one for each row")
    return [RandomStream(one) for one in told]


@dataclass(frozen=True)
class TextGenerator:
    """A model, and how it is to answer; `tell` hears whether steps are compiled, and why, whenever texts are begun."""

    net: Transformer
    count: int
    temperature: float
    how: DecodingConfig
    tell: CompileReporter = ignore_decision

    @staticmethod
    def of(
        net: Transformer,
        max_new_tokens: int,
        temperature: float,
        config: DecodingConfig,
        report_compile: CompileReporter = ignore_decision,
    ) -> TextGenerator:
        """The same, if it can be meant."""
        if not isinstance(net, Transformer):
            raise ValueError(f"model is of type {type(net).__name__}; give what hw.build or hw.load returned")
        check_decoding(config, temperature, require_language_model(net.spec))
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens!r} cannot be; give a whole number of at least 1")
        return TextGenerator(net, max_new_tokens, temperature, config, report_compile)

    @property
    def ends(self) -> frozenset[int]:
        """The ids that an answer stops before."""
        return self.how.ends(self.net.usage.end)

    def answers(self, prompts: PromptBatch, streams: Sequence[RandomStream] = ()) -> list[list[GenerationOutput]]:
        """The answers to each prompt, best first."""
        found = [self.answer(prompts.kind, row) for row in prompts.rows]
        with eval_mode(self.net):
            course = self._start_decoding(prompts)
            if self.how.beams > 1:
                return self._beam_search(course, prompts)
            for _ in run_decode_steps(course, self._make_chooser(course, streams), found, self.count):
                pass
        return [[_make_output(answer, prompts.kind)] for answer in found]

    def pieces(self, prompts: PromptBatch, streams: Sequence[RandomStream] = ()) -> Iterator[Any]:
        """The answer to one prompt, as it comes."""
        answer = self.answer(prompts.kind, prompts.rows[0])
        with eval_mode(self.net):
            course = self._start_decoding(prompts)
        return self._iter_pieces(
            answer, prompts.kind, run_decode_steps(course, self._make_chooser(course, streams), [answer], self.count)
        )

    def _iter_pieces(self, answer: Completion, kind: str, going: Iterator[None]) -> Iterator[Any]:
        while True:
            with eval_mode(self.net):  # and not while whoever reads does something else with it
                last = next(going, STEPS_FINISHED)
            if kind == "ids":
                yield from answer.take_new_ids()
            elif piece := answer.take_new_text():
                yield piece
            if last is STEPS_FINISHED:
                return

    def _start_decoding(self, given: PromptBatch) -> DecodingState:
        prompt = prepare_decoder_input(self.net, given.rows, next(self.net.parameters()).device)
        told = {"sequence": prompt.tokens, "encoder_output": prompt.memory, "config": self.how}
        course = DecodingState(self.net, prompt.ids, max_new_tokens=self.count, **told)
        self.tell(course.choice)
        return course

    def _make_chooser(self, course: DecodingState, streams: Sequence[RandomStream]) -> TokenChooser:
        """Each row draws from the stream of its prompt."""

        def choose(logits: Tensor, past: TokenHistory) -> list[int]:
            own = [streams[row] for row in course.rows] if streams else ()
            return sample_tokens(logits, past, temperature=self.temperature, config=self.how, streams=own)

        return choose

    def answer(self, kind: str, prompt: list[int]) -> Completion:
        """An answer that is still empty; where ids are asked for, text matters only if it may stop them."""
        if kind == "ids" and not self.how.words:
            return Completion(self.ends)
        before = prompt if self.net.spec.kind == "decoder" else ()
        return Completion(self.ends, self.how.words, IncrementalDetokenizer(load_tokenizers(self.net)[1], before))

    def _beam_search(self, course: DecodingState, given: PromptBatch) -> list[list[GenerationOutput]]:
        ends, stops = self.ends, self.how.words
        words = load_tokenizers(self.net)[1] if stops else None

        def ended(ids: Sequence[int]) -> bool:
            return ids[-1] in ends or (words is not None and any(stop in words.text(ids) for stop in stops))

        found = run_beam_search(course, self.how, ends, ended)
        return [
            [self._beam_output(one, given.kind, row) for one in best]
            for best, row in zip(found, given.rows, strict=True)
        ]

    def _beam_output(self, one: BeamHypothesis, kind: str, prompt: list[int]) -> GenerationOutput:
        answer = self.answer(kind, prompt)
        for token in one.ids:
            answer.take(token)
        answer.close()
        return _make_output(answer, kind)._replace(score=one.value)


def _make_output(answer: Completion, kind: str) -> GenerationOutput:
    return GenerationOutput(answer.ids, answer.text if kind == "text" else None)
