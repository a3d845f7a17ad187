"""The benchmarks outside the package: comparison, timing in turns, verdicts, report, backends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.harness import LIMIT, BenchmarkCase, CaseKind, RequiredWork, SpeedTarget
from benchmarks.reference_models import CTranslate2Stepper

import headwise as hw
from benchmarks import __main__ as command, gpu, harness, report

ROOT = Path(__file__).resolve().parents[2]
FEW = gpu.Sizes(70, 0.0, 3, gpu.DECODER | {"n_embd": 24, "n_layer": 1, "vocab_size": 11})


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "BUFFER_BYTES", 2**12)
    monkeypatch.setattr(harness, "MATRIX_SIZE", 8)
    monkeypatch.setattr(harness, "SAMPLE_SECONDS", 1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([1.0, 100.0], [1.05, 100.0], ""),
        ([1.0, 2.0], [1.5, 2.0], "off by 0.25 times the largest number"),
        ([1.0, float("inf")], [1.0, float("inf")], ""),
        ([1.0, float("nan")], [1.0, 2.0], "off by inf times the largest number"),
        ([1.0], [1.0, 2.0], "returns [(2,)], not [(1,)]"),
        ([], [], ""),
    ],
)
def test_results_are_compared(ours: list[float], theirs: list[float], difference: str):
    found = harness.describe_difference(torch.tensor(ours), torch.tensor(theirs), 1e-3)
    assert found == difference


def test_ratios_are_those_of_rounds():
    ratio = harness.compare_rounds([1.0, 5.0, 1.0], [2.0, 9.0, 2.2])
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 1.8, 2.2))
    many = harness.compare_rounds([1.0] * 15, [*range(1, 16)])
    assert (many.median, many.low, many.high) == (8, 4, 12)  # the sign test: 1.8 % in each tail


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    x = torch.ones(64)
    peers = {
        "equal": lambda: x.clone() + 1,
        "wrong": lambda: x,
        "scale": lambda: x.sum(),
        "fails": lambda: x.view(7),
        "missing": harness.make_peer("no_such_library", lambda library: library.run),
    }
    targets = (SpeedTarget("equal", 1e-9), SpeedTarget(LIMIT, 1e9), SpeedTarget("missing", 1))
    work = RequiredWork(bytes_read=256, flops=64)
    yield BenchmarkCase("sum", lambda: x + 1, peers, targets, work, reported_peers=("scale",))
    right = {"equal": peers["equal"]}
    yield BenchmarkCase("right", lambda: x + 1, right, targets[:2], work)
    yield BenchmarkCase("broken", lambda: x.view(7), {})


def test_a_run_gives_rows_verdicts_a_table_and_a_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "load_kinds", lambda: {"tiny": CaseKind("Tiny", cases)})
    assert command.main(["tiny", "--quick", "--out", str(tmp_path)]) == 1  # a wrong result
    text = capsys.readouterr().out
    import json

    document = json.loads((tmp_path / "bench.json").read_text())
    mixed, right, broken = document["rows"]
    assert set(mixed["peers"]) == {"equal", "wrong", "scale"}
    assert set(mixed["differs"]) == {"wrong"}
    assert mixed["absent"]["missing"] == "No module named 'no_such_library'"
    assert mixed["absent"]["fails"].startswith("failed: RuntimeError")
    assert [target["met"] for target in mixed["aim"]] == [None, None, None]
    assert [target["met"] for target in right["aim"]] == [True, False]
    assert right["limit"]["seconds"] > 0
    assert broken["failed"].startswith("RuntimeError")
    assert "1 of 5 targets are met." in text
    assert "| tiny: broken | failed: RuntimeError" in text
    assert (tmp_path / "bench.svg").read_text().startswith("<?xml")
    assert command.main(["tiny:right", "--quick"]) == 0
    assert "tiny: sum" not in capsys.readouterr().out
    assert command.main(["tinny"]) == 2


def test_the_recorded_runs_make_a_page():
    import json

    names = ("bench.json", "bench-x86-amx.json")
    reports = [json.loads((ROOT / "docs" / name).read_text()) for name in names]
    assert "35 of 40 targets are met." in report.markdown(reports[0])
    table = report.compare_targets(reports)
    assert "| decode 8k, fp32 | limit | 80 % | **45 %** | 84 % |" in table


def test_all_kinds_of_work_load():
    assert set(command.load_kinds()) >= {"entmax", "paged_attention", "gpt_training"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(command.load_kinds()))
def test_every_quick_row_runs(kind: str):
    names = list[str]()
    for case in command.load_kinds()[kind].make_cases(True):
        case.ours()
        names.append(case.name)
    assert names


# --- backends on a GPU, run on the CPU, where its numbers are right as well -----------------------


@pytest.mark.parametrize("name", ["plain heads, causal", "DCMHA"])
def test_every_backend_is_compared_with_dense(name: str):
    rows = {row["backend"]: row for row in gpu.measure_spec(name, torch.float32, "cpu", FEW)}
    assert {"chunked", "dense"} <= set(rows)
    assert all(row["is_right"] and row["seconds"] > 0 for row in rows.values())


def test_a_backend_that_is_wrong_or_fails_is_reported(monkeypatch: pytest.MonkeyPatch):
    from headwise.attention.backends import BACKENDS

    def fail(*args: object) -> None:
        raise RuntimeError("no such\nkernel")

    attend = BACKENDS["sdpa"].attend
    monkeypatch.setattr(BACKENDS["sdpa"], "attend", lambda *args: 1.5 * attend(*args))
    monkeypatch.setattr(BACKENDS["flash_cpu"], "attend", fail)
    found = gpu.measure_spec("plain heads, causal", torch.float32, "cpu", FEW)
    rows = {row["backend"]: row for row in found}
    assert rows["sdpa"]["is_right"] is False
    assert rows["flash_cpu"] == {"backend": "flash_cpu", "failed": "RuntimeError: no such kernel"}


@pytest.mark.parametrize("device", ["cpu", "pretend"])
def test_all_steps_run_without_a_gpu(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With few tokens; the file is there although a test failed."""
    outcome = {"result": "1 failed", "passed": False, "failed": ["FAILED tests/a.py"]}
    reports: list[dict[str, Any]] = []
    write = Path.write_text

    def record(path: Path, text: str) -> int:
        if path.name == gpu.RESULTS.name:
            reports.append(json.loads(text))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", record)
    monkeypatch.setattr(gpu, "run_tests", lambda _: outcome)
    specs = {name: gpu.SPECS[name] for name in ("plain heads, causal", "ALiBi")}
    monkeypatch.setattr(gpu, "SPECS", specs)
    if device == "cpu":
        assert gpu.main(device, tmp_path / "gpu.json", FEW) == 1
        assert json.loads((tmp_path / "gpu.json").read_text()) == reports[-1]
    else:
        assert gpu.dry_run(FEW) == 1
        assert not gpu.RESULTS.exists()
        assert re.search(r"dry run: (\d+) of \1 rows are right", capsys.readouterr().err)
    report = reports[-1]
    assert report["device"] == device
    assert report["tests"] == outcome
    assert {row["layer"] for row in report["rows"]} == set(specs)
    assert all(row["is_right"] for row in report["rows"])
    assert gpu.PEER in {row["backend"] for row in report["rows"]}
    assert set(report["decoding"]) == {"headwise", "transformers"}


