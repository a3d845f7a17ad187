"""One request on the engine: its outputs as they arrive, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..generation import make_random_streams
from ..generation.prompts import parse_prompts
from ..generation.text_output import IncrementalDetokenizer, ModelTokenizer
from ..generation.token_scores import TokenScore, describe_token, score_tokens
from ..serving import Engine, RequestStream
from .answers import Choice, TextDelta
from .request_fields import FieldError, GenerationFields

Prompt = str | list[int]


class GenerationJob:
    """The outputs of one request: `num_choices` for each prompt, numbered through."""

    def __init__(
        self, engine: Engine, tokenizer: ModelTokenizer, prompts: Sequence[Prompt], fields: GenerationFields
    ) -> None:
        self.engine, self.tokenizer, self.fields = engine, tokenizer, fields
        self.prompts = [prompt for prompt in prompts for _ in range(fields.num_choices)]
        self.rows = [parse_prompts(engine.net, prompt).rows[0] for prompt in self.prompts]
        if fields.echo and self._is_translation:
            raise FieldError("echo", "echo is for models that continue a text, and this one translates; leave it out")
        self.streams: list[RequestStream] = []
        try:
            for prompt, numbers in zip(self.prompts, make_random_streams(fields.seed, len(self.prompts)), strict=True):
                if fields.max_tokens:
                    self.streams.append(
                        engine.submit(
                            prompt,
                            max_new_tokens=fields.max_tokens,
                            temperature=fields.temperature,
                            config=fields.config,
                            seed=numbers,
                            top_logprobs=fields.top_logprobs,
                        )
                    )
        except ValueError:
            self.cancel()
            raise

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts, each counted once."""
        return sum(len(row) for row in self.rows[:: self.fields.num_choices])

    @property
    def num_output_tokens(self) -> int:
        """The tokens of all outputs so far."""
        return sum(len(stream.ids) for stream in self.streams)

    def choices(self) -> list[Choice]:
        """Wait for all outputs."""
        return [self._choice(index) for index in range(len(self.prompts))]

    def pump(self, index: int, send: Callable[[TextDelta | Exception], object]) -> None:
        """Send the text of one output as it arrives, then its end, or the error that ended it."""
        stream, detokenizer = self.streams[index], self._make_detokenizer(index)
        num_sent, scores, offset = 0, list[TokenScore](), 0
        is_scored = self.fields.top_logprobs is not None
        try:
            for number, token_id in enumerate(stream):
                score = describe_token(detokenizer, token_id, stream.logprobs[number] if is_scored else None)
                scores.append(score)
                if len(detokenizer.text) > num_sent:
                    text = detokenizer.text[num_sent:]
                    send(TextDelta(index, text, scores=scores if is_scored else None, offset=offset))
                    num_sent, scores, offset = len(detokenizer.text), [], len(detokenizer.text)
            rest = scores if is_scored and scores else None
            send(TextDelta(index, self._output_text(index)[num_sent:], stream.ended, rest, offset))
        except Exception as error:  # of the model: the client is told, the server goes on
            send(error)

    def cancel(self) -> None:
        """End the outputs that still run."""
        for stream in self.streams:
            if not stream.ended:
                stream.cancel()

    @property
    def _is_translation(self) -> bool:
        return self.engine.net.spec.kind == "encoder-decoder"

    def _choice(self, index: int) -> Choice:
        if not self.streams:
            text, ids, ended = "", list[int](), "length"
        else:
            self.streams[index].result()
            text, ids, ended = self._output_text(index), self.streams[index].ids, self.streams[index].ended
        scores = None if self.fields.top_logprobs is None else self._scores(index, ids, self.fields.top_logprobs)
        if self.fields.echo:
            prompt = self.prompts[index]
            text = (prompt if isinstance(prompt, str) else self.tokenizer.text(prompt)) + text
        return Choice(index, text, ended, len(ids), scores)

    def _scores(self, index: int, ids: Sequence[int], num_top: int) -> list[TokenScore]:
        """The scores of an output, recorded while it was decoded; those of an echoed prompt need a pass over it."""
        row, scores = self.rows[index], list[TokenScore]()
        if self.fields.echo:
            scores += score_tokens(self.engine.net, self.tokenizer, row, 0, num_top)
        detokenizer = self._make_detokenizer(index)
        logprobs = self.streams[index].logprobs if self.streams else []
        return scores + [describe_token(detokenizer, *pair) for pair in zip(ids, logprobs, strict=True)]

    def _make_detokenizer(self, index: int) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer, [] if self._is_translation else self.rows[index])

    def _output_text(self, index: int) -> str:
        """The text of an output; the engine knows it where the prompt was a text."""
        stream = self.streams[index]
        if isinstance(self.prompts[index], str):
            return stream.text
        detokenizer = self._make_detokenizer(index)
        for token_id in stream.ids:
            detokenizer.append(token_id)
        detokenizer.close()
        return detokenizer.text
