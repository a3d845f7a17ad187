"""Cells and heads on Ray: the figures of one process, on a cluster of two nodes whose workers are
killed; refusals.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Never

import numpy as np
import pytest

import headwise as hw
from headwise.cli import main
from headwise.kernels.capabilities import use_threads
from headwise.observe.head_analysis.annotated_examples import Example, examples_from_task
from headwise.observe.head_analysis.head_measurement import (
    MeasureOptions,
    MetricSums,
    measure_heads,
    sum_examples,
)
from headwise.observe.head_analysis.top_sequences import SequenceCollector
from headwise.studies import process_engine
from headwise.studies.process_engine import SHARD_SIZE, ProcessEngine, RayEngine, RayHeads
from headwise.studies.run_cell import HeadSpread
from headwise.studies.study_file import Study, parse_study
from headwise.studies.study_runner import RESULTS_FILE, run_study
from headwise.training.data import make_task
from headwise.util.errors import SpecError
from studies import dying_cells

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
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.lengthy
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
def test_two_nodes_and_a_killed_worker_give_the_bytes_of_the_local_engine(
    study: Study, two_nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process_engine, "run_cell_elsewhere", dying_cells.run_or_die_elsewhere)
    run_study(study, tmp_path / "ray", RayEngine(two_nodes))
    assert len(list(tmp_path.glob("died-*"))) == len(
        study.seeds
    )  # every cell lost its first worker
    run_study(study, tmp_path / "local", ProcessEngine(0))
    assert (tmp_path / "ray" / RESULTS_FILE).read_bytes() == (
        tmp_path / "local" / RESULTS_FILE
    ).read_bytes()


def make_heads() -> tuple[hw.Transformer, list[Example]]:
    task = make_task("copy", symbols=11, block=(3, 7), gap=(0, 2))
    net = hw.build(task.model(), seed=5).eval()
    return net, examples_from_task(net, task, 2 * SHARD_SIZE + 3).examples_with_frequencies()


@pytest.mark.lengthy
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
def test_heads_of_shards_whose_workers_die_are_those_of_one_process(
    two_nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process_engine, "sum_shard_elsewhere", dying_cells.sum_or_die_elsewhere)
    net, examples = make_heads()
    counts: list[int] = []
    options = MeasureOptions(engine=RayHeads(two_nodes))
    collectors = [SequenceCollector(count=2) for _ in range(2)]
    on_ray = measure_heads(
        net, examples, options=options, collectors=collectors[:1], progress=counts.append
    )
    assert len(list(tmp_path.glob("died-*"))) == 3  # every shard lost its first worker
    assert counts == [SHARD_SIZE, 2 * SHARD_SIZE, len(examples)]
    with use_threads(1):
        local = measure_heads(net, examples, collectors=collectors[1:])
    assert json.dumps(on_ray.data) == json.dumps(local.data)  # bit for bit
    kept, expected = (json.dumps(one.result(net).data) for one in collectors)
    assert kept == expected


def test_merged_sums_do_not_depend_on_the_shards():
    net, examples = make_heads()
    options = MeasureOptions()
    whole = sum_examples(net, examples, options)
    merged = MetricSums(whole.metrics)
    for first in range(0, len(examples), 4):
        shard = examples[first : first + 4]
        merged.append(sum_examples(net, shard, options).sums_by_example, len(shard))
    assert merged.num_examples == whole.num_examples == len(examples)
    assert merged.sums_by_example.keys() == whole.sums_by_example.keys()
    for key, sums in whole.sums_by_example.items():
        for one, other in zip(sums, merged.sums_by_example[key], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    def read_and_return(_: object, texts: Iterable[Example], *__: object) -> MetricSums:
        assert len(list(texts)) == len(examples)
        return merged

    engine = measure_heads(net, examples, options=options._replace(engine=read_and_return))
    assert json.dumps(engine.data) == json.dumps(measure_heads(net, examples).data)


def test_heads_refusals(tmp_path, monkeypatch, capsys):
    net, _ = make_heads()
    hw.save(net, tmp_path / "net")
    (tmp_path / "texts.txt").write_text("1 2 3\n")
    command = ["heads", str(tmp_path / "net"), "--data", str(tmp_path / "texts.txt")]
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    for wrong, words in [
        (["--address", "host:6379"], "--address needs --engine"),
        (["--engine", "mpi"], "'mpi' is unknown; use one of local, ray"),
    ]:
        assert main([*command, *wrong]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(
        SpecError, match=r"needs Ray; pip install 'headwise\[ray\]', or use --engine local"
    ):
        RayHeads()
    with pytest.raises(ValueError, match="HeadSpread runs in one process; leave the engine out"):
        HeadSpread().merge(HeadSpread())


LOST_TASK_ERRORS = ("OutOfMemoryError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError")


@pytest.mark.parametrize("name", LOST_TASK_ERRORS)
def test_heads_of_lost_tasks_are_refused_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch):
    errors = {one: type(one, (Exception,), {}) for one in LOST_TASK_ERRORS}

    def lose_task(_: object) -> Never:
        raise errors[name]("the node has too little memory\nits log follows")

    task = SimpleNamespace(remote=lambda *_: None)
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(**errors),
        init=lambda **_: None,
        shutdown=lambda: None,
        put=lambda value: value,
        remote=lambda **_: lambda _: task,
        get=lose_task,
    )
    modules = {"ray": ray, "ray.exceptions": ray.exceptions}
    monkeypatch.setattr(process_engine.importlib, "import_module", modules.__getitem__)
    net, examples = make_heads()
    with pytest.raises(
        SpecError, match=r"the node has too little memory[)]; use --engine local"
    ) as caught:
        measure_heads(net, examples, options=MeasureOptions(engine=RayHeads()))
    assert "\n" not in str(caught.value)


def test_refusals(study, tmp_path, monkeypatch, capsys):
    file = tmp_path / "study.toml"
    file.write_text('hypothesis = "x"\n[variants.mha]\n[tasks.recall]\n')
    for wrong, words in [
        (["--address", "host:6379"], "--address needs --engine"),
        (["--engine", "ray", "--jobs", "0"], "give 1 or more"),
        (["--engine", "mpi"], "'mpi' is unknown; use one of local, ray"),
    ]:
        assert main(["study", str(file), "--out", str(tmp_path / "out"), *wrong]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(
        SpecError, match=r"needs Ray; pip install 'headwise\[ray\]', or use --engine local"
    ):
        RayEngine()
    assert main(["study", str(file), "--out", str(tmp_path / "out"), "--engine", "ray"]) != 0
    assert "pip install 'headwise[ray]'" in capsys.readouterr().err


def test_an_unreachable_cluster_is_refused(study: Study, tmp_path: Path):
    pytest.importorskip("ray", reason="needs Ray; pip install 'headwise[ray]'")
    with pytest.raises(
        SpecError, match=r"cannot reach a Ray cluster at 127.0.0.1:9: .* start one with ray start"
    ):
        run_study(study, tmp_path, RayEngine("127.0.0.1:9"))
    with pytest.raises(SpecError, match="leave --jobs 2 out"):
        RayEngine("127.0.0.1:9", 2)