def test_a_layer_that_dense_cannot_run_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    passed = {"result": "1 passed", "passed": True, "failed": []}
    for name, value in {"run_tests": lambda _: passed, "measure_spec": fail}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "measure_decoding", lambda *_: {"headwise": 1.0})
    assert gpu.main("cpu", tmp_path / "gpu.json") == 1
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert len(rows) == len(gpu.SPECS) * len(gpu.TOLERANCE)
    assert {row["failed"] for row in rows} == {"RuntimeError: out of memory"}


def test_decoding_continues_with_the_likeliest_token():
    net = hw.build(hw.families.read_model_spec(gpu.DECODER | {"n_embd": 24, "n_layer": 1}), seed=0)
    ids = torch.ones(1, 7, dtype=torch.long)
    with torch.no_grad():
        continued = gpu.decode_greedily(net.eval(), ids, 5)
        assert torch.equal(continued[:, 7:], net(continued[:, :-1]).argmax(-1)[:, 6:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--device", "cuda"]) == 1
    assert "torch finds no CUDA device" in capsys.readouterr().err


# --- the stepwise CTranslate2 model, with a substitute library ------------------------------------

ROWS, WORDS = 3, 7


class Library:
    """Of a batch, every row is told of in turn; one that the callback ends is told of no more."""

    def __init__(self) -> None:
        self.steps = 0

    def Generator(self, path: str, **how: Any) -> Any:
        return SimpleNamespace(generate_batch=self.generate)

    def generate(
        self, words: list[list[str]], max_length: int, callback: Callable[[Any], bool], **how: Any
    ) -> None:
        going = [*range(len(words))]
        while going and self.steps < max_length:
            self.steps += 1
            logits = np.full((len(words), WORDS), self.steps, np.float32)
            going = [
                row for row in going if not callback(SimpleNamespace(batch_id=row, logits=logits))
            ]


def test_each_call_is_a_step_of_all_rows_and_an_abandoned_generation_ends():
    library = Library()
    stepped = CTranslate2Stepper(library, Path("nowhere"), [[1, 2]] * ROWS, 50, threads=1)
    for step in (1, 2, 3):
        assert torch.equal(stepped(), torch.full((ROWS, WORDS), float(step)))
        assert library.steps == step  # and waits
    worker = stepped._worker
    del stepped
    worker.join(timeout=10)
    assert not worker.is_alive()
    assert library.steps <= 4
