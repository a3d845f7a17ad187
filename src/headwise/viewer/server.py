"""Local server of the page: routes and `serve`."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..report.plots import THEMES
from ..util.errors import SpecError
from . import circuit_actions, lab_actions, targets  # noqa: F401 - they register jobs
from .answers import ANSWERS, Answer, Query, answer
from .export_files import (
    EXPORT_KINDS,
    NOT_BUILT,
    STATIC,
    ExportFile,
    ExportScope,
    FileTooLarge,
    make_file,
)
from .model_actions import TextTooLong, check_text_length
from .model_worker import (
    ALL_JOBS,
    END_STATES,
    OTHER_WINDOW,
    Job,
    ModelWorker,
    QueueFull,
    describe_error,
    is_out_of_memory,
    text,
)
from .open_model import OpenModel

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
EVENT_WAIT_SECONDS = 0.05  # between two looks for new events of a job
MAX_REQUEST_SECONDS = 60.0
MAX_JSON_DEPTH = 16
MAX_DIGITS = 20  # of a revision
OPENING_JOBS = ("text", "open")  # they replace what another window has opened
OUTDATED = ValueError("error.outdated")  # the window itself has opened another text
BINARY = "application/octet-stream"


def read_static_files(folder: Path = STATIC) -> dict[str, tuple[bytes, str]]:
    """Return the built front end by URL path. Requests are looked up here, so no file path is built
    from a request.
    """
    if not (folder / "index.html").is_file():
        raise SpecError(NOT_BUILT)
    return {
        f"/{path.name}": (path.read_bytes(), MEDIA_TYPES[path.suffix])
        for path in sorted(folder.iterdir())
        if path.suffix in MEDIA_TYPES
    }


# --- Files to save --------------------------------------------------------------------------------


@answer("export")
def answer_export(view: OpenModel, query: Query) -> ExportFile:
    """Return a file to save: one head if `site` is given, else all heads."""
    kind = query.choice("kind", EXPORT_KINDS)
    least = query.number("min_weight", 0.0, 1.0, 0.0)
    theme = query.choice("theme", tuple(THEMES))
    if "site" not in query.parameters:
        return make_file(view, kind, ExportScope(min_weight=least, theme=theme))
    form = query.choice("form", ("matrix", "lines"))
    scope = ExportScope(query.site, query.head, least, query.part, query.lens, theme, form)
    return make_file(view, kind, scope)


# --- Routes ---------------------------------------------------------------------------------------


class ViewServer:
    """Routes of the page for one open model."""

    def __init__(self, model: OpenModel, static: Mapping[str, tuple[bytes, str]]) -> None:
        self.model = model
        self.static = static
        self.worker = ModelWorker(model, ALL_JOBS)
        self.tags = {
            path: f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            for path, (content, _) in static.items()
        }

    def app(self) -> Starlette:
        """Build the application without security middleware."""
        answers = [Route(f"/api/{path}", self._endpoint(make)) for path, make in ANSWERS.items()]
        routes = [
            *answers,
            Route("/api/jobs", self._submit, methods=["POST"]),
            Route("/api/jobs/{job}", self._cancel, methods=["DELETE"]),
            Route("/api/jobs/{job}/events", self._events),
            Route("/api/jobs/{job}/result", self._result),
            Route("/{path:path}", self._static),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _answer_http_error})

    def _endpoint(self, make: Answer) -> Callable[[Request], Any]:
        """Make an endpoint that runs `make` on a snapshot in a thread and turns errors into
        responses.
        """

        async def endpoint(request: Request) -> Response:
            view = self.model.snapshot()
            window, revision = read_window(request)
            if revision not in (None, view.revision):
                is_other = view.is_other_window(window, revision)
                return error_response(409, OTHER_WINDOW if is_other else OUTDATED)
            query = Query(view, request.query_params)
            with anyio.move_on_after(MAX_REQUEST_SECONDS):
                try:
                    return await anyio.to_thread.run_sync(
                        lambda: respond(make(view, query)), abandon_on_cancel=True
                    )
                except FileTooLarge as error:
                    return error_response(413, error)
                except (ValueError, KeyError, IndexError) as error:
                    return error_response(400, error)
                except Exception as error:  # whatever a model or a trace does, the server stays up
                    return error_response(507 if is_out_of_memory(error) else 500, error)
            fact = f"the answer took longer than {MAX_REQUEST_SECONDS:g} s"
            return error_response(
                503, ValueError(f"{fact}; ask for a smaller part, or use a shorter text")
            )

        return endpoint

    async def _submit(self, request: Request) -> Response:
        try:
            body = parse_body(await _read_body(request))
            kind = str(body.pop("kind", None))
            window, revision = read_window(request)
            if kind in OPENING_JOBS:
                revision = None
            if self.model.is_other_window(window, revision):
                return error_response(409, OTHER_WINDOW)
            if kind == "text":
                parts = [text().get(self.model, name, body) for name in ("text", "source")]
                check_text_length(self.model, *parts)
            job = self.worker.submit(kind, body, window, revision)
        except QueueFull as error:
            return error_response(429, ValueError(str(error)))
        except TextTooLong as error:
            return error_response(413, error)
        except ValueError as error:
            return error_response(400, error)
        return JSONResponse({"job": job.id})

    async def _cancel(self, request: Request) -> Response:
        self.worker.cancel(self._job(request))
        return JSONResponse({})

    async def _events(self, request: Request) -> Response:
        job = self._job(request)

        async def stream() -> AsyncIterator[bytes]:
            last: dict[str, Any] | None = None
            while not await request.is_disconnected():
                for event in job.read_events(last):
                    last = event
                    yield f"data: {json.dumps(event)}\n\n".encode()
                if last is not None and last["state"] in END_STATES:
                    return
                await anyio.sleep(
                    EVENT_WAIT_SECONDS
                )  # no thread waits, so that many pages may follow a job

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def _result(self, request: Request) -> Response:
        job = self._job(request)
        if job.state != "done":
            return error_response(409, ValueError(f"the job is {job.state}; wait until it is done"))
        return respond(job.result)

    def _job(self, request: Request) -> Job:
        job = self.worker.jobs.get(request.path_params["job"])
        if job is None:
            raise HTTPException(404, "there is no such job; it may be too old")
        return job

    # --- files ------------------------------------------------------------------------------------

    async def _static(self, request: Request) -> Response:
        path = request.url.path
        path = "/index.html" if path == "/" else path
        if path not in self.static:
            raise HTTPException(404, "there is no such page")
        content, media_type = self.static[path]
        headers = {"etag": self.tags[path]}
        tags = [
            tag.strip().removeprefix("W/")
            for tag in request.headers.get("if-none-match", "").split(",")
        ]
        if self.tags[path] in tags:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)


def read_window(request: Request) -> tuple[str, int | None]:
    """Return the name of the window that asks and the revision it shows; None if it names none."""
    text = request.headers.get("x-revision", "")
    revision = int(text) if text.isdecimal() and len(text) < MAX_DIGITS else None
    return request.headers.get("x-window", ""), revision


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; refuses NaN, infinities and deep nesting."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON; give a number")

    try:
        value = json.loads(body, parse_constant=refuse_constant)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("the request is not a JSON object; send one") from None
    if not isinstance(value, dict) or not _is_shallow(value, MAX_JSON_DEPTH):
        raise ValueError("the request is not a JSON object; send one")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(
            "the request holds half of a surrogate pair, which is no character; remove it"
        ) from None
    return value


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return not (isinstance(value, float) and not math.isfinite(value))
    parts = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(part, depth - 1) for part in parts)


def replace_non_finite(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {name: replace_non_finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def respond(value: Any) -> Response:
    """Return a response: a file to save, arrays, or JSON. The JSON is ASCII, because tokens may
    contain unpaired surrogates.
    """
    if isinstance(value, ExportFile):
        headers = {"content-disposition": f'attachment; filename="{value.name}"'}
        return StreamingResponse(value.pieces, media_type=value.media_type, headers=headers)
    if isinstance(value, bytes):
        return Response(value, media_type=BINARY)
    content = json.dumps(replace_non_finite(value), allow_nan=False, separators=(",", ":"))
    return Response(content, media_type="application/json")


async def _read_body(request: Request) -> bytes:
    """Read the request body. Raises HTTPException if it is too large."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request has more than {MAX_BODY_BYTES} bytes; send less")
        parts.append(part)
    return b"".join(parts)


