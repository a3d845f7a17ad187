"""The data for the page of HeadVis: the contracts of its pipeline, and the model's own weights."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.transformers_models import ZOO

SCRIPT = Path(__file__).parents[1] / "examples" / "headvis_data.py"
SEQUENCE = {
    "sequence_id": int,
    "interval": int,
    "tokens": [str],
    "attention_indices": [int],
    "attention_values": [float],
    "seq_len": int,
    "max_activation": float,
}
BINS = {"bin_edges": [(int, float)], "bin_values": [int]}
TOKENS = [{"token": str, "weight": float}]
HEAD = {
    "sequences": [SEQUENCE],
    "qk_distance_histogram": BINS,
    "top_query_tokens": TOKENS,
    "top_key_tokens": TOKENS,
    "histogram": BINS,
    "statistics": {"n_samples": int},
}
POINTS = {f"d{n}": [float] for n in range(3)}
CLOUD = {
    **{name: [int] for name in ("seq_idx", "top_q", "top_k")},
    "norms": [float],
    "pca": dict.fromkeys("QKVO", POINTS),
    "clusters": [dict],
}
CONFIG = {
    "model_name": str,
    "heads": [[int]],
    "n_layers": int,
    "n_heads": int,
    "n_intervals": int,
    "metrics": [str],
    "metric_descriptions": dict,
    "head_data_pattern": str,
    "has_umap": bool,
    "umap_heads": [[int]],
    "custom_plots": [{"key": str, "label": str}],
    "custom_tables": [{"key": str, "label": str}],
    "statistics_display": dict,
}


def check(data: Any, kind: Any, place: str = "") -> None:
    """Hold data to a contract: a type, a list of one kind, or a mapping of names to kinds."""
    if isinstance(kind, list):
        assert isinstance(data, list), place
        for item in data:
            check(item, kind[0], place)
    elif isinstance(kind, dict):
        assert data.keys() == kind.keys(), place
        for name, one in kind.items():
            check(data[name], one, f"{place}.{name}")
    else:
        assert isinstance(data, kind), f"{place}: {data!r}"


def texts() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (4 + n % 17,), generator=draw) for n in range(24)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headvis") / "data"
    runpy.run_path(str(SCRIPT))["export"](ZOO["llama"].build(), texts(), folder)
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_file_keeps_its_contract(written: Path):
    config = read(written / "config.json")
    check(config, CONFIG)
    rows = read(written / "scatter_data.json")
    assert [[row["layer"], row["head"]] for row in rows] == config["heads"]
    assert all(isinstance(rows[0][name], float) for name in ("entropy", "induction", "distance"))
    assert read(written / "server_config.json") == {}
    assert read(written / "attributions" / "manifest.json") == {}
    words = read(written / "umap" / "sequences.json")
    for layer, head in config["heads"]:
        name = f"L{layer}H{head}.json"
        data = read(written / "heads" / name)
        check(data, HEAD, name)
        assert {one["interval"] for one in data["sequences"]} == set(range(1, 11))
        plots = [data[one["key"]] for one in config["custom_plots"]]
        assert all(len(one["bin_edges"]) == len(one["bin_values"]) + 1 for one in plots)
        assert all(data[one["key"]] for one in config["custom_tables"])
        cloud = read(written / "umap" / name)
        check(cloud, CLOUD, name)
        lists = [cloud["seq_idx"], cloud["top_q"], cloud["norms"]]
        lists += [axis for part in cloud["pca"].values() for axis in part.values()]
        assert {len(one) for one in lists} == {len(cloud["top_k"])}
        for text, query, key in zip(*(cloud[one] for one in list(CLOUD)[:3]), strict=True):
            assert 1 <= key <= query < len(words[str(text)])


def test_the_sparse_weights_are_the_largest_of_the_model(written: Path):
    model = ZOO["llama"].build()
    data = read(written / "heads" / "L1H2.json")
    longest = max(data["sequences"], key=lambda one: one["seq_len"])
    ids = texts()[longest["sequence_id"]]
    assert longest["seq_len"] == len(ids) == len(longest["tokens"]) > 8
    with torch.no_grad():
        weights = model(ids[None], output_attentions=True).attentions[1][0, 2].numpy()
    expected: dict[int, float] = {}
    for t, row in enumerate(weights):
        for s in np.argsort(-row)[:8]:
            if row[s] >= 0.005:
                expected[t * len(ids) + int(s)] = float(row[s])
    assert longest["attention_indices"] == sorted(expected)
    found = longest["attention_values"]
    assert np.allclose(found, [expected[place] for place in sorted(expected)], atol=1e-4)
    assert longest["max_activation"] == pytest.approx(weights[1:, 1:].max(), abs=1e-4)


def test_projections_are_principal_components(written: Path):
    project = runpy.run_path(str(SCRIPT))["project"]
    vectors = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)).double()
    found = np.array([*project(vectors.float()).values()]).T
    centred = vectors.numpy() - vectors.numpy().mean(0)
    values, directions = np.linalg.eigh(centred.T @ centred)
    expected = centred @ directions[:, ::-1][:, :3]
    assert np.allclose(np.abs(found), np.abs(expected), atol=1e-3)
    assert np.allclose((found**2).sum(0), values[::-1][:3], rtol=1e-3)
    assert np.array(project(torch.ones(2, 2))["d2"]).tolist() == [0, 0]


def test_refusals(written: Path):
    export = runpy.run_path(str(SCRIPT))["export"]
    with pytest.raises(SystemExit, match="exists; give the path of a new folder"):
        export(ZOO["llama"].build(), texts(), written)
    with pytest.raises(SystemExit, match="give a model with one stack"):
        export(ZOO["bart"].build(), [], written / "new")
