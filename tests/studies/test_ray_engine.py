"""Cells on Ray: the same bytes as the local engine, on a cluster of two nodes whose worker is killed; refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise.cli import main
from headwise.errors import SpecError
from headwise.studies import ray_engine
from headwise.studies.process_engine import ProcessEngine
from headwise.studies.ray_engine import RayEngine
from headwise.studies.study_file import Study, parse_study
from headwise.studies.study_runner import RESULTS_FILE, run_study
from support import dying_cells

TABLE = {
    "hypothesis": "The engine does not matter.",
    "seeds": [1, 2],
    "head_texts": 2,
    "recipe": {"steps": 2, "batch": 2, "evaluate_batches": 1},
    "variants": {"mha": {}},
    "tasks": {"recall": {"vocabulary": 16, "length": 16, "pairs": 2}},
}


@pytest.fixture
def study() -> Study:
    return parse_study(TABLE, "engines", "small", {})


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a Ray cluster of two nodes with one processor each, on this machine."""
    pytest.importorskip("ray", reason="needs Ray; pip install 'headwise[ray]'")
    from ray.cluster_utils import Cluster

    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(dying_cells.MARKERS, str(tmp_path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.lengthy
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_two_nodes_and_a_killed_worker_give_the_bytes_of_the_local_engine(
    study: Study, two_nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_engine, "run_cell_elsewhere", dying_cells.run_or_die_elsewhere)
    run_study(study, tmp_path / "ray", RayEngine(two_nodes))
    assert len(list(tmp_path.glob("died-*"))) == len(study.seeds)  # every cell lost its first worker
    run_study(study, tmp_path / "local", ProcessEngine(0))
    assert (tmp_path / "ray" / RESULTS_FILE).read_bytes() == (tmp_path / "local" / RESULTS_FILE).read_bytes()


def test_refusals(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "study.toml"
    file.write_text('hypothesis = "x"\n[variants.mha]\n[tasks.recall]\n')
    for wrong, words in [
        (["--address", "host:6379"], "--address host:6379 belongs to --engine ray"),
        (["--engine", "ray", "--jobs", "0"], "give 1 or more"),
        (["--engine", "mpi"], "'mpi' is unknown; give one of 'local', 'ray'"),
    ]:
        assert main(["study", str(file), "--out", str(tmp_path / "out"), *wrong]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(SpecError, match=r"needs Ray; pip install 'headwise\[ray\]', or use --engine local"):
        RayEngine()
    assert main(["study", str(file), "--out", str(tmp_path / "out"), "--engine", "ray"]) != 0
    assert "pip install 'headwise[ray]'" in capsys.readouterr().err


def test_an_unreachable_cluster_is_refused(study: Study, tmp_path: Path):
    pytest.importorskip("ray", reason="needs Ray; pip install 'headwise[ray]'")
    with pytest.raises(SpecError, match=r"cannot reach a Ray cluster at 127.0.0.1:9: .* start one with ray start"):
        run_study(study, tmp_path, RayEngine("127.0.0.1:9"))
    with pytest.raises(SpecError, match="leave --jobs 2 out"):
        RayEngine("127.0.0.1:9", 2)
