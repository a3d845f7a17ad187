"""The benchmark of backends on a GPU, run on the CPU, where its numbers are right as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "SECONDS", 0.0)
    return gpu


@pytest.mark.parametrize("name", ["plain heads, causal", "DCMHA"])
def test_every_backend_is_compared_with_dense(gpu, name: str):
    rows = {row["backend"]: row for row in gpu.measure_spec(name, torch.float32, "cpu", tokens=70)}
    assert {"chunked", "dense"} <= set(rows)
    assert all(row["is_right"] and row["seconds"] > 0 for row in rows.values())


def test_a_backend_that_is_wrong_or_fails_is_reported(gpu, monkeypatch: pytest.MonkeyPatch):
    from headwise.backends import BACKENDS

    def fail(*args: object) -> None:
        raise RuntimeError("no such\nkernel")

    attend = BACKENDS["sdpa"].attend
    monkeypatch.setattr(BACKENDS["sdpa"], "attend", lambda *args: 1.5 * attend(*args))
    monkeypatch.setattr(BACKENDS["flash_cpu"], "attend", fail)
    rows = {
        row["backend"]: row
        for row in gpu.measure_spec("plain heads, causal", torch.float32, "cpu", tokens=70)
    }
    assert rows["sdpa"]["is_right"] is False
    assert rows["flash_cpu"] == {"backend": "flash_cpu", "failed": "RuntimeError: no such kernel"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(gpu, capsys: pytest.CaptureFixture[str]):
    assert gpu.main() == 1
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_the_page_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_docs

    monkeypatch.setattr(build_docs, "ROOT", tmp_path)
    assert "No GPU has run these calls yet" in build_docs.gpu_runs()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "gpu.json").write_text(
        '{"device": "Some GPU", "torch": "2.13", "tokens": 2048, "rows": ['
        '{"layer": "ALiBi", "dtype": "float32", "backend": "flex", "seconds": 0.002, "error": '
        '1e-6, "is_right": true,'
        ' "waits": false}, {"layer": "ALiBi", "dtype": "float32", "backend": "sdpa", "failed": '
        '"RuntimeError: no"}]}'
    )
    page = build_docs.gpu_runs()
    assert "| ALiBi | float32 | `flex` | 2.00 ms | 1.0e-06 | no |" in page
    assert "| ALiBi | float32 | `sdpa` | RuntimeError: no | - | - |" in page
