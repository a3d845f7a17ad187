"""One request on the engine: its outputs as they arrive, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..generation import make_random_streams
from ..generation.prompts import parse_prompts
from ..generation.text_output import IncrementalDetokenizer, ModelTokenizer
from ..generation.token_scores import score_tokens
from ..models import Transformer
from ..serving import Engine, RequestStream
from .answers import Choice
from .request_fields import FieldError, GenerationFields

Prompt = str | list[int]


@dataclass(frozen=True)
class TextDelta:
    """New text of one output; `ended` says how it ended, and is empty before."""

    index: int
    text: str
    ended: str = ""


class GenerationJob:
    """The outputs of one request: `num_choices` for each prompt, numbered through."""

    def __init__(
        self, engine: Engine, tokenizer: ModelTokenizer, prompts: Sequence[Prompt], fields: GenerationFields
    ) -> None:
        self.engine, self.tokenizer, self.fields = engine, tokenizer, fields
        self.prompts = [prompt for prompt in prompts for _ in range(fields.num_choices)]
        self.rows = [parse_prompts(engine.net, prompt).rows[0] for prompt in self.prompts]
        if (fields.echo or fields.top_logprobs is not None) and self._is_translation:
            name = "echo" if fields.echo else "logprobs"
            raise FieldError(name, f"{name} is for models that continue a text, and this one translates; leave it out")
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
        stream = self.streams[index]
        context = [] if self._is_translation else self.rows[index]
        detokenizer, num_sent = IncrementalDetokenizer(self.tokenizer, context), 0
        try:
            for token_id in stream:
                detokenizer.append(token_id)
                if len(detokenizer.text) > num_sent:
                    send(TextDelta(index, detokenizer.text[num_sent:]))
                    num_sent = len(detokenizer.text)
            send(TextDelta(index, self._output_text(index)[num_sent:], stream.ended))
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
        row, scores = self.rows[index], None
        if self.fields.top_logprobs is not None:
            first = 0 if self.fields.echo else len(row)
            scores = score_tokens(self._net, self.tokenizer, [*row, *ids], first, self.fields.top_logprobs)
        if self.fields.echo:
            prompt = self.prompts[index]
            text = (prompt if isinstance(prompt, str) else self.tokenizer.text(prompt)) + text
        return Choice(index, text, ended, len(ids), scores)

    @property
    def _net(self) -> Transformer:
        return self.engine.net

    def _output_text(self, index: int) -> str:
        """The text of an output; the engine knows it where the prompt was a text."""
        stream = self.streams[index]
        if isinstance(self.prompts[index], str):
            return stream.text
        detokenizer = IncrementalDetokenizer(self.tokenizer, [] if self._is_translation else self.rows[index])
        for token_id in stream.ids:
            detokenizer.append(token_id)
        detokenizer.close()
        return detokenizer.text