def error_response(status: int, error: BaseException) -> JSONResponse:
    """Return a response with the fact and remedy of an error."""
    return JSONResponse({"error": describe_error(error)}, status)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, ValueError(error.detail))


@dataclass(frozen=True)
class ServerAddress:
    """Host, port, and the token of this launch."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """URL to open. The token is in the fragment, which browsers never send."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ALL_ADDRESSES:
            name = machine_names()[0]  # others cannot open an address that means all of them
        return f"http://{name}:{self.port}/#token={self.token}"


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises SpecError if the port is taken. Port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            reason = f"port {port} is reserved; give one above 1023, or leave --port out"
        elif isinstance(error, socket.gaierror):
            reason = f"there is no address {host!r}; give --host 127.0.0.1"
        elif port:
            reason = f"port {port} is taken; give another --port, or leave it out for a free one"
        else:
            reason = f"cannot listen on {host}: {error.strerror}; give --host 127.0.0.1"
        raise SpecError(reason) from None
    return listener


def serve(
    model: OpenModel,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_remote: bool = False,
    on_start: Callable[[ServerAddress], object] = lambda _: None,
) -> None:
    """Serve the page until the process is interrupted. `on_start` receives its address.

    Only this machine can connect, unless `allow_remote` is set.
    """
    import uvicorn

    if not is_loopback(host) and not allow_remote:
        raise ValueError(f"other machines could reach {host}; give 127.0.0.1, or --allow-remote")
    static = read_static_files()
    listener = open_socket(host, port)
    address = ServerAddress(host, listener.getsockname()[1], secrets.token_urlsafe(32))
    view = ViewServer(model, static)
    app = SecurityMiddleware(view.app(), allowed_hosts(host, address.port), address.token)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", server_header=False
    )
    try:
        on_start(address)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
        view.worker.close()


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Message, Receive, Send], Awaitable[None]]

