"""Every route of the page answers hostile requests; every command refuses hostile arguments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwise import cli
from headwise.viewer.server import ViewServer
from hostile import hostile_requests
from hostile.hostile_runs import FEW, MANY, count_inputs

RUNS = [pytest.param(FEW, marks=pytest.mark.lengthy), pytest.param(MANY, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def view() -> Iterator[ViewServer]:
    server = hostile_requests.open_page()
    yield server
    server.worker.close()


@pytest.mark.parametrize("count", RUNS)
def test_the_page_answers_hostile_requests(view: ViewServer, count: int):
    client = hostile_requests.page_client(view)
    statuses = set[int]()
    requests = hostile_requests.page_requests(view)
    tried = count_inputs(
        requests,
        lambda request: statuses.add(hostile_requests.check_page_answer(client, request)),
        count,
        seed=count,
    )
    assert tried >= count
    assert statuses >= {200, 400, 404}  # some requests were good ones


@pytest.mark.parametrize("count", RUNS)
def test_jobs_of_the_page_end(view: ViewServer, count: int):
    client, states = hostile_requests.page_client(view), set[str]()
    tried = count_inputs(
        hostile_requests.job_bodies(),
        lambda body: states.add(hostile_requests.check_job(view, client, body)),
        count,
        seed=count,
    )
    assert tried >= count
    assert states >= {"refused", "failed", "done"}


@pytest.mark.parametrize("count", RUNS)
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_commands_refuse_hostile_arguments(command, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile_requests.load_all()
    codes = set[int]()
    tried = count_inputs(
        hostile_requests.command_lines(command),
        lambda argv: codes.add(hostile_requests.check_command(argv)),
        count,
        seed=count,
    )
    assert tried >= count
    assert 2 in codes
