"""The fields of a request, read from its JSON and checked, and the prompts of conversations.

Field names, defaults and types are those of OpenAI's HTTP interface (platform.openai.com/docs/api-reference), with
`top_k`, `min_p`, `repetition_penalty` and `structured_outputs` as vLLM has them. Fields that would change the answer
and are not supported are refused; fields that describe the caller are ignored.

The prompt of a conversation is made by the chat template of a model folder, a Jinja text that comes with a checkpoint.
It runs in Jinja's sandbox, which keeps it from reaching anything but its arguments, and in a process of its own, with
limits of time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..data.tokenizer_calls import TokenizerProcess
from ..errors import suggest
from ..generation.decoding_config import MIN_TEMPERATURE, DecodingConfig
from ..size_limits import MAX_INTEGER, show_int

MAX_PROMPTS = 64
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 1 << 24  # of one output
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields that change answers and are not supported, with the values that change nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
}
COMMON_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "n",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "response_format",
    "structured_outputs",
)
COMPLETION_FIELDS = (*COMMON_FIELDS, "prompt", "max_tokens", "echo")
CHAT_FIELDS = (*COMMON_FIELDS, "messages", "max_tokens", "max_completion_tokens", "top_logprobs")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
DEFAULT_TOKENS = 16
DEFAULT_CHAT_TOKENS = 512


class FieldError(ValueError):
    """A field that is missing, unknown or out of range; `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class GenerationFields:
    """Fields of both kinds of requests. `top_logprobs` is None for no log-probabilities."""

    max_tokens: int
    temperature: float
    config: DecodingConfig
    num_choices: int
    seed: int | None
    is_streamed: bool
    has_usage_chunk: bool
    top_logprobs: int | None
    echo: bool = False


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


def read_completion_fields(body: Mapping[str, Any]) -> tuple[list[str | list[int]], GenerationFields]:
    """The prompts of a completion request, and what it asks for.

    >>> prompts, fields = read_completion_fields({"prompt": "Once", "max_tokens": 3, "temperature": 0})
    >>> prompts, fields.max_tokens, fields.temperature
    (['Once'], 3, 0.0)
    """
    reader = _FieldReader(body, COMPLETION_FIELDS)
    top = reader.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
    echo = reader.boolean("echo")
    least = 0 if echo else 1  # an echoed prompt may be all that is wanted
    max_tokens = reader.integer("max_tokens", DEFAULT_TOKENS, least, MAX_TOKENS)
    assert max_tokens is not None
    return _read_prompts(body), reader.generation(max_tokens, top, echo)


def read_chat_fields(body: Mapping[str, Any]) -> tuple[list[ChatMessage], GenerationFields]:
    """The messages of a chat request, and what it asks for."""
    reader = _FieldReader(body, CHAT_FIELDS)
    older = reader.integer("max_tokens", None, 1, MAX_TOKENS)
    max_tokens = reader.integer("max_completion_tokens", older or DEFAULT_CHAT_TOKENS, 1, MAX_TOKENS)
    top = reader.integer("top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if reader.boolean("logprobs"):
        top = top or 0
    elif top is not None:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs=true; give both, or neither")
    assert max_tokens is not None
    return _read_messages(body), reader.generation(max_tokens, top, False)


class _FieldReader:
    """Reads the fields of one request."""

    def __init__(self, body: Mapping[str, Any], names: Sequence[str]) -> None:
        self.body = body
        for name, value in body.items():
            if name in UNSUPPORTED:
                if value not in UNSUPPORTED[name]:
                    raise FieldError(name, f"{name} is not supported; leave it out")
            elif name not in names and name not in IGNORED:
                raise FieldError(name, f"there is no field {name!r}; {suggest(name, names)}")

    def integer(self, name: str, default: int | None, least: int, most: int = MAX_INTEGER) -> int | None:
        """An integer, or the default where the field is absent or null."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            limits = f"of at least {least}" if most == MAX_INTEGER else f"from {least} to {most}"
            shown = show_int(value) if isinstance(value, int) else repr(value)
            raise FieldError(name, f"{name}={shown}: give an integer {limits}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number, or the default."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise FieldError(name, f"{name}={value!r} is not a number; give {default:g}, for example")
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false; absent and null are false."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise FieldError(name, f"{name}={value!r}: give true or false")
        return bool(value)

    def generation(self, max_tokens: int, top_logprobs: int | None, echo: bool) -> GenerationFields:
        """The fields that both kinds of requests have."""
        temperature = self.number("temperature", 1.0)
        if not 0 <= temperature <= 2:
            raise FieldError("temperature", f"temperature={temperature:g}: give a number from 0 to 2")
        num_choices = self.integer("n", 1, 1, MAX_CHOICES)
        options = self.body.get("stream_options")
        if options is not None and not isinstance(options, Mapping):
            raise FieldError("stream_options", 'stream_options is not an object; give {"include_usage": true}')
        is_streamed = self.boolean("stream")
        if is_streamed and echo:
            raise FieldError("echo", "echo is not supported in streams; leave out stream, or echo")
        assert num_choices is not None
        return GenerationFields(
            max_tokens=max_tokens,
            temperature=temperature,
            config=self._decoding_config(temperature),
            num_choices=num_choices,
            seed=self.integer("seed", None, 0, 2**63 - 1),
            is_streamed=is_streamed,
            has_usage_chunk=bool(options and options.get("include_usage")),
            top_logprobs=top_logprobs,
            echo=echo,
        )

    def _decoding_config(self, temperature: float) -> DecodingConfig:
        stops = self.body.get("stop")
        stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise FieldError("stop", f"stop={stops!r}: give a text that is not empty, or a list of such texts")
        # Clients send top_p=1 with temperature=0, where nothing is sampled.
        top_p, min_p = self.number("top_p", 1.0), self.number("min_p", 0.0)
        top_k = self.integer("top_k", None, -1)
        filters: dict[str, Any] = {}
        if temperature >= MIN_TEMPERATURE:
            filters = {"top_p": top_p if top_p != 1 else None, "min_p": min_p or None}
            filters["top_k"] = top_k if top_k is not None and top_k > 0 else None
        filters |= self._constraint()
        try:
            return DecodingConfig(stop=tuple(stops), repetition=self.number("repetition_penalty", 1.0), **filters)
        except ValueError as error:
            raise FieldError(str(error).split()[0], str(error)) from None

    def _constraint(self) -> dict[str, str]:
        """The regular expression or JSON schema of the output, as fields of `DecodingConfig`."""
        form, outputs = self.body.get("response_format"), self.body.get("structured_outputs")
        form_fields: Mapping[str, Any] = form if isinstance(form, Mapping) else {}
        kind = form_fields.get("type")
        if form is not None and kind not in RESPONSE_FORMATS:
            raise FieldError(
                "response_format", f"response_format={form!r}: give a type of {', '.join(RESPONSE_FORMATS)}"
            )
        if outputs is not None and not (isinstance(outputs, Mapping) and len(outputs.keys() & {"regex", "json"}) == 1):
            example = '{"regex": "[0-9]+"}, or {"json": {"type": "object"}}'
            raise FieldError("structured_outputs", f"structured_outputs={outputs!r}: give {example}")
        if outputs is not None and kind not in (None, "text"):
            raise FieldError("structured_outputs", "response_format and structured_outputs exclude each other")
        if outputs is not None and "regex" in outputs:
            return {"regex": outputs["regex"]}
        if outputs is not None:
            return {"json_schema": _schema_text(outputs["json"], "structured_outputs")}
        if kind == "json_schema":
            wrapper = form_fields.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
            return {"json_schema": _schema_text(schema, "response_format")}
        return {"json_schema": '{"type": "object"}'} if kind == "json_object" else {}


def _schema_text(schema: Any, field: str) -> str:
    """A JSON schema as text; clients send it as an object, or as its text."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        raise FieldError(field, f"the schema of {field} is missing; give an object such as {{'type': 'object'}}")
    return json.dumps(schema)


def _read_prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    prompt = body.get("prompt")
    items: list[Any] = prompt if isinstance(prompt, list) and prompt and not _is_ids(prompt) else [prompt]
    if len(items) > MAX_PROMPTS:
        raise FieldError("prompt", f"prompt has {len(items)} items; give at most {MAX_PROMPTS}")
    prompts: list[str | list[int]] = []
    for item in items:
        if not (isinstance(item, str) or _is_ids(item)) or not item:
            _refuse_prompt(item)
        prompts.append(item)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _refuse_prompt(item: Any) -> NoReturn:
    kind = "missing" if item is None else "empty" if item in ("", []) else f"of type {type(item).__name__}"
    raise FieldError("prompt", f"the prompt is {kind}; give a text, token ids such as [3, 1, 4], or a list of either")


def _read_messages(body: Mapping[str, Any]) -> list[ChatMessage]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", 'messages is empty or missing; give [{"role": "user", "content": "Hello"}]')
    return [_read_message(number, message) for number, message in enumerate(messages)]


def _read_message(number: int, message: Any) -> ChatMessage:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):  # parts of one text
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(part for part in parts if isinstance(part, str)) if None not in parts else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise FieldError("messages", f"messages[{number}] needs a role and a text as its content")
    return ChatMessage(role, content)


TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
MAX_TEMPLATE_BYTES = 2**20


class ChatTemplate:
    """Turns messages into a prompt.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    >>> template.render([ChatMessage("user", "Hello")])
    '<user>Hello<assistant>'
    """

    def __init__(self, text: str, special_tokens: dict[str, str] | None = None) -> None:
        self._process, self._special_tokens = _TemplateProcess(text), special_tokens or {}
        try:
            self._process.render(None)
        except ValueError as error:
            raise ValueError(f"the chat template of the model is not valid: {error}; correct {TEMPLATE_FILE}") from None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt, which ends where the assistant's answer begins."""
        listed = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._process.render({"messages": listed, "add_generation_prompt": True, **self._special_tokens})
        except ValueError as error:
            raise FieldError("messages", f"the chat template of the model refuses these messages: {error}") from None


class _TemplateProcess(TokenizerProcess):
    """Renders a template in a process with limits of time and memory."""

    worker = Path(__file__).with_name("chat_template_worker.py")

    def render(self, variables: Mapping[str, Any] | None) -> str:
        """Return the text; raises ValueError with the reason if there is none."""
        with self._lock:
            answer = self._answer(variables)
        if "panic" in answer:
            raise ValueError(answer["panic"])
        return answer["text"]


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder; None if it has none."""
    config = _read_config(folder / TOKENIZER_CONFIG)
    text = config.get("chat_template")
    if isinstance(text, list):  # several templates by name
        named = {item.get("name"): item.get("template") for item in text if isinstance(item, dict)}
        text = named.get("default")
    if (path := folder / TEMPLATE_FILE).is_file() and path.stat().st_size <= MAX_TEMPLATE_BYTES:
        text = path.read_text(encoding="utf-8")
    if not isinstance(text, str):
        return None
    tokens = {name: config.get(name) for name in SPECIAL_TOKENS}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return ChatTemplate(text, {name: token for name, token in contents.items() if isinstance(token, str)})


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > 16 * MAX_TEMPLATE_BYTES:
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; give the file that came with the model") from None
    return config if isinstance(config, dict) else {}
