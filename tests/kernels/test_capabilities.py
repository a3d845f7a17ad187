"""What a machine can do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwise.kernels.capabilities import (
    MACHINE_CLASSES,
    classify,
    this_machine,
    usable_processors,
    use_threads,
    user_cache_folder,
)

XEON = ("avx2", "avx512_f")


@pytest.mark.parametrize(
    ("flags", "level", "name"),
    [
        (("avx2",), "AVX2", "x86-avx2"),
        (XEON, "AVX512", "x86-avx512"),
        ((*XEON, "avx512_bf16"), "AVX512", "x86-avx512-bf16"),
        ((*XEON, "avx512_bf16", "amx_bf16"), "AVX512", "x86-amx"),
        ((*XEON, "avx512_bf16"), "AVX2", "x86-avx2"),  # torch is limited to AVX2
        ((), "DEFAULT", "other"),
    ],
)
def test_classes_of_x86(flags: tuple[str, ...], level: str, name: str):
    assert classify({"architecture": "x86_64"} | dict.fromkeys(flags, True), level) == name


def test_classes_of_other_processors():
    assert classify({"architecture": "arm64"}, "DEFAULT") == "aarch64"
    assert classify({"architecture": "riscv64"}, "DEFAULT") == "other"


@pytest.mark.parametrize(
    ("text", "most"),
    [("50000 100000", 1), ("max 100000", None), ("damaged", None), ("1 0", None), (None, None)],
)
def test_quotas_of_containers(tmp_path: Path, text: str | None, most: int | None):
    if text is not None:
        (tmp_path / "cpu.max").write_text(text + "\n")
    without = usable_processors(tmp_path / "none")
    assert usable_processors(tmp_path) == (most or without)
    assert 1 <= without <= (os.cpu_count() or 1)


def test_this_machine_has_a_class():
    machine = this_machine()
    assert machine.processor
    assert machine.machine_class in MACHINE_CLASSES
    assert machine.l2_cache_bytes > 0


def test_threads_are_those_of_before_after_the_context():
    import torch

    before = torch.get_num_threads()
    with use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_cache_folder_is_that_of_the_desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    assert user_cache_folder() == tmp_path / ".cache" / "headwise"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert user_cache_folder() == tmp_path / "elsewhere" / "headwise"


@pytest.mark.parametrize(
    ("device", "waited"), [("cpu", []), ("mps", ["mps"]), ("cuda:1", []), ("meta", [])]
)
def test_only_an_accelerator_is_waited_for(
    device: str, waited: list[str], monkeypatch: pytest.MonkeyPatch
):
    import torch

    from headwise.kernels import devices

    found: list[str] = []
    monkeypatch.setattr(devices, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda each: found.append(str(each)))
    devices.synchronize(torch.device(device))
    assert found == waited
