"""The outputs of one request on the engine, and the JSON of completions, of their chunks in a stream and of errors."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ..escaping import shorten_message
from ..generation import make_random_streams
from ..generation.prompts import parse_prompts
from ..generation.text_output import IncrementalDetokenizer, ModelTokenizer, TokenScore, describe_token, score_tokens
from ..serving import Engine, RequestStream
from .request_fields import FieldError, GenerationFields

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class Choice(NamedTuple):
    """One finished output."""

    index: int
    text: str
    ended: str
    num_tokens: int
    scores: Sequence[TokenScore] | None = None


@dataclass(frozen=True)
class TextDelta:
    """New text of one output; `ended` says how it ended, and is empty before.

    `scores` are those of its tokens, if they were asked for; they begin `offset` characters into the output.
    """

    index: int
    text: str
    ended: str = ""
    scores: Sequence[TokenScore] | None = None
    offset: int = 0


@dataclass(frozen=True)
class AnswerFormat:
    """Makes the answers to one request: a completion, or a message of a chat."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        usage = make_usage(num_prompt_tokens, sum(choice.num_tokens for choice in choices))
        choice_documents = [
            self._chat_choice(choice) if self.is_chat else self._text_choice(choice) for choice in choices
        ]
        return {**self._head("chat.completion"), "choices": choice_documents, "usage": usage}

    def chunk(self, delta: TextDelta, *, is_first: bool = False) -> bytes:
        """One event of a stream: new text of one output."""
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": None}
        choice["logprobs"] = self._logprobs(delta.scores, delta.offset)
        if self.is_chat:
            choice["delta"] = {**({"role": "assistant"} if is_first else {}), "content": delta.text}
        else:
            choice["text"] = delta.text
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def end_chunk(self, delta: TextDelta) -> bytes:
        """The event that says how an output ended."""
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": FINISH_REASONS[delta.ended], "logprobs": None}
        choice |= {"delta": {}} if self.is_chat else {"text": ""}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def usage_chunk(self, usage: dict[str, int]) -> bytes:
        """The last event before the end of a stream that was asked for usage."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})

    def _head(self, chat_object: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", chat_object) if self.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _text_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs, reason = self._logprobs(choice.scores), FINISH_REASONS[choice.ended]
        return {"index": choice.index, "text": choice.text, "finish_reason": reason, "logprobs": logprobs}

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs, reason = self._logprobs(choice.scores), FINISH_REASONS[choice.ended]
        message = {"role": "assistant", "content": choice.text}
        return {"index": choice.index, "message": message, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, scores: Sequence[TokenScore] | None, offset: int = 0) -> dict[str, Any] | None:
        if scores is None:
            return None
        return {"content": list(map(_chat_logprob, scores))} if self.is_chat else _text_logprobs(scores, offset)


def make_usage(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """How many tokens were read and written."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def make_error(message: str, *, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of a refused request."""
    kind = "invalid_request_error" if code != "internal_error" else "server_error"
    return {"error": {"message": shorten_message(message), "type": kind, "param": field, "code": code}}


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _text_logprobs(scores: Sequence[TokenScore], offset: int) -> dict[str, Any]:
    offsets = list(accumulate((len(score.text) for score in scores), initial=offset))[: len(scores)]
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [dict(score.top) if score.logprob is not None else None for score in scores],
        "text_offset": offsets,
    }


def _chat_logprob(score: TokenScore) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in score.top]
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.text.encode()), "top_logprobs": top}


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
