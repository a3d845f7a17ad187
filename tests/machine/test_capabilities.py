"""What a machine can do, read from the files of processors that are not this one."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from headwise.machine import capabilities
from headwise.machine.capabilities import (
    CacheLevel,
    MachineCapabilities,
    read_cgroup_quota,
    read_linux,
    this_machine,
)

XEON = "fpu sse2 avx avx2 fma avx512f avx512dq avx512bw avx512vl avx512_vnni"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def machine_files(
    root: Path, flags: str, *, field: str = "flags", name: str = "Some processor", count: int = 2
) -> Path:
    model = "" if field == "Features" else f"model name\t: {name}\n"
    one = f"{model}{field}\t: {flags}\n"
    write(root, "proc/cpuinfo", "".join(f"processor\t: {n}\n{one}\n" for n in range(count)))
    return root


def cache_files(root: Path, *entries: tuple[int, str, str, str, str]) -> None:
    for n, (cpu, level, size, shared, kind) in enumerate(entries):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{n}"
        for name, value in (
            ("level", level),
            ("size", size),
            ("shared_cpu_list", shared),
            ("type", kind),
        ):
            write(root, f"{folder}/{name}", value)


@pytest.mark.parametrize(
    ("flags", "level", "name"),
    [
        ("sse2 avx avx2 fma", "AVX2", "x86-avx2"),
        (XEON, "AVX512", "x86-avx512"),
        (f"{XEON} avx512_bf16", "AVX512", "x86-avx512-bf16"),
        (f"{XEON} avx512_bf16 amx_bf16 amx_tile", "AVX512", "x86-amx"),
        (f"{XEON} avx512_bf16", "AVX2", "x86-avx2"),  # torch is limited to AVX2
        ("sse2 avx", "DEFAULT", "other"),
    ],
)
def test_classes_of_x86(tmp_path: Path, flags: str, level: str, name: str):
    machine = read_linux(machine_files(tmp_path, flags), level)
    assert machine.machine_class == name
    assert machine.processor == "Some processor"


@pytest.mark.parametrize(
    ("flags", "name"), [("fp asimd sve", "aarch64"), ("fp asimd bf16", "aarch64-bf16")]
)
def test_classes_of_arm(tmp_path: Path, flags: str, name: str):
    machine = read_linux(machine_files(tmp_path, flags, field="Features"), "DEFAULT")
    assert machine.machine_class == name
    assert "NEON" in machine.instructions


def test_the_whole_description(tmp_path: Path):
    machine_files(tmp_path, XEON, name="Intel(R) Xeon(R)", count=64)
    cache_files(
        tmp_path,
        (0, "1", "32K", "0,32", "Data"),
        (0, "1", "64K", "0,32", "Instruction"),
        (1, "1", "32K", "1,33", "Data"),
        (0, "3", "36608K", "0-63", "Unified"),
    )
    write(tmp_path, "sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,32")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "200000 100000")
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    machine = read_linux(tmp_path, "AVX512")
    assert machine.caches == (CacheLevel(1, 32 * 2**10, 2), CacheLevel(3, 36608 * 2**10, 1))
    assert machine.last_level_cache_bytes == 36608 * 2**10
    assert machine.describe() == (
        "Intel(R) Xeon(R) (x86-avx512); AVX2, AVX-512, VNNI; 2 of 64 visible processors (quota "
        "2), 2 hardware threads "
        "per core; L1 2 x 32 KiB, L3 35.75 MiB; 2 NUMA nodes"
    )
    assert machine.data["class"] == "x86-avx512"
    [note] = machine.notes(64)
    assert note == (
        "torch has 64 threads, but 2 of 64 visible processors may be used; call "
        "torch.set_num_threads(2)"
    )
    [note] = machine.notes(2)
    assert "2 hardware threads per core" in note
    assert machine.notes(1) == []


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        # the limit of a parent
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu:/box",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"sys/fs/cgroup/cpu.max": "damaged"}, None),
    ],
)
def test_quotas_of_containers(tmp_path: Path, files: dict[str, str], quota: float | None):
    for name, text in files.items():
        write(tmp_path, name, text)
    assert read_cgroup_quota(tmp_path) == quota


def test_half_a_processor_is_one_thread(tmp_path: Path):
    machine_files(tmp_path, XEON, count=8)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "50000 100000")
    machine = read_linux(tmp_path, "AVX512")
    assert (machine.usable_processors, machine.visible_processors) == (1, 8)


def test_a_machine_that_reports_nothing_has_no_class(tmp_path: Path):
    machine = read_linux(tmp_path, "DEFAULT")
    assert (machine.machine_class, machine.caches, machine.instructions) == ("aarch64", (), ()) or (
        machine.machine_class == "other"
    )
    assert machine.last_level_cache_bytes is None


def test_a_mac_is_read_by_sysctl(monkeypatch: pytest.MonkeyPatch):
    entries = {
        "machdep.cpu.brand_string": "Apple M9",
        "hw.optional.AdvSIMD": "1",
        "hw.optional.arm.FEAT_BF16": "1",
        "hw.optional.avx2_0": "0",
        "hw.perflevel0.l2cachesize": str(16 * 2**20),
    }
    monkeypatch.setattr(
        capabilities, "_sysctl", lambda names: {n: entries[n] for n in names if n in entries}
    )
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    machine = capabilities.read_macos()
    assert (machine.processor, machine.machine_class) == ("Apple M9", "aarch64-bf16")
    assert machine.instructions == ("NEON", "bf16")
    assert machine.caches == (CacheLevel(2, 16 * 2**20, 1),)


def test_sysctl_that_is_missing_or_refuses_gives_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert capabilities._sysctl(["hw.l1dcachesize"]) == {}
    (tmp_path / "sysctl").write_text('#!/bin/sh\n[ "$2" = known ] && echo 42\n')
    (tmp_path / "sysctl").chmod(0o755)
    assert capabilities._sysctl(["known", "unknown"]) == {"known": "42"}


def test_this_machine_is_read_once():
    assert this_machine() is this_machine()
    assert 1 <= this_machine().usable_processors <= (os.cpu_count() or 1)
    assert this_machine().machine_class in capabilities.MACHINE_CLASSES


def test_unknown_architectures_have_no_class():
    assert MachineCapabilities("Some", "riscv64", ("AVX2",), 1, 1).machine_class == "other"
