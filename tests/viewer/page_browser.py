"""A browser for the tests of the page: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import uvicorn

from headwise.observe import bundled_sample
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import (
    SecurityMiddleware,
    ViewServer,
    allowed_hosts,
    open_socket,
    read_static_files,
)

TOKEN = "token-of-the-tests"
CHROMIUM = shutil.which("chromium")
MUST_RUN = bool(os.environ.get("REQUIRE_BROWSER"))


def require_browser() -> str:
    """The path of chromium; skips the test without one, unless REQUIRE_BROWSER=1."""
    if CHROMIUM is None:
        if MUST_RUN:
            pytest.fail("REQUIRE_BROWSER is set, but there is no chromium; install it with apt")
        pytest.skip("browser tests need chromium: sudo apt-get install -y chromium")
    return CHROMIUM


@contextmanager
def served(model: OpenModel) -> Iterator[str]:
    """Serve the page of a model in a thread; gives its address."""
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    view = ViewServer(model, read_static_files())
    app: Any = SecurityMiddleware(view.app(), allowed_hosts("127.0.0.1", port), TOKEN)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/#token={TOKEN}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        view.worker.close()


def unpack_json(packed: str) -> Any:
    """The JSON that an exported page holds compressed."""
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def exported_data(page: str) -> dict[str, Any]:
    """What an exported page holds."""
    match = re.search(r'<script type="application/gzip" id="headwise-data">(.*?)</script>', page)
    assert match is not None
    return unpack_json(match[1])


def wait_until(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page, whose policy forbids Playwright's own way to
    wait.
    """
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {expression}")


def settled_box(element: Any) -> dict[str, float]:
    """Where an element is, once it stands still: what arrives above it moves it."""
    last = None
    for _ in range(200):
        box = element.bounding_box()
        if box is not None and box == last:
            return box
        last = box
        element.page.wait_for_timeout(100)
    pytest.fail(f"never still: {element}")


def examples_of_ids(opened: OpenModel, trace: Any) -> list[Example]:
    """The open ids as one example, for models without a tokenizer."""
    ids = torch.tensor(trace.streams["text"][0].ids)
    none = torch.zeros(len(ids), dtype=torch.bool)
    words = tuple(map(str, ids.tolist()))
    tokens = TokenAnnotations(
        ids, words, none, none, none, torch.arange(len(ids)), torch.zeros_like(ids)
    )
    return [Example({"x": ids[None]}, {"text": tokens})]


def sample_model(*, with_model: bool = True) -> OpenModel:
    """The bundled sample, as `headwise view` without arguments opens it."""
    load_model = bundled_sample.load_sample_model if with_model else None
    trace, table = bundled_sample.load_sample_trace(), bundled_sample.load_sample_table()
    return OpenModel(trace, load_model=load_model, table=table)
