"""`hw.view`: one HTML file, a sandboxed frame in notebooks, the browser, and weights of other
libraries.
"""

from __future__ import annotations

import base64
import html
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.observe import bundled_sample
from headwise.observe.bundled_sample import SOURCE, TRACE, load_sample_trace
from headwise.observe.traces.attention_trace import Trace
from headwise.surgery.hf_export.model_folder import write_model_folder
from headwise.viewer import export_files, view
from headwise.viewer.export_files import PageAssets, render_html
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import ServerAddress
from headwise.viewer.weight_summaries import describe_measures, estimate_memory, stack_measures
from viewer.page_browser import exported_data, require_browser
from viewer.page_models import GPT

LOAD_ASSETS = export_files.load_assets


HOSTILE = [
    "</script><script>document.title='hacked'</script>",
    "<img src=x onerror=document.title='hacked'>",
    "\u202ex",
]


# Writes the tokens as text, and tries what a page must not do: a request, an inline script, code
# from a string.
PROBE_SCRIPT = """
const packed = document.getElementById("headwise-data").textContent;
const bytes = Uint8Array.from(atob(packed), sign => sign.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(stream).json().then(data => {
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
});
"""


class Serving:
    """Stands for `serve` of the server: announces an address, and records how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[OpenModel, dict[str, Any]]] = []

    def __call__(self, model: OpenModel, *, on_start: Any, **options: Any) -> None:
        self.calls.append((model, options))
        on_start(ServerAddress(options["host"], options["port"], "secret"))


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Serving:
    serving = Serving()
    monkeypatch.setattr("headwise.viewer.server.serve", serving)
    monkeypatch.setattr(export_files, "load_assets", lambda: PageAssets("1", "a{}"))
    return serving


def test_an_export_holds_everything_that_is_open(tmp_path: Path):
    path = tmp_path / "a.html"
    assert cli.main(["view", str(TRACE), "--export", str(path)]) == 0
    data, trace = exported_data(path.read_text(encoding="utf-8")), load_sample_trace()
    answers = data["answers"]
    assert answers["/api/document"]["readOnly"]
    assert {"/api/thumbnails", "/api/measures", "/api/tile?site=8&head=5"} <= set(answers)
    for number, layer in enumerate(trace.layers):
        for head in range(layer.heads):
            stored = data["weights"][f"{number}/{head}"]
            weights = np.frombuffer(base64.b64decode(stored["base64"]), "<f4").reshape(
                stored["shape"]
            )
            np.testing.assert_array_equal(weights, trace.head_weights(layer.name, head))


def test_an_export_of_a_model_has_measured_heads(tmp_path: Path):
    """The measures over the open text are those of the library, also of token ids."""
    opened = view.open_target(view.Target(None, "2026-11-20", "<iso>20 November 2026"))
    assert opened.own_table is None
    view.write_export(opened, tmp_path / "a.html")
    assert opened.own_table is not None
    assert len(opened.own_table.heads) == 54
    head, weights = (
        opened.own_table.heads[0],
        opened.get_trace().head_weights(opened.own_table.heads[0].site, 0),
    )
    entropy = float(-(weights * np.log(np.maximum(weights, 1e-30))).sum(1).mean())
    assert head.measures["entropy"].value == pytest.approx(entropy, abs=1e-4)
    net = hw.build(
        hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}),
        seed=0,
    )
    ids = OpenModel(hw.trace(net.eval(), torch.tensor([[3, 1, 4]])), net)
    view.write_export(ids, tmp_path / "b.html")
    data = exported_data((tmp_path / "b.html").read_text(encoding="utf-8"))
    assert data["answers"]["/api/document"]["warnings"] == []
    assert ids.own_table is not None
    assert len(ids.own_table.heads) == 2


def test_many_weights_are_left_out_of_an_export(monkeypatch: pytest.MonkeyPatch):
    trace = load_sample_trace()
    count = sum(trace.head_weights(layer.name, 0).size * layer.heads for layer in trace.layers)
    assert export_files.count_bytes(trace) == 4 * count
    monkeypatch.setattr(export_files, "EXACT_BYTES", 4 * count - 1)
    assert export_files.collect_answers(OpenModel(trace))["weights"] == {}


def test_one_line_with_the_address(server, capsys, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    assert cli.main(["view", "--no-browser", "--read-only"]) == 0
    out, err = capsys.readouterr()
    ((model, options),) = server.calls
    assert out == f"dates: http://127.0.0.1:{options['port']}/#token=secret  (Ctrl+C stops it)\n"
    assert (err, opened, options["host"]) == ("", [], "127.0.0.1")
    assert (model.read_only, model.output_folder) == (True, None)
    assert model.model is None  # the model of the sample is opened when it is first needed
    assert model.has_model


def test_models_open_with_their_texts(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    page = view.open_target(view.Target(None, "2026-11-20", "<iso>20 November 2026", tmp_path))
    rows = page.get_trace().streams
    assert (rows["source"][0].text, rows["text"][0].text) == ("<iso>20 November 2026", "2026-11-20")
    assert (page.output_folder, page.read_only) == (tmp_path, False)
    code = "import headwise as hw\ndef make():\n    return hw.load(FOLDER)"
    (tmp_path / "a.py").write_text(code.replace("FOLDER", repr(str(bundled_sample.MODEL))))
    opened = view.open_target(view.Target(f"{tmp_path / 'a.py'}:make", SOURCE))
    assert opened.has_model
    assert capfd.readouterr().err == f"headwise: running make of {tmp_path / 'a.py'}\n"
    assert hw.view(bundled_sample.load_sample_model(), SOURCE).opened.name == "dates"


def test_a_pruned_folder_says_which_heads_are_gone(tmp_path: Path):
    done = hw.prune(
        bundled_sample.load_sample_model(), hw.surgery.DropHeads((("decoder.1.attention", 2),))
    )
    write_model_folder(done.after, bundled_sample.MODEL, tmp_path / "small", done.data)
    opened = view.open_target(view.Target(str(tmp_path / "small"), "2026-11-20", SOURCE))
    pruned = {site["name"]: site["prunedHeads"] for site in opened.describe()["sites"]}
    assert {name: heads for name, heads in pruned.items() if heads} == {"decoder.1.attention": [2]}


def test_a_page_that_is_not_built_is_one_line(capsys, monkeypatch):
    def missing() -> PageAssets:
        raise ValueError(export_files.NOT_BUILT)

    monkeypatch.setattr(export_files, "load_assets", missing)
    assert cli.main(["view", str(TRACE), "--no-browser"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "run: make web" in err


def test_remote_hosts_are_warned_about(server: Serving, capsys: pytest.CaptureFixture[str]):
    assert (
        cli.main(["view", str(TRACE), "--no-browser", "--host", "0.0.0.0", "--allow-remote"]) == 0
    )
    assert "anyone who can reach 0.0.0.0" in capsys.readouterr().err
    assert server.calls[0][1]["host"] == "0.0.0.0"


def test_without_a_display_no_browser_is_opened(monkeypatch: pytest.MonkeyPatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not view.has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(view.webbrowser, "get", lambda: None)
    assert view.has_browser()


def test_a_mac_without_a_browser_shows_the_address_only(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise view.webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(view.webbrowser, "get", refuse)
    monkeypatch.setattr(view.webbrowser, "open", lambda _: pytest.fail("a browser was opened"))
    assert not view.has_browser()


def test_a_notebook_shows_a_sandboxed_frame():
    page = hw.view(load_sample_trace())
    frame = page._repr_html_()
    match = re.fullmatch(
        r'<iframe title="heads of dates" sandbox="allow-scripts allow-downloads" '
        r'srcdoc="([^"]*)" style="[^"]*"></iframe>',
        frame,
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

    for name, content in (
        ("anywidget", {"AnyWidget": AnyWidget}),
        ("traitlets", {"Unicode": Trait, "Int": Trait}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        module.__spec__ = types.SimpleNamespace(
            name=name
        )  # what find_spec returns for a loaded module
        monkeypatch.setitem(sys.modules, name, module)
    page = hw.view(load_sample_trace())
    (values,) = page._repr_mimebundle_().values()
    assert values == {"page": page.html, "height": view.FRAME_HEIGHT}
    widget = type(view.make_widget("a"))
    assert widget.page.options == widget.height.options == {"sync": True}
    assert 'setAttribute("sandbox", "allow-scripts allow-downloads")' in widget._esm


def test_weights_in_the_format_of_bertviz():
    attention = [torch.softmax(torch.randn(1, 3, 5, 5), -1) for _ in range(2)]
    page = hw.view_attention(attention, list("abcde"))
    np.testing.assert_array_equal(page.opened.trace.head_weights(1, 2), attention[1][0, 2].numpy())
    cross = [torch.softmax(torch.randn(1, 3, 5, 7), -1)]
    both = hw.view_attention(
        attention, list("abcde"), cross_attention=cross, encoder_tokens=list("ABCDEFG")
    )
    assert [layer.name for layer in both.opened.trace.layers][-1] == "decoder.0.cross"
    with pytest.raises(ValueError, match="give a string for each token"):
        hw.view_attention(attention, list("abc"))


def test_a_text_for_a_trace_is_refused():
    with pytest.raises(ValueError, match="leave it out, or give the model"):
        hw.view(load_sample_trace(), SOURCE)


@pytest.mark.lengthy
def test_a_browser_keeps_hostile_tokens_as_text_and_runs_nothing_else(tmp_path: Path):
    """Opened from the disk by Chromium: the page's own script runs; other scripts, eval and
    requests do not.
    """
    browser_path = require_browser()
    page = render_html({"words": HOSTILE}, "probe", PageAssets(PROBE_SCRIPT, "p{margin:0}"))
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    switches = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=3000",
        "--dump-dom",
    ]
    result = subprocess.run(
        [
            browser_path,
            *switches,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"file://{tmp_path / 'a.html'}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = [html.unescape(word) for word in re.findall(r"<p>(.*?)</p>", result.stdout, re.DOTALL)]
    assert shown == HOSTILE
    assert "<title>probe · headwise</title>" in result.stdout
    blocked = json.loads(html.unescape(re.findall(r"<pre>(.*?)</pre>", result.stdout)[0]))
    assert {"connect-src", "eval", "script-src-elem"} <= set(blocked)


@pytest.mark.lengthy
def test_the_page_works_in_the_frame_of_a_notebook(browser, tmp_path, monkeypatch):
    """In a sandboxed frame, which has no storage and no address of its own,
    with an empty console.
    """
    monkeypatch.setattr(export_files, "load_assets", LOAD_ASSETS)
    frame = hw.view(load_sample_trace())._repr_html_()
    (tmp_path / "a.html").write_text(
        f"<!doctype html><meta charset=utf-8>{frame}", encoding="utf-8"
    )
    messages: list[str] = []
    page = browser.new_page(locale="en")
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto((tmp_path / "a.html").as_uri())
    shown = page.frame_locator("iframe")
    shown.get_by_role("gridcell").first.wait_for()
    assert shown.get_by_role("gridcell").count() == 54
    shown.get_by_role("gridcell").first.dblclick()
    shown.get_by_role("heading", name="Head E0 H0").wait_for()
    page.close()
    assert messages == []


# --- the open screen in a browser ---


def make_run(tokens: int) -> tuple[Trace, Any]:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, tokens), generator=torch.Generator().manual_seed(0))
    return hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net


def test_the_memory_of_a_long_run_is_that_of_one():
    """The estimate from 8 tokens is what a run of 64 tokens records, masks apart."""
    short, net = make_run(8)
    found = estimate_memory(short, net, 64)
    long, _ = make_run(64)
    recorded = sum(array.nbytes for layer in long.layers for array in layer.arrays.values())
    assert found["longestBytes"] == pytest.approx(recorded, rel=0.01)
    assert found["parameters"] == sum(one.numel() for one in net.parameters())
    assert found["weightBytes"] == 4 * sum(one.numel() for one in net.parameters())
    assert estimate_memory(short, None, 64)["parameters"] is None


def test_a_trace_alone_has_no_parameters():
    trace, _ = make_run(8)
    memory = OpenModel(trace).describe()["memory"]
    assert memory["parameters"] is None
    assert memory["recordBytes"] == trace.nbytes


# --- the description of what is open, and the table of measures that the pa ---


def test_measures_of_some_heads_only_are_in_the_table():
    table = bundled_sample.load_sample_table()
    heads = [(head.site, head.head) for head in table.heads]
    names, stacked = stack_measures(table, heads)
    assert names[0] == "entropy"
    assert {"alignment input", "distance"} <= set(names)
    assert [measure["name"] for measure in describe_measures(table)] == names
    for number, head in enumerate(table.heads):
        for column, name in enumerate(names):
            if name in head.measures:
                expected = np.array(head.measures[name][:4], np.float32)
                np.testing.assert_array_equal(stacked[number, column], expected)
            else:
                assert np.isnan(stacked[number, column]).all()
