"""The JSON of completions, of their chunks in a stream, and of errors."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ..escaping import shorten_message
from ..generation.token_scores import TokenScore

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
