"""Generate text or token ids from prompts: complete outputs (`generate`) or as they arrive
(`stream`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.counter_rng import RandomStream
from ...util.errors import SpecError, pluralise
from ..transformer import Transformer
from .decoding_config import DEFAULT_DECODING, MIN_TEMPERATURE, DecodingConfig, check_decoding
from .decoding_state import (
    DecodingState,
    TokenChooser,
    TokenHistory,
    eval_mode,
    pad_left,
    require_language_model,
    run_decode_steps,
    sample_tokens,
)
from .decoding_strategies import run_beam_search
from .prompts import PromptBatch, get_decoder_start_ids, parse_prompts
from .text_output import Completion, IncrementalDetokenizer, load_tokenizers

STEPS_FINISHED = object()  # marks the end of the iterator of decode steps


class GenerationOutput(NamedTuple):
    """One generated output: its ids, its text if the prompt was text, and its score if beams were
    searched.
    """

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
    seed: int | None = None,
) -> Any:
    """Return the model's continuation of a prompt: new ids for ids, text for text, a list for a
    list of prompts.

    A decoder continues the prompt; an encoder-decoder reads it as its source. Ids are used as they
    are; text is encoded and surrounded by the ids that `model.usage` asks for (`before`, `behind`).
    An output stops before an end id, which is not part of it. Below temperature 1e-5 every token is
    the most likely one, else tokens are sampled: row n of a batch uses random stream n of the seed.
    With `config=DecodingConfig(beams=..., best=...)` and `best` above 1 each output is a list, best
    first.

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "gpt2",
    ...     "n_embd": 8,
    ...     "n_head": 2,
    ...     "n_layer": 1,
    ...     "vocab_size": 11,
    ...     "n_positions": 8,
    ... }
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> first, second = generate(net, [[3, 1, 4], [1]], max_new_tokens=5)
    >>> len(first), generate(net, [1], max_new_tokens=5) == second
    (5, True)
    >>> generate(net, [3, 1, 4], max_new_tokens=9)
    Traceback (most recent call last):
    ValueError: 3 tokens and 9 new are 3 more than the 8 positions of gpt2 can take; ask for at most 6 new...
    """
    generator = TextGenerator.of(model, max_new_tokens, temperature, config)
    prompts = parse_prompts(model, ids_or_text)
    outputs = generator.answers(
        prompts, make_random_streams(seed, len(prompts.rows)) if generator.temperature else ()
    )
    results = list[Any]()
    for best in outputs:
        values = [output.text if prompts.kind == "text" else output.ids for output in best]
        results.append(values if config.best > 1 else values[0])
    return results[0] if prompts.form == "alone" else results


def stream(
    model: Transformer,
    ids_or_text: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    seed: int | None = None,
) -> Iterator[Any]:
    """Iterate over the output of `generate` for one prompt as it arrives: ids, or pieces of text
    that are final.

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "gpt2",
    ...     "n_embd": 8,
    ...     "n_head": 2,
    ...     "n_layer": 1,
    ...     "vocab_size": 11,
    ...     "n_positions": 8,
    ... }
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> list(stream(net, [3, 1, 4], max_new_tokens=5)) == generate(net, [3, 1, 4], max_new_tokens=5)
    True
    """
    generator = TextGenerator.of(model, max_new_tokens, temperature, config)
    prompts = parse_prompts(model, ids_or_text)
    if prompts.form == "together":
        raise ValueError(
            f"cannot stream {len(prompts.rows)} prompts at once; give one, or call generate"
        )
    if config.beams > 1:
        raise SpecError(
            f"cannot stream beams={config.beams}: the best is only known at the end; call generate"
        )
    return generator.pieces(prompts, make_random_streams(seed, 1) if generator.temperature else ())


def make_random_streams(seed: int | None, count: int) -> list[RandomStream]:
    """Return one random stream per row; without a seed, the seed comes from torch's global
    generator.

    >>> [row.number for row in make_random_streams(7, 2)]
    [0, 1]
    """
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise SpecError(
            f"cannot seed {pluralise(count, 'row')} with seed={seed!r}; give an integer"
        )
    return [RandomStream(seed, n) for n in range(count)]


@dataclass(frozen=True)
class TextGenerator:
    """A model and its decoding options."""

    net: Transformer
    count: int
    temperature: float
    how: DecodingConfig

    @staticmethod
    def of(
        net: Transformer,
        max_new_tokens: int,
        temperature: float,
        config: DecodingConfig,
    ) -> TextGenerator:
        """Check the options and return the generator."""
        if not isinstance(net, Transformer):
            raise ValueError(
                f"model is of type {type(net).__name__}; give what hw.build or hw.load returned"
            )
        check_decoding(config, temperature, require_language_model(net.spec))
        if (
            not isinstance(max_new_tokens, int)
            or isinstance(max_new_tokens, bool)
            or max_new_tokens < 1
        ):
            raise ValueError(
                f"max_new_tokens={max_new_tokens!r} is not a token count; give an integer of at "
                "least 1"
            )
        temperature = 0.0 if temperature < MIN_TEMPERATURE else temperature
        return TextGenerator(net, max_new_tokens, temperature, config)

    @property
    def ends(self) -> frozenset[int]:
        """The ids that an output stops before."""
        return self.how.ends(self.net.usage.end)

    def answers(
        self, prompts: PromptBatch, streams: Sequence[RandomStream] = ()
    ) -> list[list[GenerationOutput]]:
        """Return the outputs for each prompt, best first."""
        completions = [self.answer(prompts.kind, row) for row in prompts.rows]
        with eval_mode(self.net):
            state = self._start_decoding(prompts)
            if self.how.beams > 1:
                return self._beam_search(state, prompts)
            for _ in run_decode_steps(
                state, self._make_chooser(state, streams), completions, self.count
            ):
                pass
        return [[_make_output(completion, prompts.kind)] for completion in completions]

    def pieces(self, prompts: PromptBatch, streams: Sequence[RandomStream] = ()) -> Iterator[Any]:
        """Iterate over the output for the first prompt as it arrives."""
        completion = self.answer(prompts.kind, prompts.rows[0])
        with eval_mode(self.net):
            state = self._start_decoding(prompts)
        return self._iter_pieces(
            completion,
            prompts.kind,
            run_decode_steps(state, self._make_chooser(state, streams), [completion], self.count),
        )

    def _iter_pieces(
        self, completion: Completion, kind: str, steps: Iterator[None]
    ) -> Iterator[Any]:
        while True:
            with eval_mode(
                self.net
            ):  # only during the step: between steps the caller may use the model
                last = next(steps, STEPS_FINISHED)
            if kind == "ids":
                yield from completion.take_new_ids()
            elif piece := completion.take_new_text():
                yield piece
            if last is STEPS_FINISHED:
                return

    def _start_decoding(self, prompts: PromptBatch) -> DecodingState:
        """Prefill the prompts, or the decoder's start ids with the encoded prompts as source."""
        net = self.net
        device = next(net.parameters()).device
        ids, sequence = pad_left(prompts.rows, device)
        source = None
        if net.spec.kind == "encoder-decoder":
            start_ids = get_decoder_start_ids(net)
            source = net.encode(ids, sequence=sequence)
            ids, sequence = torch.tensor([start_ids] * len(ids), device=device), None
        return DecodingState(
            net, ids, max_new_tokens=self.count, sequence=sequence, encoder_output=source
        )

    def _make_chooser(self, state: DecodingState, streams: Sequence[RandomStream]) -> TokenChooser:
        """Return a function that picks the next tokens; each row samples from the stream of its
        prompt.
        """

        def choose(logits: Tensor, past: TokenHistory) -> list[int]:
            row_streams = [streams[row] for row in state.rows] if streams else ()
            return sample_tokens(
                logits, past, temperature=self.temperature, config=self.how, streams=row_streams
            )

        return choose

    def answer(self, kind: str, prompt: list[int]) -> Completion:
        """Return an empty completion. For a prompt of ids, text is decoded only if there are stop
        texts.
        """
        if kind == "ids" and not self.how.words:
            return Completion(self.ends)
        context_ids = prompt if self.net.spec.kind == "decoder" else ()
        detokenizer = IncrementalDetokenizer(load_tokenizers(self.net)[1], context_ids)
        return Completion(self.ends, self.how.words, detokenizer)

    def _beam_search(
        self, state: DecodingState, prompts: PromptBatch
    ) -> list[list[GenerationOutput]]:
        ends = self.ends
        stops = self.how.words
        tokenizer = load_tokenizers(self.net)[1] if stops else None

        def is_finished(ids: Sequence[int]) -> bool:
            return ids[-1] in ends or (
                tokenizer is not None and any(stop in tokenizer.text(ids) for stop in stops)
            )

        hypotheses = run_beam_search(state, self.how, ends, is_finished)
        outputs = list[list[GenerationOutput]]()
        for best, row in zip(hypotheses, prompts.rows, strict=True):
            outputs.append([])
            for hypothesis in best:
                completion = self.answer(prompts.kind, row)
                for token in hypothesis.ids:
                    completion.take(token)
                completion.close()
                output = _make_output(completion, prompts.kind)
                outputs[-1].append(output._replace(score=hypothesis.value))
        return outputs


def _make_output(completion: Completion, kind: str) -> GenerationOutput:
    return GenerationOutput(completion.ids, completion.text if kind == "text" else None)
