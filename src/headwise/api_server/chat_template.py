"""The prompt of a conversation, by the chat template of a model folder.

Templates are Jinja texts that come with a checkpoint. They run in Jinja's sandbox, which keeps them from reaching
anything but their arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .request_fields import ChatMessage, FieldError

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
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ValueError(f"the chat template of the model is not valid: {error}; correct {TEMPLATE_FILE}") from None
        self._special_tokens = special_tokens or {}

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, which ends where the assistant's answer begins."""
        from jinja2.exceptions import TemplateError

        listed = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=listed, add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, TypeError, ArithmeticError) as error:
            raise FieldError("messages", f"the chat template of the model refuses these messages: {error}") from None


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


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
