"""The server of the page under load and in trouble: several clients, long work, failures, limits,
stale answers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import uvicorn
from starlette.testclient import TestClient

import headwise as hw
from headwise.observe.inspect.model_inputs import ModelInputs
from headwise.observe.traces import Trace, save_trace
from headwise.observe.traces.attention_record import TokenRow
from headwise.viewer.model_actions import TextTooLong, capture_trace
from headwise.viewer.model_worker import MAX_QUEUED_JOBS, ModelWorker
from headwise.viewer.open_model import OpenModel, TileRange
from headwise.viewer.server import SecurityMiddleware, ViewServer, allowed_hosts, open_socket
from hostile.hostile_requests import HOST, STATIC, TOKEN, page_client
from viewer.binary_messages import decode_arrays
from viewer.page_models import GPT


def make_net(**changes: Any) -> Any:
    return hw.build(hw.families.read_model_spec(GPT | changes), seed=0).eval()


def record(net: Any, count: int, seed: int = 0) -> Trace:
    ids = torch.randint(0, 40, (1, count), generator=torch.Generator().manual_seed(seed))
    return hw.trace(net, ids, capture=hw.Capture(extra=("v",)))


@pytest.fixture
def opened() -> OpenModel:
    net = make_net()
    return OpenModel(record(net, 37), net)


@pytest.fixture
def server(opened: OpenModel) -> Iterator[ViewServer]:
    view = ViewServer(opened, STATIC)
    yield view
    view.worker.close()


@pytest.fixture
def client(server: ViewServer) -> TestClient:
    return page_client(server)


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def run_in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread of its own, because a browser of other tests has a running event
    loop in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def submit(client: TestClient, **arguments: Any) -> str:
    answer = client.post("/api/jobs", json=arguments)
    assert answer.status_code == 200, answer.text
    return answer.json()["job"]


class HeldJob:
    """A job that runs until it is released, and ignores cancellation as one
    long forward pass does.
    """

    def __init__(self) -> None:
        self.has_started, self.release = threading.Event(), threading.Event()

    def __call__(self, model: OpenModel, arguments: Any, progress: Any) -> dict[str, Any]:
        self.has_started.set()
        assert self.release.wait(10)
        return {"revision": model.revision}


# --- answers belong to one revision ---------------------------------------------------------------


def test_an_answer_describes_one_trace_while_another_is_opened(server, client, opened, monkeypatch):
    """A new text that arrives during a request changes neither its weights nor its revision."""
    other, expected = (
        record(opened.get_model(), 11, seed=1),
        opened.get_trace().head_weights(opened.heads[0][0], 0),
    )
    tile = OpenModel.tile

    def tile_after_change(self: OpenModel, *args: Any, **options: Any) -> Any:
        opened.set_trace(other)
        return tile(self, *args, **options)

    monkeypatch.setattr(OpenModel, "tile", tile_after_change)
    answer = client.get("/api/tile?site=0&head=0&rows=37&cols=37")
    header, found = decode_arrays(answer.content)
    assert np.abs(found["weights"] / 255 - expected).max() <= 1 / 255
    assert (header["revision"], opened.revision) == (0, 1)


def test_thumbnails_of_a_former_trace_do_not_replace_the_open_one(client, opened, monkeypatch):
    other, draw = record(opened.get_model(), 11, seed=1), Trace.with_thumbnails

    def draw_after_change(self: Trace, size: int) -> Trace:
        opened.set_trace(other)
        return draw(self, size)

    monkeypatch.setattr(Trace, "with_thumbnails", draw_after_change)
    assert decode_arrays(client.get("/api/thumbnails").content)[0]["revision"] == 0
    assert opened.trace is other


def test_a_window_is_not_answered_about_the_text_of_another(client, opened):
    """Only a new text or another model may be asked for by a window that shows something else."""
    shown = {"X-Revision": str(opened.revision)}
    assert client.get("/api/tile?site=0&head=0", headers=shown).status_code == 200
    opened.set_trace(record(opened.get_model(), 11, seed=1))
    refused = client.get("/api/tile?site=0&head=0", headers=shown)
    assert (refused.status_code, refused.json()["error"]["fact"]) == (409, "error.otherWindow")
    jobs = {"ablate": {"heads": [[1, 2]]}, "text": {"text": "a"}}
    answers = [
        client.post("/api/jobs", json={"kind": k, **v}, headers=shown) for k, v in jobs.items()
    ]
    assert [answer.status_code for answer in answers] == [409, 200]
    assert client.get("/api/document", headers={}).json()["revision"] == opened.revision


def test_a_window_is_answered_after_its_own_change(client, opened):
    """Its jobs go on before it knows the new revision; another window's are refused."""
    shown = {"X-Revision": str(opened.revision), "X-Window": "a"}
    grouping = {"kind": "group", "words": False, "special": False, "first": True}
    job = client.post("/api/jobs", json=grouping, headers=shown).json()["job"]
    assert '"state": "done"' in client.get(f"/api/jobs/{job}/events").text
    windows = [shown | {"X-Window": name} for name in "ab"]
    answers = [client.get("/api/tile?site=0&head=0", headers=window) for window in windows]
    facts = [answer.json()["error"]["fact"] for answer in answers]
    assert facts == ["error.outdated", "error.otherWindow"]
    jobs = [client.post("/api/jobs", json=grouping, headers=window) for window in windows]
    assert [job.status_code for job in jobs] == [200, 409]


