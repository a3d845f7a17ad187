"""Sliders of the pages: both languages have every text, and the TypeScript of the page computes the
values of Python over grids of inputs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise.viewer
from headwise.learn import sliders as sliders_module
from headwise.learn.catalogue import load_entries
from headwise.learn.measured_layers import complexity_by_layer
from headwise.learn.slider_values import find_computation, parse_pairs
from headwise.learn.sliders import Slider, format_output, load_sliders

WEB = Path(headwise.viewer.__file__).with_name("web")
ESBUILD = WEB / "node_modules" / ".bin" / "esbuild"
HAN = re.compile("[\u4e00-\u9fff]")
SLIDERS = {slider.id: slider for slider in load_sliders()}
# Texts of the two inputs of text: the first is the start.
TEXTS = {
    "pairs": (
        "51=40, 56=43, 58=48",
        "3=1",
        " 1 = 2;2=-4.5,\n1e1=7",
        "\uff11=\uff12\uff0c4\uff1d8\uff1b9=3\u300110=1",
    ),
    "sentence": (
        "The cat sat on the mat.",
        "a",
        "自注意力\uff0c并不神秘\uff01",
        "Don't re-read naïve İstanbul 😀😀 x=1 (two) three four five six seven eight nine",
    ),
}
# Texts that are not pairs, and the name of their error in sliders.toml.
WRONG_PAIRS = {
    "": "format",
    "51": "format",
    "51=x": "format",
    "51=40=3": "format",
    "0x10=5": "format",
    "1e999=1": "format",
    "1=2, 3=": "format",
    "-5=1": "range",
    "200=1": "range",
    "1=2, 1.0=3": "equal",
    ", ".join(f"{n}=1" for n in range(13)): "count",
}
CALL = """
import { SLIDERS } from "./sliders.mjs";
let text = "";
for await (const chunk of process.stdin) text += chunk;
const call = ([id, inputs]) => {
  try { return SLIDERS[id](inputs); } catch (problem) { return { error: problem.message }; }
};
const outputs = JSON.parse(text).map(call);
process.stdout.write(JSON.stringify({ ids: Object.keys(SLIDERS), outputs }));
"""


def values_of(field: dict[str, Any]) -> list[Any]:
    """Values of an input over its range: its ends, its start, and up to four between."""
    if "text" in field:
        return list(TEXTS[field["name"]])
    if "choices" in field:
        choices = field["choices"]
        return choices if len(choices) <= 5 else [*choices[:: len(choices) // 4], choices[-1]]
    low, high, step = (field[name] for name in ("low", "high", "step"))
    steps = round((high - low) / step)
    values = [low + step * (steps * n // 4) for n in range(5)]
    is_whole = all(isinstance(one, int) for one in (low, high, step))
    return [*dict.fromkeys(int(v) if is_whole else float(v) for v in [*values, field["start"]])]


def grid_of(slider: Slider) -> list[dict[str, Any]]:
    names = [field["name"] for field in slider.inputs]
    rows = product(*map(values_of, slider.inputs))
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page computes for every slider over its grid."""
    node = shutil.which("node")
    if node is None or not ESBUILD.exists():
        pytest.skip("needs node and the packages of the page: make web")
    folder = tmp_path_factory.mktemp("sliders")
    source = WEB / "src" / "learn" / "sliders.ts"
    options = ["--format=esm", f"--outfile={folder / 'sliders.mjs'}", "--log-level=warning"]
    subprocess.run([str(ESBUILD), str(source), *options], check=True)
    (folder / "call.mjs").write_text(CALL)
    cases = [(id, inputs) for id, slider in SLIDERS.items() for inputs in grid_of(slider)]
    inputs = {"query": 1, "width": 2}
    cases += [("own_lookup", {**inputs, "pairs": text}) for text in WRONG_PAIRS]
    called = subprocess.run(
        [node, str(folder / "call.mjs")], input=json.dumps(cases), capture_output=True, text=True
    )
    assert called.returncode == 0, called.stderr
    answer = json.loads(called.stdout)
    results: dict[str, Any] = {id: [] for id in SLIDERS}
    for (id, inputs), outputs in zip(cases, answer["outputs"], strict=True):
        results[id].append((inputs, outputs))
    errors = results["own_lookup"][-len(WRONG_PAIRS) :]
    del results["own_lookup"][-len(WRONG_PAIRS) :]
    return {"ids": answer["ids"], "results": results, "errors": errors}


