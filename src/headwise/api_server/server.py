"""The routes of the server, who may call them, and `serve`."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..generation.text_output import load_tokenizers
from ..serving import Engine
from ..size_limits import parse_json
from ..viewer.http_security import ASGIApp, Message, Receive, Send, allowed_hosts, is_loopback
from ..viewer.server import open_socket
from .completions import AnswerFormat, GenerationJob, Prompt, TextDelta, event, make_error, make_usage
from .request_fields import ChatTemplate, FieldError, GenerationFields, read_chat_fields, read_completion_fields

MAX_BODY_BYTES = 8 * 2**20
MAX_OUTPUTS = 64  # that wait or run at once; each one has a thread that waits for its tokens
NO_TEMPLATE = "this model has no chat template; send the prompt to /v1/completions"


@dataclass(frozen=True)
class ServedModel:
    """The model of a server: its name, its engine, and its chat template if it has one."""

    name: str
    engine: Engine
    template: ChatTemplate | None = None


class ApiServer:
    """Answers requests for completions with one model."""

    def __init__(self, model: ServedModel) -> None:
        source_tokenizer, self.tokenizer = load_tokenizers(model.engine.net)
        self.model = model
        self.tokenizer_processes = [
            process for tokenizer in {source_tokenizer, self.tokenizer} for process in tokenizer.isolate()
        ]
        self.num_outputs = 0  # that wait or run
        self.threads = ThreadPoolExecutor(MAX_OUTPUTS, thread_name_prefix="headwise-output")

    def close(self) -> None:
        """End the processes of the tokenizers."""
        for process in self.tokenizer_processes:
            process.close()

    def app(self) -> Starlette:
        """The routes."""
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={404: _refuse_path, 405: _refuse_path, Exception: _report_failure},
        )

    async def health(self, request: Request) -> Response:
        """Whether the server answers."""
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """The served model, as a list of one, or by its name."""
        name = request.path_params.get("name")
        entry = {"id": self.model.name, "object": "model", "created": 0, "owned_by": "headwise"}
        if name is None:
            return JSONResponse({"object": "list", "data": [entry]})
        return JSONResponse(entry) if name == self.model.name else self._unknown_model(name)

    async def metrics(self, request: Request) -> Response:
        """Counters of the engine, as Prometheus reads them."""
        data = self.model.engine.report().data
        values = {
            "headwise_requests_total": ("counter", data["requests"]),
            "headwise_tokens_total": ("counter", data["tokens"]),
            "headwise_prompt_tokens_computed_total": ("counter", data["computed"]),
            "headwise_prompt_tokens_cached_total": ("counter", data["shared"]),
            "headwise_outputs": ("gauge", self.num_outputs),
            "headwise_cache_peak_bytes": ("gauge", data["peak_bytes"]),
            "headwise_cache_budget_bytes": ("gauge", data["budget"]),
        }
        return PlainTextResponse(
            "".join(f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in values.items())
        )

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        return await self._answer(request, self._read_completion)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, self._read_chat)

    def _read_completion(self, body: Mapping[str, Any]) -> tuple[Sequence[Prompt], GenerationFields]:
        return read_completion_fields(body)

    def _read_chat(self, body: Mapping[str, Any]) -> tuple[Sequence[Prompt], GenerationFields]:
        if self.model.template is None:
            raise FieldError("messages", NO_TEMPLATE)
        messages, fields = read_chat_fields(body)
        return [self.model.template.render(messages)], fields

    async def _answer(
        self, request: Request, read: Callable[[Mapping[str, Any]], tuple[Sequence[Prompt], GenerationFields]]
    ) -> Response:
        try:
            body = _read_json(await request.body())
            name = body.get("model", self.model.name)
            if name != self.model.name:
                return self._unknown_model(name)
            prompts, fields = await asyncio.to_thread(read, body)  # a chat template may take its time
            if self.num_outputs + len(prompts) * fields.num_choices > MAX_OUTPUTS:
                return JSONResponse(make_error("the server is busy; try again later", code="busy"), 429)
            job = await self._start_job(prompts, fields)
        except (ValueError, OverflowError) as error:
            field = error.field if isinstance(error, FieldError) else None
            return JSONResponse(make_error(" ".join(str(error).split()), field=field), 400)
        form = AnswerFormat(self.model.name, is_chat=read == self._read_chat)
        if fields.is_streamed:
            return StreamingResponse(self._stream(job, form), media_type="text/event-stream")
        return await self._wait(request, job, form)

    async def _start_job(self, prompts: Sequence[Prompt], fields: GenerationFields) -> GenerationJob:
        """Start a job in a thread, because a tokenizer may take its time, and count its outputs."""
        num_outputs = len(prompts) * fields.num_choices
        self.num_outputs += num_outputs
        try:
            return await asyncio.to_thread(GenerationJob, self.model.engine, self.tokenizer, prompts, fields)
        except BaseException:
            self.num_outputs -= num_outputs
            raise

    async def _wait(self, request: Request, job: GenerationJob, form: AnswerFormat) -> Response:
        """The whole answer; a client that goes away ends its outputs."""
        finished = asyncio.get_running_loop().run_in_executor(self.threads, job.choices)
        disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait({finished, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                job.cancel()
            return JSONResponse(form.whole(await finished, job.num_prompt_tokens))
        finally:
            disconnect.cancel()
            job.cancel()
            self.num_outputs -= len(job.prompts)

    async def _stream(self, job: GenerationJob, form: AnswerFormat) -> AsyncIterator[bytes]:
        """The events of a streamed answer; a client that goes away ends its outputs."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[TextDelta | Exception]()
        send = partial(_put_from_thread, loop, queue)
        pumps = [loop.run_in_executor(self.threads, job.pump, index, send) for index in range(len(job.streams))]
        started, num_running = set[int](), len(pumps)
        try:
            while num_running:
                delta = await queue.get()
                if isinstance(delta, Exception):
                    yield event(make_error(f"the model failed: {delta}", code="internal_error"))
                    return
                if delta.text or delta.scores or delta.index not in started:
                    yield form.chunk(delta, is_first=delta.index not in started)
                    started.add(delta.index)
                if delta.ended:
                    num_running -= 1
                    yield form.end_chunk(delta)
            if job.fields.has_usage_chunk:
                yield form.usage_chunk(make_usage(job.num_prompt_tokens, job.num_output_tokens))
            yield b"data: [DONE]\n\n"
        finally:
            job.cancel()
            self.num_outputs -= len(job.prompts)

    def _unknown_model(self, name: Any) -> Response:
        message = f"there is no model {name!r}; this server has {self.model.name!r}"
        return JSONResponse(make_error(message, field="model", code="model_not_found"), 404)


