"""Hostile requests for every route of the page, and hostile arguments for every command."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import time
from importlib import import_module
from typing import Any
from unittest import mock
from urllib.parse import quote

import torch
from hypothesis import strategies as st
from starlette.routing import Route
from starlette.testclient import TestClient

import headwise as hw
from headwise import cli
from headwise.cli.options import CommandParser
from headwise.hub.transformers_loading import attach_tokenizer
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import ALL_JOBS, SecurityMiddleware, ViewServer, allowed_hosts
from hostile.hostile_values import DOCUMENTS, NUMBERS, TEXTS, texts_of, time_limit
from support.tiny_configs import model_config

HOST, TOKEN = "127.0.0.1:8000", "a-secret"
STATIC = {"/index.html": (b"<!doctype html>", "text/html"), "/app.js": (b"1", "text/javascript")}
SMALL = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=256, n_positions=64)
MAX_REQUEST_SECONDS = 20.0
Request = dict[str, Any]

# --- The page -------------------------------------------------------------------------------------

PARAMETERS, JOB_ARGUMENTS = DOCUMENTS["page_parameters"], DOCUMENTS["job_arguments"]
QUERY_VALUES = st.one_of(
    st.sampled_from(NUMBERS).map(str), st.sampled_from(TEXTS), st.text(max_size=6)
)


def open_page() -> ViewServer:
    """Return the page of a small model with a trace."""
    net = hw.build(hw.families.read_model_spec(SMALL), seed=0).eval()
    attach_tokenizer(net, "bytes")
    ids = torch.randint(0, 256, (1, 17), generator=torch.Generator().manual_seed(0))
    return ViewServer(OpenModel(hw.trace(net, ids), net), STATIC)


def page_client(view: ViewServer) -> TestClient:
    """Return a client that knows the token; errors of the server are answers."""
    app = SecurityMiddleware(view.app(), allowed_hosts("127.0.0.1", 8000), TOKEN)
    headers = {"X-Session-Token": TOKEN}
    return TestClient(
        app, base_url=f"http://{HOST}", headers=headers, raise_server_exceptions=False
    )


def page_routes(view: ViewServer) -> list[tuple[str, str]]:
    """Return method and path of every route but that of jobs, whose bodies have
    their own strategy.
    """
    routes = [route for route in view.app().routes if isinstance(route, Route)]
    pairs = [
        (method, route.path)
        for route in routes
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]
    return [pair for pair in pairs if pair != ("POST", "/api/jobs")]


def page_requests(view: ViewServer) -> st.SearchStrategy[Request]:
    """Draw requests for the routes: some known parameters, some of them with hostile values."""

    @st.composite
    def draw_request(draw: st.DrawFn) -> Request:
        method, path = draw(st.sampled_from(page_routes(view)))
        segment = quote(draw(QUERY_VALUES).encode("utf-8", "replace"), safe="")
        path = re.sub(r"\{\w+[^}]*\}", lambda _: segment, path)
        valid = {
            name: str(draw(st.sampled_from(values)))
            for name, values in PARAMETERS.items()
            if draw(st.booleans())
        }
        names = draw(st.lists(st.sampled_from([*PARAMETERS, "other"]), max_size=3))
        hostile = {name: draw(QUERY_VALUES) for name in names}
        parameters = {
            name: value.encode("utf-8", "replace").decode()
            for name, value in (valid | hostile).items()
        }
        return {"method": method, "url": path, "params": parameters}

    return draw_request()


def job_bodies() -> st.SearchStrategy[bytes]:
    """Draw bodies of jobs: mostly a known kind with changed arguments."""
    seeds = [{"kind": kind} | JOB_ARGUMENTS for kind in ALL_JOBS]
    few = [
        {"kind": kind} | {name: JOB_ARGUMENTS[name] for name in list(JOB_ARGUMENTS)[n % 5 :: 5]}
        for n, kind in enumerate(ALL_JOBS)
    ]
    return texts_of([*seeds, *few]).map(lambda text: text.encode("utf-8", "surrogatepass"))


def check_page_answer(client: TestClient, request: Request) -> int:
    """Raise AssertionError if the page answers a request with an internal error or too late; return
    the status.
    """
    with time_limit(MAX_REQUEST_SECONDS):
        answer = client.request(**request)
    assert answer.status_code < 500, (request, answer.text[:500])
    return answer.status_code


def check_job(view: ViewServer, client: TestClient, body: bytes) -> str:
    """Submit a job and wait for its end; raises if it fails with an error that is no refusal."""
    with time_limit(MAX_REQUEST_SECONDS):
        answer = client.post(
            "/api/jobs", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code < 500, (body, answer.text[:500])
    if answer.status_code != 200:
        return "refused"
    job, end = view.worker.jobs[answer.json()["job"]], time.monotonic() + MAX_REQUEST_SECONDS
    while not job.has_ended and time.monotonic() < end:
        time.sleep(0.001)
    assert job.has_ended, body
    error = job.events[-1].get("error", {})
    assert not re.match(r"[A-Z]\w*(Error|Exception)\b", error.get("fact", "")), (body, error)
    return job.state


# --- Commands -------------------------------------------------------------------------------------

# A command gets one of these, so that no run begins: what it reads is not there, or is no model.
NOTHING = (
    "no-such-thing",
    "/dev/null",
    "",
    "\x00",
    "a" * 300,
    "../..",
    "-",
    "no\nmodel",
    "{}",
    "gqa.toml",
)
QUICK = (
    *("spec", "cost", "walk", "why", "sites"),
)  # they answer at once, so that presets in hostile sizes are tried too
TIMED_OPTIONS = ("--measure",)  # measures this machine for seconds before it reads anything
STARTS_WITHOUT_INPUT = ("demo", "learn")
ARGUMENTS = st.one_of(
    st.sampled_from(NUMBERS).map(str),
    st.sampled_from(TEXTS),
    st.sampled_from(
        ("heads.kv=2", "model=7", "heads.q=65537", "a=b", "0.5", "4", "8", "16", "causal()", "bf16")
    ),
)


def list_options(command: str) -> list[argparse.Action]:
    """Return the options of a command."""
    found: list[CommandParser] = []
    whole = CommandParser.parse_known_args

    def keep(parser: CommandParser, *args: Any, **kwargs: Any) -> Any:
        found.append(parser)
        return whole(parser, *args, **kwargs)

    with mock.patch.object(CommandParser, "parse_known_args", keep):
        run_command([command, "--list-options"])
    return [action for action in found[0]._actions if action.option_strings]


def command_lines(command: str) -> st.SearchStrategy[list[str]]:
    """Draw arguments of a command: its options with hostile values, in any order."""
    options = [action.option_strings[-1] for action in list_options(command)]
    options = [option for option in options if option not in TIMED_OPTIONS]
    presets = ["gqa", "mla", "entmax", "gpt2"] if command in QUICK else []

    @st.composite
    def draw_arguments(draw: st.DrawFn) -> list[str]:
        is_preset = bool(presets) and draw(st.booleans())
        words = [
            draw(st.sampled_from(presets if is_preset else NOTHING))
            for _ in range(draw(st.integers(1, 2)))
        ]
        for _ in range(draw(st.integers(0, 4))):
            option = draw(st.sampled_from([*options, "--no-such-option"]))
            words += [option] if draw(st.integers(0, 3)) == 0 else [option, draw(ARGUMENTS)]
        words += ["--no-such-option"] if command in STARTS_WITHOUT_INPUT else []
        return [command, *words]

    return draw_arguments()


def run_command(argv: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it wrote to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
    return code, err.getvalue()


def check_command(argv: list[str]) -> int:
    """Raise AssertionError unless a command succeeds, or refuses its arguments in one line; return
    the exit code.
    """
    with time_limit(MAX_REQUEST_SECONDS):
        code, err = run_command(argv)
    assert code in (0, 1, 2), (argv, code, err[:500])
    if code == 2:
        assert err.startswith("headwise: "), (argv, err[:500])
        assert err.count("\n") == 1, (argv, err[:500])
    return code


def load_all() -> None:
    """Import every command, so that no time limit covers an import."""
    for command in cli.COMMANDS:
        import_module(f"headwise.cli.{cli.MODULES.get(command, command)}")