def test_the_page_and_the_texts_have_the_same_sliders(computed: dict[str, Any]):
    assert computed["ids"] == list(SLIDERS)
    assert len(SLIDERS) >= 30
    assert sum("text" in field for one in SLIDERS.values() for field in one.inputs) == 2


@pytest.mark.parametrize("id", list(SLIDERS))
def test_the_page_computes_what_python_computes(id: str, computed: dict[str, Any]):
    cases = computed["results"][id]
    assert len(cases) >= 5
    for inputs, outputs in cases:
        expected = dict(find_computation(id)(**inputs))
        assert outputs.keys() == expected.keys()
        assert outputs.pop("labels", None) == expected.pop("labels", None), inputs
        for name, value in expected.items():
            ours = np.asarray(value, dtype=float)
            theirs = np.asarray(outputs[name], dtype=float)
            assert ours.shape == theirs.shape, (inputs, name)
            assert np.isfinite(ours).all(), (inputs, name)
            np.testing.assert_allclose(
                theirs, ours, rtol=1e-6, atol=1e-9, err_msg=f"{inputs} {name}"
            )


def test_wrong_pairs_have_the_same_error_in_both_codes(computed: dict[str, Any]):
    shown = {inputs["pairs"]: outputs for inputs, outputs in computed["errors"]}
    assert shown == {text: {"error": name} for text, name in WRONG_PAIRS.items()}
    for text, name in WRONG_PAIRS.items():
        with pytest.raises(ValueError, match=f"^{name}$"):
            parse_pairs(text)
    assert {*WRONG_PAIRS.values()} == {*SLIDERS["own_lookup"].errors}


def test_lengths_and_flops_are_those_of_the_table_of_layers():
    names = {"attention": "self-attention", "gru": "GRU", "convolution": "convolution"}
    names |= {"recurrent": "recurrent", "dilated": "dilated convolution"}
    layers = complexity_by_layer(1000, 64, kernel=5)
    paths = find_computation("path_length")(tokens=1000, kernel=5)
    assert paths == {name: layers[names[name]].path for name in paths}
    layers = complexity_by_layer(1000, 64)
    flops = find_computation("layer_flops")(tokens=1000, model=64)
    assert flops == {name: layers[names[name]].flops for name in flops}


@pytest.mark.parametrize("id", list(SLIDERS))
def test_a_slider_has_its_texts_and_pictures(id: str):
    slider = SLIDERS[id]
    assert slider.entry in {entry.id for entry in load_entries()}
    texts = [slider.title, slider.text, *slider.outputs.values()]
    for text in texts[:2]:
        assert not HAN.search(text.en)
        assert HAN.search(text.zh)
    outputs = slider.start_outputs("en")
    assert {*outputs} - {"labels"} == {*slider.outputs}
    names = {field["name"] for field in slider.inputs}
    for picture in slider.pictures:
        kind, listed, *over = picture.split(" ")
        assert kind in ("curve", "log", "bars", "matrix")
        assert {*listed.split(",")} <= {*slider.outputs}
        assert {*over} <= names
        assert (kind in ("curve", "log")) == bool(over)
        depths = {np.ndim(outputs[name]) for name in listed.split(",")}
        assert depths == {{"bars": 1, "matrix": 2}.get(kind, 0)}
    for field in slider.inputs:
        assert all(field[language] for language in ("en", "zh"))
        if "text" not in field:
            places = field.get("choices") or np.arange(
                field["low"], field["high"] + 1e-9, field["step"]
            )
            assert np.isclose(places, field["start"]).any(), field["name"]


def test_numbers_are_printed_for_readers():
    printed = {
        65536: "65,536",
        0.5: "0.5",
        45.398051: "45.4",
        2e-5: "2.00e-5",
        3e-39: "3.00e-39",
        -0.0: "0",
    }
    assert {value: format_output(value) for value in printed} == printed
    assert format_output([0.25, 1.0]) == "0.25  1"
    assert sliders_module.format_output(12345.6) == "12,346"