def test_a_job_that_waits_behind_another_text_is_refused(opened):
    """Its window showed the open text when it was asked for, and does not when it runs."""
    other, may_open = record(opened.get_model(), 11, seed=1), threading.Event()

    def open_other(model: OpenModel, *_: Any) -> None:
        may_open.wait(10)
        model.set_trace(other)

    worker = ModelWorker(opened, {"open": open_other, "read": lambda model, *_: model.revision})
    shown = opened.revision
    jobs = [
        worker.submit("open", {}, "a", shown),
        worker.submit("read", {}, "b", shown),
        worker.submit("read", {}, "a", shown),
        worker.submit("read", {}),
    ]
    may_open.set()
    wait_for(lambda: all(job.has_ended for job in jobs))
    worker.close()
    assert [job.state for job in jobs] == ["done", "failed", "done", "done"]
    assert jobs[1].events[-1]["error"]["fact"] == "error.otherWindow"
    assert jobs[2].result == jobs[3].result == opened.revision == shown + 1


def test_ablated_heads_are_not_kept_by_the_server(client: TestClient):
    before = client.get("/api/document").json()
    job = submit(client, kind="ablate", heads=[[1, 2]])
    assert '"done"' in client.get(f"/api/jobs/{job}/events").text
    after = client.get("/api/document").json()
    assert after["revision"] == before["revision"]
    assert "ablated" not in after


def test_a_tile_reads_the_values_of_its_head_once(opened, monkeypatch):
    calls: list[str] = []
    matrix = OpenModel._output_matrix

    def counted(self: OpenModel, site: str, head: int) -> Any:
        calls.append(site)
        return matrix(self, site, head)

    monkeypatch.setattr(OpenModel, "_output_matrix", counted)
    whole = TileRange(slice(0, 37), slice(0, 37), (37, 37))
    tile = opened.tile(opened.heads[0][0], 1, whole, lens="effect")
    assert len(calls) == 1
    weights = opened.weights(opened.heads[0][0], 1, slice(None), lens="effect")
    assert np.abs(tile.weights / 255 * tile.scale - weights).max() <= tile.scale / 255


# --- jobs -----------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled_at_once_and_leaves_its_place(server, client):
    held_job = HeldJob()
    server.worker.job_kinds = {"held": held_job}
    try:
        submit(client, kind="held")
        assert held_job.has_started.wait(5)
        waiting = [submit(client, kind="held") for _ in range(MAX_QUEUED_JOBS)]
        refused = client.post("/api/jobs", json={"kind": "held"})
        assert refused.status_code == 429
        assert "wait for one to end" in refused.json()["error"]["remedy"]
        start = time.monotonic()
        client.delete(f"/api/jobs/{waiting[3]}")
        assert '"cancelled"' in client.get(f"/api/jobs/{waiting[3]}/events").text
        assert client.post("/api/jobs", json={"kind": "held"}).status_code == 200
        assert time.monotonic() - start < 2  # while the first job still runs
    finally:
        for job in server.worker.jobs.values():
            job.cancel()
        held_job.release.set()