def _put_from_thread(
    loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[TextDelta | Exception], delta: TextDelta | Exception
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, delta)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _read_json(raw: bytes) -> Mapping[str, Any]:
    body = parse_json("the body", raw, 'send {"prompt": "Once upon a time"}')
    if not isinstance(body, dict):
        raise ValueError(f"the body is a {type(body).__name__}, not a JSON object")
    return body


async def _refuse_path(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return JSONResponse(make_error(f"{request.method} {request.url.path} is not part of this interface"), status)


async def _report_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(make_error(f"the model failed: {error}", code="internal_error"), 500)


# --- who may call --------------------------------------------------------------------------------------


class ApiSecurity:
    """Refuses requests of other hosts and of web pages, without the key if there is one, and bodies that are too long.

    A web page of another site could otherwise use a browser on this machine to reach the server.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], api_key: str | None) -> None:
        self.app, self.hosts, self.api_key = app, frozenset(hosts), api_key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            status, message = refusal
            await JSONResponse(make_error(message), status)(scope, receive, send)
            return
        await self.app(scope, _limited(receive), send)

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        """The status and the reason of a refused request; None if it may be answered."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        if headers.get("host", "").lower() not in self.hosts:
            return 421, f"this server is not {headers.get('host', '')!r}; use the address that it printed"
        if "origin" in headers and headers["origin"].lower() not in {f"http://{host}" for host in self.hosts}:
            return 403, "requests of web pages are refused; call the server from a program"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "requests of web pages are refused; call the server from a program"
        if self.api_key is not None and scope["path"] != "/health":
            token = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode(), self.api_key.encode()):
                return 401, "the key is missing or wrong; send Authorization: Bearer KEY"
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            length = headers.get("content-length", "0")
            if kind != "application/json":
                return 415, f"the body is {kind or 'of no type'}; send application/json"
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                return 413, f"the body is longer than {MAX_BODY_BYTES:,} bytes; send shorter prompts"
        return None


def _limited(receive: Receive) -> Receive:
    """Receives a body up to its limit, also where no length was announced."""
    received = 0

    async def receive_some() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise ValueError(f"the body is longer than {MAX_BODY_BYTES:,} bytes; send shorter prompts")
        return message

    return receive_some


@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, and the key that it asks for."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None


def serve(model: ServedModel, options: ServeOptions, on_start: Callable[[str], object]) -> None:
    """Serve until the process is interrupted; `on_start` gets the address."""
    import uvicorn

    if not is_loopback(options.host) and not options.api_key:
        raise ValueError(f"other machines could reach {options.host}; give an API key, or listen on 127.0.0.1")
    server = ApiServer(model)
    try:
        listener = open_socket(options.host, options.port)
    except OSError as error:
        fact = f"cannot listen on {options.host}, port {options.port}: {error.strerror}"
        raise ValueError(f"{fact}; give another port, or 0 for a free one") from None
    port = listener.getsockname()[1]
    app = ApiSecurity(server.app(), allowed_hosts(options.host, port), options.api_key)
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", server_header=False)
    try:
        with model.engine.background_thread():
            on_start(f"http://{'[' + options.host + ']' if ':' in options.host else options.host}:{port}/v1")
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
        server.threads.shutdown(wait=False, cancel_futures=True)
        server.close()
