"""The page about positional heads of DINOv2: its drift on a random model, and its tables."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Dinov2Config, Dinov2Model

PAGES = Path(__file__).resolve().parents[2] / "studies" / "pages"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PAGES))
        yield import_module("dinov2_page")


def head(layer: int, number: int, name: str) -> dict[str, Any]:
    """A head as in the JSON of `hw.heads`."""
    measures = {measure: {"value": 0.1 * number} for measure in ("neighbours", "same_row")}
    measures["same_column"] = {"value": 0.1 * layer}
    classes = [{"name": name, "score": 0.5, "evidence": ""}]
    place = {"stack": "encoder", "kind": "attention", "layer": layer, "head": number}
    return place | {"measures": measures, "classes": classes}


NAMES = {(0, 1): "neighbour", (1, 0): "row", (1, 2): "neighbour"}
TABLE = {
    "heads": [head(n, h, NAMES.get((n, h), "unclear")) for n in range(2) for h in range(3)],
}


def test_drift_is_that_of_a_model_without_the_weights_of_the_heads(page: Any):
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = Dinov2Config(**sizes, image_size=21, patch_size=7, layerscale_value=1.0)
    model = Dinov2Model(config).eval()
    images = torch.randn(3, 3, 21, 21)
    drift = page.measure_drift(model, TABLE, images, 2)
    zeroed = copy.deepcopy(model)
    layers = [
        module for name, module in zeroed.named_modules() if name.endswith("attention.o_proj")
    ]
    layers[0].weight.data[:, 4:8] = 0.0  # head 1 of width 4
    layers[1].weight.data[:, 8:12] = 0.0  # head 2
    with torch.inference_mode():
        before, after = (net(images).last_hidden_state[:, 1:] for net in (model, zeroed))
    expected = (1 - F.cosine_similarity(before, after, dim=-1)).mean(1).tolist()
    assert drift["neighbour"]["drift"] == pytest.approx(expected, abs=1e-6)
    assert max(expected) > 1e-5
    assert list(drift) == ["neighbour", "row"]
    assert len(drift["row"]["random"]) == 2


def test_the_page_counts_heads_that_keep_their_class(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(import_module("finding_page"), "FINDINGS", tmp_path)
    store = page.ResultStore(tmp_path / "run.json")
    store.measure("photographs", lambda: TABLE)
    noise = {"heads": [head(n, h, "neighbour") for n in range(1) for h in range(3)]}
    store.measure("noise", lambda: noise)
    one = {"heads": [["encoder.1.attention", 0]], "num_random": 1.0, "drift": [0.3, 0.2]}
    store.measure("drift", lambda: {"row": one | {"random": [[0.1, 0.1], [0.2, 0.1]]}})
    store.measure("images", lambda: [2, 3, 21, 21])
    text = page.write_page("dinov2", "Heads", page.list_parts(store.results)).read_text()
    assert "| neighbour | 2 | 3 | 1 | L1H2, L0H1 |" in text
    assert "mean of 2 draws" in text
