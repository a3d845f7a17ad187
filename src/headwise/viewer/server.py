"""The local server of the page: its routes, and `serve`."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..errors import SpecError
from ..traces import map_queries_and_keys
from ..traces.attention_trace import AGGREGATES
from ..traces.head_steps import HeadPlace
from .binary_answers import (
    SCOPES,
    encode_aggregate,
    encode_arrays,
    encode_image,
    encode_marginals,
    encode_measures,
    encode_products,
    encode_result,
    encode_steps,
    encode_thumbnails,
    encode_tile,
    encode_written,
    find_steps,
)
from .comparison_actions import compare_attention, exact_pair, pool_difference
from .evidence_actions import find_evidence, measure_syntax
from .export_files import (
    EXPORT_KINDS,
    NOT_BUILT,
    ExportScope,
    FileTooLarge,
    describe_files,
    make_file,
)
from .http_security import (
    ALL_ADDRESSES,
    MAX_BODY_BYTES,
    SecurityMiddleware,
    allowed_hosts,
    is_loopback,
    machine_names,
)
from .lab_actions import (
    compute_effect,
    continue_text,
    generate_text,
    plan_curves,
    remove_greedily,
    sweep_heads,
)
from .lab_checks import evaluate_texts
from .model_actions import JOB_KINDS, TextTooLong, check_text_length, compute_cost
from .model_worker import END_STATES, Job, ModelWorker, QueueFull, describe_error, is_out_of_memory
from .open_model import LENSES, MAX_TILE_CELLS, OpenModel, TileRange
from .similarity_actions import compute_similarity
from .surgery_actions import (
    convert_heads,
    describe_surgery,
    plan_conversion,
    plan_pruning,
    prune_heads,
)

STATIC_FOLDER = Path(__file__).parent / "static"
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
BINARY = "application/octet-stream"
ALL_JOBS = {
    **JOB_KINDS,
    "ablate": compute_effect,
    "evaluate": evaluate_texts,
    "sweep": sweep_heads,
    "lab-plan": plan_curves,
    "greedy": remove_greedily,
    "continue": continue_text,
    "generate": generate_text,
    "similarity": compute_similarity,
    "evidence": find_evidence,
    "syntax": measure_syntax,
    "compare": compare_attention,
    "cost": compute_cost,
    "surgery": describe_surgery,
    "plan-pruning": plan_pruning,
    "plan-conversion": plan_conversion,
    "prune": prune_heads,
    "convert": convert_heads,
}


def read_static_files(folder: Path = STATIC_FOLDER) -> dict[str, tuple[bytes, str]]:
    """The built front end by URL path. Requests are looked up here, so that no path is ever joined
    with a request's.
    """
    if not (folder / "index.html").is_file():
        raise SpecError(NOT_BUILT)
    return {
        f"/{path.name}": (path.read_bytes(), MEDIA_TYPES[path.suffix])
        for path in sorted(folder.iterdir())
        if path.suffix in MEDIA_TYPES
    }


class ViewServer:
    """The routes of the page over one open model."""

    def __init__(self, model: OpenModel, static: Mapping[str, tuple[bytes, str]]) -> None:
        self.model, self.static, self.worker = model, static, ModelWorker(model, ALL_JOBS)
        self.tags = {
            path: f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            for path, (content, _) in static.items()
        }

    def app(self) -> Starlette:
        """The application without its security middleware."""
        routes = [
            Route("/api/document", self._answer(lambda view, _: json_response(view.describe()))),
            Route("/api/thumbnails", self._answer(self._thumbnails)),
            Route("/api/tile", self._answer(self._tile)),
            Route("/api/row", self._answer(self._row)),
            Route("/api/column", self._answer(self._column)),
            Route("/api/rows", self._answer(self._rows)),
            Route("/api/marginals", self._answer(self._marginals)),
            Route("/api/peak", self._answer(self._peak)),
            Route("/api/measures", self._answer(self._measures)),
            Route("/api/steps", self._answer(self._steps)),
            Route("/api/points", self._answer(self._points)),
            Route("/api/products", self._answer(self._products)),
            Route("/api/aggregate", self._answer(self._aggregate)),
            Route("/api/written", self._answer(self._written)),
            Route("/api/image", self._answer(self._image)),
            Route("/api/difference", self._answer(self._difference)),
            Route("/api/difference/pair", self._answer(self._difference_pair)),
            Route("/api/export", self._answer(self._export)),
            Route("/api/export/sizes", self._answer(self._export_sizes)),
            Route("/api/jobs", self._submit, methods=["POST"]),
            Route("/api/jobs/{job}", self._cancel, methods=["DELETE"]),
            Route("/api/jobs/{job}/events", self._events),
            Route("/api/jobs/{job}/result", self._result),
            Route("/{path:path}", self._static),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _answer_http_error})

    # --- answers ----------------------------------------------------------------------------------

    def _answer(self, make: Callable[[OpenModel, Query], Response]) -> Callable[[Request], Any]:
        """An endpoint that runs `make` on a snapshot in a thread, and turns its errors into
        answers.
        """

        async def endpoint(request: Request) -> Response:
            view, query = self.model.snapshot(), Query(request.query_params)
            with anyio.move_on_after(MAX_REQUEST_SECONDS):
                try:
                    if query.integer("revision", 0, view.revision, view.revision) != view.revision:
                        fact = (
                            f"the request is for revision {query.parameters['revision']}, and "
                            f"revision {view.revision}"
                        )
                        return error_response(
                            409, ValueError(f"{fact} is open; reload the document")
                        )
                    return await anyio.to_thread.run_sync(make, view, query, abandon_on_cancel=True)
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

    def _thumbnails(self, view: OpenModel, query: Query) -> Response:
        return binary_response(encode_thumbnails(view))

    def _tile(self, view: OpenModel, query: Query) -> Response:
        site, head = self._head(view, query)
        layer = view.get_trace().get_layer(site)
        size = (
            query.integer("rows", 1, MAX_TILE_CELLS, 512),
            query.integer("cols", 1, MAX_TILE_CELLS, 512),
        )
        lens, pool = query.choice("lens", LENSES), query.choice("pool", ("max", "mean"))
        row = query.integer("row", 0, layer.batch_size - 1, 0)
        part = TileRange(query.span("q", layer.num_queries), query.span("k", layer.num_keys), size)
        tile = view.tile(site, head, part, pool=pool, lens=lens, row=row)
        return binary_response(encode_tile(view, tile, part))

    def _row(self, view: OpenModel, query: Query) -> Response:
        site, head = self._head(view, query)
        layer = view.get_trace().get_layer(site)
        number = query.integer("query", 0, layer.num_queries - 1)
        row = query.integer("row", 0, layer.batch_size - 1, 0)
        block = slice(number, number + 1)
        weights = view.weights(site, head, block, lens=query.choice("lens", LENSES), row=row)[0]
        masked = ~view.get_trace().head_mask(site, head, block, row=row)[0]
        return binary_response(
            encode_arrays({"weights": weights, "masked": masked.astype(np.uint8)}, query=number)
        )

    def _column(self, view: OpenModel, query: Query) -> Response:
        site, head = self._head(view, query)
        layer = view.get_trace().get_layer(site)
        number = query.integer("key", 0, layer.num_keys - 1)
        row = query.integer("row", 0, layer.batch_size - 1, 0)
        weights = view.weights(site, head, slice(None), lens=query.choice("lens", LENSES), row=row)
        return binary_response(
            encode_arrays({"weights": np.ascontiguousarray(weights[:, number])}, key=number)
        )

    def _rows(self, view: OpenModel, query: Query) -> Response:
        """One query in all heads of the layers that have it: [heads, keys], padded with zeros."""
        trace = view.get_trace()
        number, row = query.integer("query", 0, view.max_tokens), query.integer("row", 0, 10**6, 0)
        stream = query.text("stream", "text")
        layers = [
            layer
            for layer in trace.layers
            if layer.query_stream == stream and number < layer.num_queries
        ]
        widest = max((layer.num_keys for layer in layers), default=0)
        weights = np.zeros((sum(layer.heads for layer in layers), widest), np.float32)
        names: list[list[int]] = []
        sites = [layer.name for layer in trace.layers]
        for layer in layers:
            for head in range(layer.heads):
                weights[len(names), : layer.num_keys] = view.weights(
                    layer.name, head, slice(number, number + 1), row=row
                )[0]
                names.append([sites.index(layer.name), head])
        return binary_response(encode_arrays({"weights": weights}, heads=names, query=number))

    def _marginals(self, view: OpenModel, query: Query) -> Response:
        site, head = self._head(view, query)
        layer = view.get_trace().get_layer(site)
        row = query.integer("row", 0, layer.batch_size - 1, 0)
        marginals = view.marginals(site, head, lens=query.choice("lens", LENSES), row=row)
        return binary_response(encode_marginals(view, marginals, layer.num_keys))

    def _peak(self, view: OpenModel, query: Query) -> Response:
        """The exact largest weight of a part, for a cell that covers several pairs."""
        site, head = self._head(view, query)
        layer = view.get_trace().get_layer(site)
        part = TileRange(query.span("q", layer.num_queries), query.span("k", layer.num_keys))
        row = query.integer("row", 0, layer.batch_size - 1, 0)
        peak = view.peak(site, head, part, lens=query.choice("lens", LENSES), row=row)
        place = np.array([peak.query, peak.key], np.int32)
        return binary_response(
            encode_arrays({"weight": np.array([peak.weight], np.float32), "place": place})
        )

    def _measures(self, view: OpenModel, query: Query) -> Response:
        return binary_response(encode_measures(view))

    def _steps(self, view: OpenModel, query: Query) -> Response:
        site, head = self._head(view, query)
        layer = view.get_recorded().get_layer(site)
        number = query.integer("query", 0, layer.num_queries - 1)
        row = query.integer("row", 0, layer.batch_size - 1, 0)
        key = query.integer("key", 0, layer.num_keys - 1, 0) if "key" in query.parameters else None
        return binary_response(
            encode_steps(*find_steps(view, HeadPlace(site, head, number, row), key))
        )

    def _points(self, view: OpenModel, query: Query) -> Response:
        """The queries and keys of a head as points on the plane of their largest variance."""
        points = map_queries_and_keys(view.get_trace(), *self._head(view, query))
        return binary_response(
            encode_arrays({"queries": points.queries, "keys": points.keys}, share=points.share)
        )

    def _products(self, view: OpenModel, query: Query) -> Response:
        site, head = self._head(view, query)
        number = query.integer("query", 0, view.get_recorded().get_layer(site).num_queries - 1)
        return binary_response(encode_products(view, site, head, number))

    def _aggregate(self, view: OpenModel, query: Query) -> Response:
        site = view.site_name(query.integer("site", 0, 10**6))
        how, scope = query.choice("how", AGGREGATES), query.choice("scope", SCOPES)
        return binary_response(encode_aggregate(view, site, how, scope))

    def _written(self, view: OpenModel, query: Query) -> Response:
        site, head = self._head(view, query)
        number = query.integer("query", 0, view.get_recorded().get_layer(site).num_queries - 1)
        return binary_response(encode_written(view, site, head, number))

    def _image(self, view: OpenModel, query: Query) -> Response:
        return binary_response(encode_image(view, query.text("stream", "text")))

    def _difference(self, view: OpenModel, query: Query) -> Response:
        """One head in both traces of the last comparison, over the aligned tokens."""
        site, head = self._head(view, query)
        cells = query.integer("cells", 1, MAX_TILE_CELLS, 256)
        return binary_response(
            encode_arrays(pool_difference(view.get_comparison(), site, head, cells)._asdict())
        )

    def _difference_pair(self, view: OpenModel, query: Query) -> Response:
        """The exact weights of both traces for the aligned pair number `query` and number `key`."""
        site, head = self._head(view, query)
        comparison, layer = view.get_comparison(), view.get_recorded().get_layer(site)
        counts = [len(pairs.first) for pairs in comparison.aligned_tokens(layer)]
        place = query.integer("query", 0, counts[0] - 1), query.integer("key", 0, counts[1] - 1)
        return binary_response(
            encode_arrays({"weights": exact_pair(comparison, site, head, place)})
        )

    def _export(self, view: OpenModel, query: Query) -> Response:
        file = make_file(view, query.choice("kind", EXPORT_KINDS), self._export_scope(view, query))
        headers = {"content-disposition": f'attachment; filename="{file.name}"'}
        return StreamingResponse(file.pieces, media_type=file.media_type, headers=headers)

    def _export_sizes(self, view: OpenModel, query: Query) -> Response:
        return json_response(describe_files(view, self._export_scope(view, query)))

    def _export_scope(self, view: OpenModel, query: Query) -> ExportScope:
        """One head if `site` is given, else all heads."""
        min_weight = query.number("min_weight", 0.0, 1.0, 0.0)
        if "site" not in query.parameters:
            return ExportScope(min_weight=min_weight)
        site, head = self._head(view, query)
        return ExportScope(site, head, min_weight)

    def _head(self, view: OpenModel, query: Query) -> tuple[str, int]:
        site = view.site_name(query.integer("site", 0, 10**6))
        heads = view.get_trace().get_layer(site).heads
        return site, query.integer("head", 0, heads - 1)

    # --- jobs -------------------------------------------------------------------------------------

    async def _submit(self, request: Request) -> Response:
        try:
            body = parse_body(await _read_body(request))
            kind = str(body.pop("kind", None))
            if kind == "text":
                check_text_length(self.model, body)
            job = self.worker.submit(kind, body)
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
        if isinstance(job.result, bytes):
            return Response(job.result, media_type=BINARY)
        packed = encode_result(job.result)
        return json_response(job.result) if packed is None else Response(packed, media_type=BINARY)

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


class Query:
    """The parameters of a request, read with their ranges."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self.parameters = parameters

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from `low` to `high`."""
        text = self.parameters.get(name)
        if text is None and default is not None:
            return default
        if (
            text is None
            or len(text) > 12
            or not text.removeprefix("-").isdecimal()
            or not text.isascii()
        ):
            raise ValueError(
                f"{name}={(text or '')[:20]!r} is not an integer; give {low} to {high}"
            )
        if not low <= int(text) <= high:
            raise ValueError(f"{name}={text} is out of range; give {low} to {high}")
        return int(text)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number from `low` to `high`."""
        text = self.parameters.get(name, str(default))
        if (
            not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII)
            or not low <= float(text) <= high
        ):
            raise ValueError(
                f"{name}={text[:20]!r} is not a number from {low:g} to {high:g}; give one, such "
                f"as {high / 10:g}"
            )
        return float(text)

    def span(self, prefix: str, count: int) -> slice:
        """A range of positions, from `prefix`0 to `prefix`1; all by default."""
        start = self.integer(f"{prefix}0", 0, count, 0)
        stop = self.integer(f"{prefix}1", 0, count, count)
        if stop <= start:
            raise ValueError(
                f"{prefix}0={start} and {prefix}1={stop} give no position; give {prefix}0 < "
                f"{prefix}1"
            )
        return slice(start, stop)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of several words; the first by default."""
        value = self.parameters.get(name, choices[0])
        if value not in choices:
            raise ValueError(f"{name}={value[:20]!r} is unknown; use one of {', '.join(choices)}")
        return value

    def text(self, name: str, default: str) -> str:
        """A short text."""
        return self.parameters.get(name, default)[:200]


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
    """The value with None in place of NaN and infinities, which JSON cannot hold."""
    if isinstance(value, dict):
        return {name: replace_non_finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_response(value: Any) -> Response:
    """An answer in JSON, in ASCII, because the words of a trace may hold halves
    of surrogate pairs.
    """
    content = json.dumps(replace_non_finite(value), allow_nan=False, separators=(",", ":"))
    return Response(content, media_type="application/json")


async def _read_body(request: Request) -> bytes:
    """The body of a request; raises HTTPException if it is too large."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request has more than {MAX_BODY_BYTES} bytes; send less")
        parts.append(part)
    return b"".join(parts)


def binary_response(content: bytes) -> Response:
    """An answer with arrays."""
    return Response(content, media_type=BINARY)


def error_response(status: int, error: BaseException) -> JSONResponse:
    """An answer with the fact and the remedy of an error."""
    return JSONResponse({"error": describe_error(error)}, status)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, ValueError(error.detail))


@dataclass(frozen=True)
class ServerAddress:
    """Where the page is: host, port, and the token of this launch."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """The address to open; the token is in the fragment, which browsers never send."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ALL_ADDRESSES:
            name = machine_names()[
                0
            ]  # other machines cannot open an address that means all of them
        return f"http://{name}:{self.port}/#token={self.token}"


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError if the port is taken. Port 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    model: OpenModel,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_remote: bool = False,
    on_start: Callable[[ServerAddress], object] = lambda _: None,
) -> None:
    """Serve the page until the process is interrupted; `on_start` gets its address.

    Only this machine can reach it unless `allow_remote` is given.
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
