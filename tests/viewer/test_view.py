"""`hw.view`: one HTML file, a sandboxed frame in notebooks, the browser, and weights of other libraries."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.traces import Trace
from headwise.viewer import export_answers, html_export, notebook_widget, view
from headwise.viewer.bundled_sample import SOURCE, TRACE, load_sample_trace
from headwise.viewer.html_export import PageAssets, render_html

CHROMIUM = shutil.which("chromium")
HOSTILE = [
    "</script><script>document.title='hacked'</script>",
    "<img src=x onerror=document.title='hacked'>",
    "\u202ex",
]
# Writes the tokens as text, and tries what a page must not do: a request, an inline script, code from a string.
PROBE_SCRIPT = """
const data = JSON.parse(document.getElementById("headwise-data").textContent);
const seen = [];
addEventListener("securitypolicyviolation", event => seen.push(event.effectiveDirective));
const app = document.getElementById("app");
for (const word of data.words) app.append(Object.assign(document.createElement("p"), { textContent: word }));
const inline = document.createElement("script");
inline.textContent = "document.title = 'hacked'";
document.body.append(inline);
try { eval("document.title = 'hacked'"); } catch { seen.push("eval"); }
fetch("http://127.0.0.1:9/").catch(() => {}).finally(() => setTimeout(() => {
  app.append(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(seen.sort()) }));
}, 50));
"""


class FakePage:
    """What is open, with the answers that an export asks for."""

    def __init__(self, trace: Trace, **options: Any) -> None:
        self.trace, self.options = trace, options
        self.name = str(trace.model["name"])

    def document(self) -> dict[str, Any]:
        return {"version": 1, "readOnly": False, "streams": {"text": list(self.trace.streams["text"][0].words)}}

    def thumbnails(self) -> bytes:
        return b"thumbnails"

    def measures(self) -> bytes:
        return b"measures"

    def tile(self, site: int, head: int, rows: int, columns: int) -> bytes:
        return f"tile {site} {head} {rows} {columns}".encode()


class FakeModel(FakePage):
    """A model that is open with a text."""

    def __init__(self, model: torch.nn.Module, text: str, **options: Any) -> None:
        super().__init__(load_sample_trace(), **options)
        self.model, self.text = model, text

    @classmethod
    def from_trace(cls, trace: Trace, load: Any, **options: Any) -> FakePage:
        return FakePage(trace, load=load, **options)


class Serving:
    """Stands for the module of the server, and records how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def serve(self, *call: Any) -> None:
        self.calls.append(call)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Serving:
    serving = Serving()
    opened = types.ModuleType("headwise.viewer.open_model")
    opened.__dict__.update(OpenTrace=FakePage, OpenModel=FakeModel)
    served = types.ModuleType("headwise.viewer.server")
    served.__dict__["serve"] = serving.serve
    monkeypatch.setitem(sys.modules, opened.__name__, opened)
    monkeypatch.setitem(sys.modules, served.__name__, served)
    monkeypatch.setattr(html_export, "load_assets", lambda: PageAssets("1", "a{}"))
    return serving


def exported_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="headwise-data">(.*?)</script>', page)
    assert match is not None
    return json.loads(match[1])


def test_an_export_holds_everything_that_is_open(tmp_path: Path):
    path = tmp_path / "a.html"
    assert cli.main(["view", str(TRACE), "--export", str(path)]) == 0
    data, trace = exported_data(path.read_text(encoding="utf-8")), load_sample_trace()
    answers = data["answers"]
    assert answers["/api/document"]["readOnly"]
    assert base64.b64decode(answers["/api/thumbnails"]["base64"]) == b"thumbnails"
    assert base64.b64decode(answers["/api/tile?site=8&head=5"]["base64"]) == b"tile 8 5 256 256"
    for number, layer in enumerate(trace.layers):
        for head in range(layer.heads):
            stored = data["weights"][f"{number}/{head}"]
            weights = np.frombuffer(base64.b64decode(stored["base64"]), "<f4").reshape(stored["shape"])
            np.testing.assert_array_equal(weights, trace.head_weights(layer.name, head))


def test_many_weights_are_left_out_of_an_export(monkeypatch: pytest.MonkeyPatch):
    trace = load_sample_trace()
    count = sum(trace.head_weights(layer.name, 0).size * layer.heads for layer in trace.layers)
    assert export_answers.count_bytes(trace) == 4 * count
    monkeypatch.setattr(export_answers, "EXACT_BYTES", 4 * count - 1)
    assert export_answers.collect_answers(FakePage(trace))["weights"] == {}