def test_a_server_with_a_full_queue_closes(opened: OpenModel):
    held_job = HeldJob()
    worker = ModelWorker(opened, {"held": held_job})
    worker.submit("held", {})
    assert held_job.has_started.wait(5)
    for _ in range(MAX_QUEUED_JOBS):
        worker.submit("held", {})
    closing = threading.Thread(target=worker.close, kwargs={"timeout": 0.2}, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    held_job.release.set()


def test_many_open_event_streams_do_not_block_answers(server: ViewServer, opened: OpenModel):
    held_job = HeldJob()
    server.worker.job_kinds = {"held": held_job}
    app: Any = SecurityMiddleware(server.app(), allowed_hosts("127.0.0.1", 8000), TOKEN)
    job = server.worker.submit("held", {})

    async def measure() -> float:
        headers = {"X-Session-Token": TOKEN}
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(
            transport=transport, base_url=f"http://{HOST}", headers=headers
        ) as client:
            streams = [
                asyncio.create_task(client.get(f"/api/jobs/{job.id}/events")) for _ in range(120)
            ]
            await asyncio.sleep(0.2)
            start = time.monotonic()
            assert (await client.get("/api/row?site=0&head=0&query=1")).status_code == 200
            waited = time.monotonic() - start
            held_job.release.set()
            answers = await asyncio.gather(*streams)
            assert all('"done"' in answer.text for answer in answers)
            return waited

    assert run_in_thread(measure()) < 0.4


def test_progress_events_are_few(server: ViewServer, client: TestClient):
    def chatty(_: OpenModel, __: Any, progress: Any) -> dict[str, Any]:
        for step in range(20_000):
            progress(step, 20_000)
        return {}

    server.worker.job_kinds = {"chatty": chatty}
    job = submit(client, kind="chatty")
    assert '"done"' in client.get(f"/api/jobs/{job}/events").text
    assert len(server.worker.jobs[job].events) < 200


def test_a_client_that_goes_away_leaves_the_server_up(server: ViewServer, client: TestClient):
    held_job = HeldJob()
    server.worker.job_kinds = {"held": held_job}
    app: Any = SecurityMiddleware(server.app(), allowed_hosts("127.0.0.1", 8000), TOKEN)
    job = server.worker.submit("held", {})
    sent: list[Any] = []

    async def leave() -> None:
        messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Any:
            if (message := next(messages, None)) is not None:
                return message
            await asyncio.sleep(0.05)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", HOST.encode()), (b"x-session-token", TOKEN.encode())]
        scope = {
            "type": "http",
            "method": "GET",
            "path": f"/api/jobs/{job.id}/events",
            "query_string": b"",
        }
        scope |= {
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "asgi": {},
        }
        await asyncio.wait_for(app(scope, receive, send), 3)

    run_in_thread(leave())
    assert sent[0]["status"] == 200
    held_job.release.set()
    wait_for(lambda: job.has_ended)
    assert client.get(f"/api/jobs/{job.id}/result").status_code == 200


def test_a_model_that_fails_in_its_forward_pass_leaves_the_trace(client, opened, monkeypatch):
    trace = opened.trace
    monkeypatch.setattr(
        "headwise.attention.attention.Attention.head_outputs_and_gates", lambda *_, **__: 1 / 0
    )
    job = submit(client, kind="ablate", heads=[[0, 1]])
    assert '"ZeroDivisionError' in client.get(f"/api/jobs/{job}/events").text
    assert opened.trace is trace
    assert client.get("/api/row?site=0&head=0&query=1").status_code == 200


# --- errors and limits ----------------------------------------------------------------------------


def test_unexpected_errors_are_answers_without_paths(client, opened, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "cannot read /srv/somebody/secret/model.safetensors; C:\\Users\\somebody\\x failed"
        )

    monkeypatch.setattr(OpenModel, "weights", broken)
    answer = client.get("/api/row?site=0&head=0&query=1")
    assert answer.status_code == 500
    assert "RuntimeError" in answer.json()["error"]["fact"]
    assert "somebody" not in answer.text


def test_failed_jobs_tell_no_paths(server: ViewServer, client: TestClient):
    def broken(*_: Any) -> None:
        raise FileNotFoundError(2, "No such file", "/srv/somebody/model/config.json")

    server.worker.job_kinds = {"broken": broken}
    events = client.get(f"/api/jobs/{submit(client, kind='broken')}/events").text
    assert "FileNotFoundError" in events
    assert "somebody" not in events


def test_memory_that_does_not_suffice_is_no_fault_of_the_request(client, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("out of memory; use a shorter text")

    monkeypatch.setattr(OpenModel, "weights", broken)
    assert client.get("/api/row?site=0&head=0&query=1").status_code == 507


def test_requests_have_a_time_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headwise.viewer.server.MAX_REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(OpenModel, "weights", lambda *_, **__: time.sleep(1.0))
    start = time.monotonic()
    answer = client.get("/api/row?site=0&head=0&query=1")
    assert answer.status_code == 503
    assert "0.1 s" in answer.json()["error"]["fact"]
    assert time.monotonic() - start < 0.9


def test_texts_that_are_too_long_are_refused_with_the_number(client: TestClient, opened: OpenModel):
    opened.max_tokens = 50
    answer = client.post("/api/jobs", json={"kind": "text", "text": "word " * 2000})
    assert answer.status_code == 413
    assert "10000 characters" in answer.json()["error"]["fact"]
    assert "50 tokens" in answer.json()["error"]["remedy"]


@pytest.mark.parametrize("text", ["\\ud800", "a\\udfffb"])
def test_texts_that_are_no_unicode_are_refused(client: TestClient, text: str):
    body = f'{{"kind": "text", "text": "{text}"}}'
    answer = client.post("/api/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["fact"]


@pytest.mark.parametrize(
    "text", ["\x00\x01", "\u202eabc\u2066", "a\u200bb\ufeff", "</script><script>x", "\U0001f600"]
)
def test_strange_characters_are_text(client: TestClient, text: str):
    """The test model has no tokenizer, so that the job fails with a reason, and the server stays
    up.
    """
    job = submit(client, kind="text", text=text)
    assert '"failed"' in client.get(f"/api/jobs/{job}/events").text
    assert client.get("/api/document").status_code == 200


def test_numbers_that_json_lacks_are_null(client: TestClient, opened: OpenModel):
    opened.set_trace(replace(opened.get_trace(), model={"name": "a", "loss": float("nan")}))
    assert client.get("/api/document").json()["model"]["loss"] is None


def test_halves_of_surrogate_pairs_in_a_trace_are_shown():
    weights = np.full((1, 2, 3, 3), 1 / 3)
    view = ViewServer(
        OpenModel(hw.traces.trace_from_weights([weights], ["a", "\ud800", "c"])), STATIC
    )
    try:
        answer = page_client(view).get("/api/document")
        assert answer.status_code == 200
        assert b"\\ud800" in answer.content
    finally:
        view.worker.close()


def test_a_text_is_counted_before_the_model_runs(monkeypatch: pytest.MonkeyPatch):
    net = make_net()
    row = TokenRow(tuple(range(23)), tuple(map(str, range(23))))
    inputs = ModelInputs((), {}, {"text": (row,)}, {"text": 23})
    monkeypatch.setattr("headwise.observe.inspect.model_inputs.prepare_inputs", lambda *_: inputs)
    monkeypatch.setattr(type(net), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(TextTooLong, match="23 tokens; give at most 19"):
        capture_trace(net, "words", "", 19)


def test_pages_of_a_real_server_follow_one_job_and_leave(server: ViewServer, opened: OpenModel):
    """Two clients over sockets: one leaves while the job runs, the other sees its end."""
    held_job = HeldJob()
    server.worker.job_kinds = {"held": held_job}
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    app: Any = SecurityMiddleware(server.app(), allowed_hosts("127.0.0.1", port), TOKEN)
    real = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
    thread = threading.Thread(target=real.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        base, headers = f"http://127.0.0.1:{port}", {"X-Session-Token": TOKEN}
        with (
            httpx2.Client(base_url=base, headers=headers) as first,
            httpx2.Client(base_url=base) as second,
        ):
            second.headers.update(headers)
            job = first.post("/api/jobs", json={"kind": "held"}).json()["job"]
            with first.stream("GET", f"/api/jobs/{job}/events") as stream:
                assert "queued" in next(stream.iter_lines())
            first.close()
            assert second.get("/api/row?site=0&head=0&query=1").status_code == 200
            with second.stream("GET", f"/api/jobs/{job}/events") as stream:
                held_job.release.set()
                assert '"done"' in [line for line in stream.iter_lines() if line][-1]
            assert second.get(f"/api/jobs/{job}/result").json() == {"revision": opened.revision}
    finally:
        held_job.release.set()
        real.should_exit = True
        thread.join(10)
        listener.close()


def test_static_files_are_checked_by_their_tag(client: TestClient):
    first = client.get("/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/api/document").headers["cache-control"] == "no-store"


def test_all_addresses_are_reachable_by_the_addresses_of_this_machine():
    hosts = allowed_hosts("0.0.0.0", 8000)
    assert {"127.0.0.1:8000", "localhost:8000"} <= set(hosts)
    assert len(hosts) > 3
    assert "0.0.0.0:8000" not in hosts


def test_a_model_is_loaded_once(opened: OpenModel):
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        time.sleep(0.05)
        return make_net()

    lazy = OpenModel(opened.trace, load_model=load)
    threads = [threading.Thread(target=lambda: lazy.snapshot().get_model()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(loads) == 1
    assert lazy.model is not None


def test_a_trace_that_is_cut_short_is_refused(tmp_path: Path, opened: OpenModel):
    path = tmp_path / "a.trace"
    save_trace(opened.get_trace(), path)
    whole = path.read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:size])
        with pytest.raises((ValueError, OSError)) as error:
            hw.load_trace(path)
        assert "Traceback" not in str(error.value)