API_PREFIX = "/api/"
TOKEN_HEADER = b"x-session-token"
MAX_BODY_BYTES = 2**20
BODY_TYPES = ("application/json", "application/octet-stream")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; "
    "font-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
PRIVATE_CACHE = (b"cache-control", b"no-store")  # answers of the interface hold the user's texts
FILE_CACHE = (
    b"cache-control",
    b"no-cache",
)  # files of the page are the same until headwise is updated
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
ALL_ADDRESSES = ("0.0.0.0", "::")
# Addresses that are reserved for documentation: asking for the route to them sends nothing.
DOCUMENTATION_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class SecurityMiddleware:
    """Refuses requests from other hosts, origins and sessions, and adds security headers to every
    response.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str) -> None:
        self.app = app
        self.hosts = frozenset(hosts)
        self.token = token.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are not supported

        own = (
            *SECURITY_HEADERS,
            PRIVATE_CACHE if scope["path"].startswith(API_PREFIX) else FILE_CACHE,
        )
        own_names = {name for name, _ in own}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [
                    pair for pair in message.get("headers", []) if pair[0].lower() not in own_names
                ]
                message = {**message, "headers": [*headers, *own]}
            await send(message)

        status = self._refusal(scope)
        if status:
            await send_with_headers(
                {"type": "http.response.start", "status": status, "headers": []}
            )
            await send_with_headers({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send_with_headers)

    def _refusal(self, scope: Message) -> int:
        """Return the HTTP status of a refused request; 0 if it is allowed."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)

        def single(name: bytes) -> bytes | None:
            values = headers.get(name, [])
            return values[0] if len(values) == 1 else b"" if values else None

        host = single(b"host")
        if host is None or host.decode("latin-1").lower() not in self.hosts:
            return 421
        origin = single(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in {
            f"http://{name}" for name in self.hosts
        }:
            return 403
        if single(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            return 403
        if scope["method"] not in ("GET", "HEAD", "POST", "DELETE"):
            return 405
        if not scope["path"].startswith(API_PREFIX):
            return 0 if scope["method"] in ("GET", "HEAD") else 405
        if not hmac.compare_digest(single(TOKEN_HEADER) or b"", self.token):
            return 401
        if scope["method"] != "POST":
            return 0
        content_type = (
            (single(b"content-type") or b"").decode("latin-1").partition(";")[0].strip().lower()
        )
        if content_type not in BODY_TYPES:
            return 415
        length = single(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > MAX_BODY_BYTES):
            return 413
        return 0


def allowed_hosts(host: str, port: int) -> list[str]:
    """Return the Host header values that name this server."""
    if is_loopback(host):
        names = {*LOOPBACK_NAMES}
    elif host in ALL_ADDRESSES:
        names = {*LOOPBACK_NAMES, *machine_names()}
    else:
        names = {f"[{host}]" if ":" in host else host}
    return sorted(f"{name.lower()}:{port}" for name in names)


def machine_names() -> list[str]:
    """Return this machine's network addresses, then its host name, in URL form."""
    names: list[str] = []
    for family, target in DOCUMENTATION_ADDRESSES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                address = str(probe.getsockname()[0])
        except OSError:
            continue  # no network of this family
        names.append(f"[{address}]" if family == socket.AF_INET6 else address)
    return [*names, socket.gethostname()]


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    return host in ("127.0.0.1", "localhost", "::1")
