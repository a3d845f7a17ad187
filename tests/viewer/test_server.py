"""The server of the page: its answers equal the trace, and requests that may not be answered are
refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import headwise as hw
from headwise.observe.traces import load_trace, save_trace, trace_from_weights
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import (
    MAX_BODY_BYTES,
    SecurityMiddleware,
    ViewServer,
    allowed_hosts,
    serve,
)
from hostile.hostile_requests import HOST, STATIC, TOKEN
from viewer.binary_messages import decode_arrays
from viewer.page_browser import examples_of_ids
from viewer.page_models import GPT


@pytest.fixture
def opened() -> OpenModel:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, 37), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net)


@pytest.fixture
def server(opened: OpenModel) -> Iterator[ViewServer]:
    view = ViewServer(opened, STATIC)
    yield view
    view.worker.close()


@pytest.fixture
def client(server: ViewServer) -> TestClient:
    app = SecurityMiddleware(server.app(), allowed_hosts("127.0.0.1", 8000), TOKEN)
    return TestClient(app, base_url=f"http://{HOST}", headers={"X-Session-Token": TOKEN})


def arrays(client: TestClient, path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return decode_arrays(answer.content)


def run_job(client: TestClient, **arguments: Any) -> dict[str, Any]:
    """Run a job to its end; returns its last event with its result."""
    job = client.post("/api/jobs", json=arguments).json()["job"]
    lines = client.get(f"/api/jobs/{job}/events").text.splitlines()
    last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
    return last | {"result": client.get(f"/api/jobs/{job}/result").json()}


# --- answers --------------------------------------------------------------------------------------


def test_the_document_describes_the_model_and_the_tokens(client: TestClient):
    document = client.get("/api/document").json()
    assert [site["heads"] for site in document["sites"]] == [3, 3]
    assert document["sites"][1]["numQueries"] == 37
    assert len(document["streams"]["text"][0]["words"]) == 37
    assert document["kind"] == "model"
    assert document["sites"][0]["abilities"]["ablate"] == {"possible": True, "reason": ""}


def test_a_row_holds_the_exact_weights(client: TestClient, opened: OpenModel):
    expected = opened.get_trace().head_weights(opened.heads[4][0], 1)
    _, found = arrays(client, "/api/row?site=1&head=1&query=9")
    assert np.array_equal(
        found["weights"], opened.get_trace().head_weights(opened.heads[4][0], 1, slice(9, 10))[0]
    )
    np.testing.assert_allclose(found["weights"], expected[9], rtol=1e-5)
    assert found["masked"].tolist() == [0] * 10 + [1] * 27
    _, found = arrays(client, "/api/column?site=1&head=1&key=5")
    assert np.array_equal(found["weights"], expected[:, 5])


def test_a_tile_is_the_largest_weight_of_each_cell(client: TestClient, opened: OpenModel):
    expected = opened.get_trace().head_weights(opened.heads[0][0], 0)
    header, found = arrays(client, "/api/tile?site=0&head=0&q0=2&q1=34&k0=1&k1=33&rows=8&cols=16")
    cells = expected[2:34, 1:33].reshape(8, 4, 16, 2).max((1, 3))
    # rounded up, so that no weight disappears
    expected = np.round(cells / np.float32(header["scale"]) * np.float32(255))
    assert np.array_equal(found["weights"], expected)
    allowed = np.tril(np.ones((37, 37), bool))[2:34, 1:33].reshape(8, 4, 16, 2).any((1, 3))
    assert np.array_equal(found["masked"] == 0, allowed)
    assert (header["q0"], header["k1"]) == (2, 33)


def test_the_effect_is_the_norm_of_what_a_key_adds_to_the_output(client, opened):
    site = opened.heads[0][0]
    layer = opened.get_trace().get_layer(site)
    net: Any = opened.model
    output = net.state_dict()["decoder.0.attention.output.o"].T.reshape(3, 4, 12)[2].numpy()
    values = layer.arrays["v"][0, :, 2] @ output
    expected = opened.get_trace().head_weights(site, 2)[20] * np.linalg.norm(values, axis=-1)
    _, found = arrays(client, "/api/row?site=0&head=2&query=20&lens=effect")
    np.testing.assert_allclose(found["weights"], expected, rtol=1e-4, atol=1e-6)


def test_thumbnails_come_in_the_order_of_the_heads(client: TestClient, opened: OpenModel):
    _, found = arrays(client, "/api/thumbnails")
    assert found["thumbnails"].shape == (6, 64, 64)
    picture = opened.get_trace().weight_tile(opened.heads[5][0], 2, size=(64, 64))
    index = np.arange(64) * 37 // 64
    assert np.array_equal(found["thumbnails"][5], picture[index[:, None], index])


def test_marginals_are_means_over_allowed_pairs(client: TestClient, opened: OpenModel):
    weights = opened.get_trace().head_weights(opened.heads[0][0], 0)
    header, found = arrays(client, "/api/marginals?site=0&head=0")
    assert header["first"] == -36
    for offset in range(37):
        assert found["by_offset"][offset - header["first"]] == pytest.approx(
            np.diagonal(weights, -offset).mean(), abs=1e-6
        )
    assert not found["by_offset"][: -header["first"]].any()
    queries_of_key = np.arange(37, 0, -1)  # the queries from a key on may attend to it
    assert np.abs(found["received"] - weights.sum(0) / queries_of_key).max() < 1e-6
    assert np.abs(found["maximum"] - weights.max(1)).max() < 1e-6
    logs = np.log(np.where(weights > 0, weights, 1))
    assert np.abs(found["entropy"] + (weights * logs).sum(1)).max() < 1e-5


def test_the_peak_of_a_part_is_exact(client: TestClient, opened: OpenModel):
    weights = opened.get_trace().head_weights(opened.heads[4][0], 1)
    _, found = arrays(client, "/api/peak?site=1&head=1&q0=8&q1=24&k0=0&k1=16")
    query, key = np.unravel_index(weights[8:24, :16].argmax(), (16, 16))
    assert found["place"].tolist() == [8 + query, key]
    assert found["weight"][0] == weights[8 + query, key]


def test_thumbnails_come_with_the_masks_that_heads_share(client: TestClient):
    _, found = arrays(client, "/api/thumbnails")
    assert found["masks"].shape == (1, 64, 64)
    assert found["mask_of_head"].tolist() == [0] * 6
    position = np.arange(64) * 37 // 64
    assert np.array_equal(found["masks"][0].astype(bool), position[None] > position[:, None])


def test_one_query_in_all_heads(client: TestClient, opened: OpenModel):
    header, found = arrays(client, "/api/rows?query=30")
    assert header["heads"] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    np.testing.assert_allclose(
        found["weights"][4], opened.get_trace().head_weights(opened.heads[4][0], 1)[30], rtol=1e-5
    )


# --- jobs -----------------------------------------------------------------------------------------


def test_measures_are_those_of_the_library(client, opened, monkeypatch):
    reader = hw.ExampleReader(opened.model)
    monkeypatch.setattr(
        "headwise.viewer.model_actions.make_examples",
        lambda *_: examples_of_ids(opened, opened.get_trace()),
    )
    assert reader.examples == []
    ended = run_job(client, kind="measure")
    assert ended["state"] == "done", ended
    header, found = arrays(client, "/api/measures")
    assert found["measures"].shape == (6, len(header["names"]), 4)
    row = opened.get_trace().head_weights(opened.heads[3][0], 0).astype(np.float64)
    entropy = -(row * np.log(np.where(row > 0, row, 1))).sum(-1)
    assert found["measures"][3, header["names"].index("entropy"), 0] == pytest.approx(
        entropy.mean(), rel=0.2
    )
    assert np.isnan(found["measures"][..., 1]).all()  # one text has no intervals


def test_a_job_that_fails_is_reported_and_ends_nothing(client: TestClient):
    ended = run_job(client, kind="text", text="   ")
    assert ended["state"] == "failed"
    assert ended["error"] == {"fact": "the text is empty", "remedy": "enter at least one word"}
    assert client.get("/api/document").status_code == 200


def test_a_job_is_cancelled(client: TestClient, server: ViewServer):
    def endless(_: OpenModel, __: Any, progress: Any) -> None:
        for step in range(10**6):
            time.sleep(0.01)
            progress(step, 10**6)

    server.worker.job_kinds = {"endless": endless}
    job = client.post("/api/jobs", json={"kind": "endless"}).json()["job"]
    assert client.get(f"/api/jobs/{job}/result").status_code == 409
    assert client.delete(f"/api/jobs/{job}").status_code == 200
    assert '"cancelled"' in client.get(f"/api/jobs/{job}/events").text


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:8000"}, 421),
        ({"Host": "127.0.0.1:9000"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"https://{HOST}"}, 403),
        ({"Origin": f"http://{HOST}"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"X-Session-Token": ""}, 401),
        ({"X-Session-Token": TOKEN + "x"}, 401),
    ],
)
def test_requests_of_others_are_refused(client: TestClient, headers: dict[str, str], status: int):
    answer = client.get("/api/document", headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert answer.content == b""


def test_answers_forbid_what_the_page_does_not_need(client: TestClient):
    for path in ("/", "/api/document", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/%2e%2e/pyproject.toml", "//etc/passwd"])
def test_no_other_file_is_served(client: TestClient, path: str):
    assert client.get(path).status_code == 404


def test_bodies_are_limited(client: TestClient):
    assert (
        client.post("/api/jobs", json={"kind": "text", "text": "x" * MAX_BODY_BYTES}).status_code
        == 413
    )

    def parts() -> Iterator[bytes]:  # without a length
        yield from (b"x" * 2**16 for _ in range(20))

    answer = client.post("/api/jobs", content=parts(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert (
        client.post(
            "/api/jobs", content=b"kind=text", headers={"Content-Type": "text/plain"}
        ).status_code
        == 415
    )
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/api/jobs", content=b"kind=text", headers=form).status_code == 415


@pytest.mark.parametrize(
    "body", ["[]", "{", '{"kind": NaN}', '{"kind": 1e999}', "[" * 10**4, '{"kind": "reboot"}']
)
def test_bad_bodies_are_refused(client: TestClient, body: str):
    answer = client.post("/api/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"fact", "remedy"}


@pytest.mark.parametrize(
    "path",
    [
        "row?site=0&head=3&query=0",
        "row?site=2&head=0&query=0",
        "row?site=0&head=-1&query=0",
        "row?site=0&head=0&query=37",
        "row?site=0&head=0",
        "row?site=0&head=1e3&query=0",
        f"row?site=0&head={10**30}&query=0",
        "row?site=0&head=0&query=0&lens=x-ray",
        "tile?site=0&head=0&rows=1025",
        "tile?site=0&head=0&q0=5&q1=5",
        "marginals?site=0&head=9",
        "column?site=0&head=0&key=99",
    ],
)
def test_numbers_out_of_range_are_refused(client: TestClient, path: str):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 400
    assert answer.json()["error"]["fact"]
    assert "/" not in answer.json()["error"]["fact"]


def test_a_trace_alone_shows_and_changes_nothing(tmp_path: Path):
    weights = np.random.default_rng(0).dirichlet(np.ones(4), (1, 2, 4))
    save_trace(trace_from_weights([weights], ["a", "<b>", "c", "d"]), tmp_path / "a.trace")
    view = ViewServer(OpenModel(load_trace(tmp_path / "a.trace")), STATIC)
    try:
        client = TestClient(
            SecurityMiddleware(view.app(), [HOST], TOKEN), base_url=f"http://{HOST}"
        )
        client.headers["X-Session-Token"] = TOKEN
        document = client.get("/api/document").json()
        assert document["kind"] == "trace"
        assert not document["capabilities"]["ablate"]["possible"]
        assert document["streams"]["text"][0]["words"][1] == "<b>"
        _, found = arrays(client, "/api/row?site=0&head=1&query=2")
        np.testing.assert_allclose(found["weights"], weights[0, 1, 2], rtol=1e-6)
        ended = run_job(client, kind="text", text="a b")
        assert "only a trace is open" in ended["error"]["fact"]
    finally:
        view.worker.close()


def test_a_host_that_others_reach_needs_consent(opened: OpenModel):
    with pytest.raises(ValueError, match="other machines could reach"):
        serve(opened, host="0.0.0.0")
