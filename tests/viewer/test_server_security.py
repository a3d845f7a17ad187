"""What others cannot reach or make the server do, on every route: each line of the threat model of
docs/view.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.routing import Route
from starlette.testclient import TestClient

import headwise as hw
from headwise.hub import model_names, pretrained_models
from headwise.observe import bundled_sample
from headwise.viewer import model_actions, open_model
from headwise.viewer.model_worker import Job, JobProgress, ModelWorker
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import (
    ALL_JOBS,
    SecurityMiddleware,
    ServerAddress,
    ViewServer,
    allowed_hosts,
    serve,
)
from hostile.hostile_requests import HOST, STATIC, TOKEN
from viewer.page_models import GPT

STRANGERS = [
    ({"Host": "evil.example:8000"}, 421),
    ({"Host": "127.0.0.1:8001"}, 421),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
]


@pytest.fixture
def opened() -> OpenModel:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, 37), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids), net)


@pytest.fixture
def server(opened: OpenModel) -> Iterator[ViewServer]:
    view = ViewServer(opened, STATIC)
    yield view
    view.worker.close()


def make_client(server: ViewServer, **headers: str) -> TestClient:
    app = SecurityMiddleware(server.app(), allowed_hosts("127.0.0.1", 8000), TOKEN)
    return TestClient(
        app, base_url=f"http://{HOST}", headers=headers, raise_server_exceptions=False
    )


def routes(server: ViewServer) -> list[tuple[str, str]]:
    """The method and an address of every route."""
    found = [route for route in server.app().routes if isinstance(route, Route)]
    assert len(found) >= 18
    names = {"job": "x", "path": "app.js"}
    return [
        (method, re.sub(r"\{(\w+)[^}]*\}", lambda match: names[match[1]], route.path))
        for route in found
        for method in (route.methods or set())
    ]


def test_every_route_refuses_strangers(server: ViewServer):
    """Files, answers, event streams and jobs alike: other hosts, origins and sites get a status and
    nothing else.
    """
    client = make_client(server, **{"X-Session-Token": TOKEN})
    for method, path in routes(server):
        for headers, status in STRANGERS:
            answer = client.request(method, path, headers=headers)
            assert (answer.status_code, answer.content) == (status, b""), (method, path, headers)


def test_every_route_of_the_interface_needs_the_token(server: ViewServer):
    client = make_client(server)
    for method, path in routes(server):
        answer = client.request(method, path)
        assert answer.status_code == (401 if path.startswith("/api/") else 200), (method, path)
        assert (
            client.request(method, f"{path}?token={TOKEN}").status_code == answer.status_code
        )  # not in the address


def test_no_answer_allows_other_origins(server: ViewServer):
    client = make_client(server, **{"X-Session-Token": TOKEN, "Origin": f"http://{HOST}"})
    for method, path in routes(server):
        headers = client.request(method, path).headers
        assert not [name for name in headers if name.startswith("access-control-")]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert "unsafe" not in headers["content-security-policy"]
    assert client.options("/api/document").status_code == 405  # no preflight succeeds


def test_the_token_is_long_random_and_in_the_fragment(opened, monkeypatch):
    import uvicorn

    configs: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **_: configs.append(self.config))
    monkeypatch.setattr("headwise.viewer.server.read_static_files", lambda: STATIC)
    found: list[ServerAddress] = []
    for _ in range(2):
        serve(opened, on_start=found.append)
    assert found[0].token != found[1].token
    assert len(found[0].token) >= 43  # 256 bits in base 64
    assert found[0].url.partition("#")[2] == f"token={found[0].token}"
    assert found[0].host == "127.0.0.1"
    assert {(config.access_log, config.log_level) for config in configs} == {(False, "error")}


@pytest.mark.parametrize("kind", sorted(ALL_JOBS))
def test_no_job_loads_what_a_request_names(server, opened, kind, tmp_path, monkeypatch):
    """Models are named on the command line only: no field of a request reaches
    a loader or the Hub.
    """
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\ndef make(): ...")
    for module, name in (
        (open_model, "load_target"),
        (pretrained_models, "find_model"),
        (model_names, "find_model"),
        (model_names, "fetch_model"),
        (model_names, "call_factory"),
    ):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a request has named a model"))
    name = f"{tmp_path / 'evil.py'}:make"
    names = (
        "model",
        "target",
        "path",
        "other",
        "factory",
        "folder",
        "source",
        "with",
        "form",
        "name",
    )
    arguments: dict[str, Any] = dict.fromkeys(names, name)
    job = Job(kind, arguments)
    with suppress(ValueError):  # most kinds refuse such fields; those that run do without them
        ALL_JOBS[kind](opened, job.arguments, JobProgress(job, max_seconds=5))
    assert not ran.exists()
    assert opened.target == ""


def test_a_name_of_a_new_folder_stays_inside_the_output_folder(opened: OpenModel, tmp_path: Path):
    opened.output_folder = tmp_path / "out"
    for name in ("../evil", "/tmp/evil", "a/b", "..", ".", "", "a\x00b", "~", "con\n"):
        job = Job("prune", {"heads": [[0, 0]], "name": name, "texts": ["a", "b"]})
        with pytest.raises(ValueError, match=r"\S"):
            ALL_JOBS["prune"](opened, job.arguments, JobProgress(job))
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["out"])


# --- what a model does to the server --------------------------------------------------------------


def run_failing(opened: OpenModel, failure: BaseException) -> dict[str, Any]:
    """The last event of a job that fails so, run by a worker that must survive it."""

    def fail(*_: Any) -> None:
        raise failure

    worker = ModelWorker(opened, {"fail": fail, "work": lambda *_: {"done": True}})
    try:
        failed, after = worker.submit("fail", {}), worker.submit("work", {})
        for job in (failed, after):
            while not job.has_ended:
                assert worker._thread.is_alive()
        assert after.state == "done"
        return failed.events[-1]
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("failure", "fact"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (MemoryError(), "the memory of this machine does not suffice"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "the memory of this machine",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "the memory of this machine"),
    ],
)
def test_a_worker_survives_any_failure(opened: OpenModel, failure: BaseException, fact: str):
    event = run_failing(opened, failure)
    assert event["state"] == "failed"
    assert event["error"]["fact"].startswith(fact)


def test_a_run_that_takes_too_much_memory_is_refused_with_the_number(monkeypatch):
    """The first layer that does not fit stops the run."""
    net = bundled_sample.load_sample_model()
    monkeypatch.setattr(model_actions, "CAPTURE_BUDGET", 1000)
    with pytest.raises(
        ValueError, match=r"takes at least .*, beyond a budget of 1\.00 kB; .*fewer tokens"
    ):
        model_actions.capture_trace(net, "2026-11-20", bundled_sample.SOURCE, 64)


def test_the_server_needs_no_module_that_fetches(server: ViewServer):
    """A page of a trace sends nothing: the client libraries of the Hub are not even loaded by the
    server.
    """
    fetching = "('requests', 'httpx', 'huggingface_hub')"
    program = (
        f"import sys, headwise.viewer.server; print([name for name in {fetching} if name in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
