"""The JSON of completions, of their chunks in a stream, and of errors."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

    def chunk(self, index: int, text: str, ended: str = "", *, is_first: bool = False) -> bytes:
        """One event of a stream: new text of one output, or its end."""
        finish_reason = FINISH_REASONS[ended] if ended else None
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            choice["delta"] = {} if ended else {**role, "content": text}
        else:
            choice["text"] = text
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def usage_chunk(self, usage: dict[str, int]) -> bytes:
        """The last event before the end of a stream that was asked for usage."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})

    def _head(self, chat_object: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", chat_object) if self.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _text_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None if choice.scores is None else _text_logprobs(choice.scores)
        reason = FINISH_REASONS[choice.ended]
        return {"index": choice.index, "text": choice.text, "finish_reason": reason, "logprobs": logprobs}

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None if choice.scores is None else {"content": [_chat_logprob(score) for score in choice.scores]}
        message = {"role": "assistant", "content": choice.text}
        reason = FINISH_REASONS[choice.ended]
        return {"index": choice.index, "message": message, "finish_reason": reason, "logprobs": logprobs}


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
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _text_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    offsets = [0]
    for score in scores[:-1]:
        offsets.append(offsets[-1] + len(score.text))
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [dict(score.top) if score.logprob is not None else None for score in scores],
        "text_offset": offsets,
    }


def _chat_logprob(score: TokenScore) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in score.top]
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.text.encode()), "top_logprobs": top}
