"""The bundled sample is small and intact, opens without torch, and its heads do what the page
shows.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import headwise as hw
from headwise.observe import bundled_sample
from headwise.observe.bundled_sample import (
    FOLDER,
    load_sample_model,
    load_sample_table,
    load_sample_trace,
)
from headwise.util.errors import SpecError

MAX_BYTES = 4_000_000
TARGET = "一千二百三十四万五千六百七十八美元九十美分"


def test_the_sample_is_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < MAX_BYTES
    names = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert names == {
        "measures.json",
        "texts.txt",
        "sample.trace",
        *(
            f"model/{name}"
            for name in ("README.md", "headwise.toml", "model.safetensors", "tokenizer.json")
        ),
    }


def test_the_trace_and_the_measures_open_without_torch():
    code = (
        "import sys; from headwise.observe.bundled_sample import *; load_sample_trace(), "
        "load_sample_table(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_model_translates_its_text():
    """The translation is right: 12,345,678.90 written out in Chinese."""
    assert hw.generate(load_sample_model(), bundled_sample.SOURCE) == TARGET
    assert load_sample_trace().streams["text"][0].text == TARGET


def test_the_trace_is_of_this_model():
    trace, net = load_sample_trace(), load_sample_model()
    again = hw.trace(net, {"source": bundled_sample.SOURCE, "text": TARGET})
    for layer in trace.layers:
        for head in range(layer.heads):
            stored, now = (one.head_weights(layer.name, head) for one in (trace, again))
            np.testing.assert_allclose(stored, now, atol=1e-4)
        assert trace.thumbnails[layer.name].shape[1] == layer.heads


def test_heads_show_what_the_page_is_for():
    """Sinks, positional heads and heads that align source and target words, all above chance."""
    table = load_sample_table()
    assert len(table.heads) == 54
    classes = {one.name for head in table.heads for one in head.classes}
    assert {"sink", "previous", "self", "alignment"} <= classes
    best = table.sorted_by("sink")[0]
    assert best.measures["sink"].low > best.measures["sink"].chance
    cross = [head for head in table.heads if head.kind == "cross"]
    aligned = max(one.score for head in cross for one in head.classes if one.name == "alignment")
    assert aligned > 0.4


def test_the_measures_keep_their_values(tmp_path, monkeypatch: pytest.MonkeyPatch):
    table = load_sample_table()
    data = table.data
    data["heads"] = [{"site": head.site, **head.data} for head in table.heads]
    assert bundled_sample.table_from_data(data).data == table.data
    monkeypatch.setattr(bundled_sample, "MEASURES", tmp_path / "measures.json")
    with pytest.raises(SpecError, match="install headwise again"):
        load_sample_table()
    (tmp_path / "measures.json").write_text("{}")
    with pytest.raises(SpecError, match="install headwise again"):
        load_sample_table()


def test_tokens_of_the_sample_are_words():
    words = load_sample_trace().streams["source"][0].words
    assert words[:4] == ("<zh>", "1", "2", ",")


def test_a_job_and_a_request_may_be_the_first_to_need_torch():
    """A job starts to import a part of torch while a request is importing torch for the model."""
    script = """
import importlib.abc, sys, threading, time
from headwise.observe.bundled_sample import load_sample_model, load_sample_trace
from headwise.viewer.model_worker import ModelWorker
from headwise.viewer.open_model import OpenModel

def use_torch(model, arguments, progress):
    import torch.nn.functional

class StartJob(importlib.abc.MetaPathFinder):
    job = None
    def find_spec(self, name, path, target=None):
        if name == "torch._utils" and self.job is None:
            self.job = worker.submit("use", {})
            time.sleep(0.5)  # by then the job waits for torch

view = OpenModel(load_sample_trace(), None, load_model=load_sample_model)
worker = ModelWorker(view, {"use": use_torch})
sys.meta_path.insert(0, finder := StartJob())
view.get_model()
worker._thread.join(0.5)
while not finder.job.has_ended:
    time.sleep(0.1)
print(finder.job.state)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stdout.strip()) == (0, "done"), result.stderr
