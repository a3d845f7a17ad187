"""Script of a process that renders a chat template for `request_fields`; it imports nothing of headwise.

It reads the template as one line of JSON, then the variables of one rendering a line, and answers each with one line. A
template can take any time and memory, also while it is compiled, so both happen here.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 2**30


def compile_template(text: str) -> Template:
    """Return the template with the functions that transformers gives to chat templates, in Jinja's sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json
    return environment.from_string(text)


def raise_exception(message: str) -> NoReturn:
    """Refuse the messages."""
    raise TemplateError(message)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON that is not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def answer_request(text: str, variables: dict[str, Any] | None) -> dict[str, str]:
    """Return the rendered template, or what is wrong; without variables, the template is only compiled."""
    try:
        template = compile_template(text)
        return {"text": "" if variables is None else template.render(variables)}
    except MemoryError:
        return {"panic": f"it needs more than {MAX_MEMORY_BYTES // 2**20:,} MiB"}
    except RecursionError:
        return {"panic": "it is nested too deeply"}
    except Exception as error:  # a template may raise anything
        return {"panic": str(error) or type(error).__name__}


def main() -> None:
    """Answer requests until stdin is closed."""
    with suppress(ImportError):  # Windows cannot limit the memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    text = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer_request(text, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