def test_one_line_with_the_address(
    server: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    assert cli.main(["view", "--no-browser", "--read-only"]) == 0
    out, err = capsys.readouterr()
    match = re.fullmatch(r"dates: http://127\.0\.0\.1:(\d+)/#token=([\w-]{43})  \(Ctrl\+C stops it\)\n", out)
    assert match is not None
    assert (err, opened) == ("", [])
    ((page, host, port, token),) = server.calls
    assert (host, port, token) == ("127.0.0.1", int(match[1]), match[2])
    assert page.options["out"] is None
    assert "load" in page.options  # the model of the sample is opened when it is first needed


def test_tokens_are_new_each_time(server: Serving):
    for _ in range(2):
        assert cli.main(["view", str(TRACE), "--no-browser"]) == 0
    assert len({call[3] for call in server.calls}) == 2


def test_models_open_with_their_texts(tmp_path: Path):
    page = view.open_target(view.Target(None, "20 November", SOURCE, tmp_path))
    assert isinstance(page, FakeModel)
    assert (page.text, page.options) == ("20 November", {"source": SOURCE, "out": tmp_path})
    assert not page.model.training
    (tmp_path / "a.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 3)")
    lines: list[str] = []
    made = view.open_target(view.Target(f"{tmp_path / 'a.py'}:make"), lines.append)
    assert isinstance(made, FakeModel)
    assert (made.text, type(made.model)) == (view.DEFAULT_TEXT, torch.nn.Linear)
    assert lines == [f"running make of {tmp_path / 'a.py'}"]
    assert isinstance(hw.view(torch.nn.Linear(2, 3), "a").opened, FakeModel)


def test_a_page_that_is_not_built_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def missing() -> PageAssets:
        raise ValueError(html_export.NOT_BUILT)

    monkeypatch.setattr(html_export, "load_assets", missing)
    assert cli.main(["view", str(TRACE), "--no-browser"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "run: make web" in err


def test_remote_hosts_are_warned_about(server: Serving, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["view", str(TRACE), "--no-browser", "--host", "0.0.0.0", "--allow-remote"]) == 0
    assert "anyone who can reach 0.0.0.0" in capsys.readouterr().err
    assert server.calls[0][1] == "0.0.0.0"


def test_without_a_display_no_browser_is_opened(monkeypatch: pytest.MonkeyPatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not view.has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(view.webbrowser, "get", lambda: None)
    assert view.has_browser()


def test_the_browser_opens_when_the_server_answers(monkeypatch: pytest.MonkeyPatch):
    import socket

    opened = threading.Event()
    monkeypatch.setattr(view, "has_browser", lambda: True)
    monkeypatch.setattr(view.webbrowser, "open", lambda _: opened.set())
    port = view.find_port("127.0.0.1", 0)
    threading.Thread(target=view._open_when_ready, args=("127.0.0.1", port, "address"), daemon=True).start()
    assert not opened.wait(0.2)
    with socket.create_server(("127.0.0.1", port)):
        assert opened.wait(5)


def test_a_notebook_shows_a_sandboxed_frame():
    page = hw.view(load_sample_trace())
    frame = page._repr_html_()
    match = re.fullmatch(
        r'<iframe title="heads of dates" sandbox="allow-scripts" srcdoc="([^"]*)" style="[^"]*"></iframe>', frame
    )
    assert match is not None
    assert html.unescape(match[1]) == page.html
    assert page._repr_mimebundle_()["text/html"] == frame


def test_the_widget_of_anywidget(monkeypatch: pytest.MonkeyPatch):
    """A widget with the page; the libraries are stood for by the classes that are used of them."""

    class Trait:
        def __init__(self, default: Any) -> None:
            self.default, self.options = default, {}

        def tag(self, **options: bool) -> Trait:
            self.options = options
            return self

    class AnyWidget:
        def __init__(self, **values: Any) -> None:
            self.values = values

        def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
            return {"application/vnd.jupyter.widget-view+json": self.values}

    for name, content in (("anywidget", {"AnyWidget": AnyWidget}), ("traitlets", {"Unicode": Trait, "Int": Trait})):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        module.__spec__ = types.SimpleNamespace(name=name)  # what find_spec returns for a loaded module
        monkeypatch.setitem(sys.modules, name, module)
    page = hw.view(load_sample_trace())
    (values,) = page._repr_mimebundle_().values()
    assert values == {"page": page.html, "height": notebook_widget.FRAME_HEIGHT}
    widget = type(notebook_widget.make_widget("a"))
    assert widget.page.options == {"sync": True}
    assert 'setAttribute("sandbox", "allow-scripts")' in widget._esm


def test_weights_in_the_format_of_bertviz():
    attention = [torch.softmax(torch.randn(1, 3, 5, 5), -1) for _ in range(2)]
    page = hw.view_attention(attention, list("abcde"))
    np.testing.assert_array_equal(page.opened.trace.head_weights(1, 2), attention[1][0, 2].numpy())
    cross = [torch.softmax(torch.randn(1, 3, 5, 7), -1)]
    both = hw.view_attention(attention, list("abcde"), cross_attention=cross, encoder_tokens=list("ABCDEFG"))
    assert [layer.name for layer in both.opened.trace.layers][-1] == "decoder.0.cross"
    with pytest.raises(ValueError, match="give a string for each token"):
        hw.view_attention(attention, list("abc"))


def test_a_text_for_a_trace_is_refused():
    with pytest.raises(ValueError, match="leave it out, or give the model"):
        hw.view(load_sample_trace(), SOURCE)


@pytest.mark.skipif(CHROMIUM is None and not os.environ.get("REQUIRE_BROWSER"), reason="there is no chromium")
@pytest.mark.lengthy
def test_a_browser_keeps_hostile_tokens_as_text_and_runs_nothing_else(tmp_path: Path):
    """Opened from the disk by Chromium: the page's own script runs; other scripts, eval and requests do not."""
    assert CHROMIUM is not None
    page = render_html({"words": HOSTILE}, "probe", PageAssets(PROBE_SCRIPT, "p{margin:0}"))
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    result = subprocess.run(
        [CHROMIUM, *switches, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'a.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = [html.unescape(word) for word in re.findall(r"<p>(.*?)</p>", result.stdout, re.DOTALL)]
    assert shown == HOSTILE
    assert "<title>probe · headwise</title>" in result.stdout
    blocked = json.loads(html.unescape(re.findall(r"<pre>(.*?)</pre>", result.stdout)[0]))
    assert {"connect-src", "eval", "script-src-elem"} <= set(blocked)
