"""The choice of a path goes by the take-over points of the class of machine, and by a calibration
of this machine.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.backends import BACKENDS, CallSignature, make_dispatch
from headwise.kernels import small_batch_ops
from headwise.machine import takeover_points
from headwise.machine.capabilities import MACHINE_CLASSES, MachineCapabilities, this_machine
from headwise.machine.takeover_points import (
    FROM_POINTS,
    NEVER,
    POINT_NAMES,
    UNMEASURED,
    UP_TO_POINTS,
    Calibration,
    assume_points,
    calibration_path,
    current_points,
    installed_versions,
    points_of_class,
    read_calibration,
    read_table,
    takeover_size,
    user_cache_folder,
)
from headwise.ops.linear import linear, uses_gemv_kernel
from support.layer_cases import check_close

PLAIN = hw.design(model=64, heads=4, pattern="causal")
XEON = MachineCapabilities("Intel Xeon", "x86_64", ("AVX2", "AVX-512", "VNNI"), 2, 2)


# --- the table ------------------------------------------------------------------------------------


def test_every_entry_names_a_point_and_a_machine():
    table = read_table()
    assert set(table) <= {"any", *MACHINE_CLASSES}
    for entries in table.values():
        assert set(entries) <= set(POINT_NAMES)
        assert all(point.measured_on for point in entries.values())
    for measured_class in ("x86-avx512-bf16", "x86-amx"):
        assert set(table[measured_class]) | set(table["any"]) == set(POINT_NAMES)
    assert not set(FROM_POINTS) & set(UP_TO_POINTS)


@pytest.mark.parametrize(
    "text",
    [
        '[machines]\na = "A"\n[x86-avx3]\nflash_cpu = { from = 1, on = "a" }',
        '[machines]\na = "A"\n[x86-avx2]\nflash_cpu = { from = 1, on = "b" }',
        '[machines]\na = "A"\n[x86-avx2]\nflash_cpu = { up_to = 1, on = "a" }',
        '[machines]\na = "A"\n[x86-avx2]\nflash_gpu = { from = 1, on = "a" }',
        '[machines]\na = "A"\n[x86-avx2]\nflash_cpu = { from = "seldom", on = "a" }',
    ],
    ids=["class", "machine", "kind", "point", "size"],
)
def test_a_wrong_entry_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"has an (entry|unknown class)"):
        read_table(path)


@pytest.mark.parametrize("name", [name for name in MACHINE_CLASSES if name not in read_table()])
def test_where_nobody_measured_no_kernel_is_preferred(name: str):
    points = points_of_class(name)
    measured_anywhere = read_table()["any"]
    assert all(
        points.points[point] == UNMEASURED[point]
        for point in POINT_NAMES
        if point not in measured_anywhere
    )
    assert UNMEASURED["flash_cpu"].size == math.inf
    assert UNMEASURED["gemm_tokens_float32"].size == UNMEASURED["bf16_matmul_gradients"].size == 0
    with assume_points(points):
        for dtype in ("fp32", "bf16"):
            for tokens in (20, 5000):
                assert hw.why(PLAIN, tokens=tokens, dtype=dtype).backend == "sdpa"
                assert hw.why(PLAIN, tokens=tokens, dtype=dtype, when=["grad"]).backend == "sdpa"
        assert (
            hw.why(PLAIN, tokens="one").backend
            == hw.why(PLAIN, tokens=hw.CallSize(64, 1, 1, 9000)).backend
            == "sdpa"
        )
        refusal = hw.why(PLAIN).reasons_against["flash_cpu"]
        assert refusal == [
            (
                f"not measured on this class of machine ({name}); headwise bench --calibrate "
                "measures "
                "it"
            )
        ]
        assert hw.why(PLAIN).backend == "sdpa"
        assert "nothing was measured (flash_cpu" in " ".join(str(hw.why(PLAIN)).split())


def test_one_thread_has_sizes_of_its_own():
    sizes = [
        points_of_class("x86-avx512-bf16", threads).points["gemv_float32"].size
        for threads in (None, 1, 2)
    ]
    assert sizes == [1572864, 4194304, 1572864]
    x, w = torch.randn(1, 512), torch.randn(1024, 512)
    with torch.no_grad():
        with assume_points(points_of_class("x86-avx512-bf16", 1)):
            assert not uses_gemv_kernel(x, [w])
            plain = linear(x, w)
        with assume_points(points_of_class("x86-avx512-bf16", 2)):
            assert uses_gemv_kernel(x, [w])
            check_close(linear(x, w), plain, rtol=1e-4, atol=1e-4)


# --- choices by class -----------------------------------------------------------------------------


def test_products_in_bf16_need_the_instructions():
    """On processors without bf16 instructions torch's fused call was measured
    to be twice as fast.
    """
    chosen = {}
    for name in ("x86-avx512", "x86-avx512-bf16"):
        with assume_points(points_of_class(name)):
            chosen[name] = [
                hw.why(PLAIN, tokens=1024, dtype="bf16", when=when).backend
                for when in ([], ["grad"])
            ]
            if name == "x86-avx512":
                [reason] = hw.why(PLAIN, tokens=1024, dtype="bf16").reasons_against["bf16_matmul"]
                assert (
                    reason
                    == "torch's fused call takes less time on this class of machine (x86-avx512)"
                )
    assert chosen == {
        "x86-avx512": ["sdpa", "sdpa"],
        "x86-avx512-bf16": ["bf16_matmul", "bf16_matmul"],
    }


def test_a_point_up_to_which_products_are_faster():
    """With AMX, torch's fused bfloat16 call is faster from some hundred keys on, and forward passes
    at every length.
    """
    with assume_points(points_of_class("x86-amx", 2)):
        few, many = (
            hw.why(PLAIN, tokens=tokens, dtype="bf16", when=["grad"]) for tokens in (300, 1024)
        )
        assert hw.why(PLAIN, tokens=300, dtype="bf16").backend == "sdpa"
    assert (few.backend, many.backend) == ("bf16_matmul", "sdpa")
    assert few.call.length_ranges[-2:] == [(0, "bf16_matmul"), (328, "sdpa")]
    [reason] = many.reasons_against["bf16_matmul"]
    assert reason == "torch's fused call takes less time above 327 keys; this call has 1,024"


def test_a_layer_made_on_one_class_runs_by_the_points_of_the_call():
    """A plan that a layer keeps does not freeze the choice."""
    layer, x = hw.Attention(PLAIN).bfloat16().eval(), torch.randn(1, 40, 64).bfloat16()
    ran = []
    for backend in BACKENDS.values():
        original = backend.attend
        backend.attend = lambda *args, original=original, b=backend: (
            ran.append(b),
            original(*args),
        )[1]
        backend.original = original
    try:
        with torch.no_grad():
            outputs = []
            for name in ("x86-avx512-bf16", "x86-avx512", "x86-avx512-bf16"):
                with assume_points(points_of_class(name)):
                    outputs.append(layer(x).float())
    finally:
        for backend in BACKENDS.values():
            backend.attend = backend.original
            delattr(backend, "original")
    assert ran == [BACKENDS["bf16_matmul"], BACKENDS["sdpa"], BACKENDS["bf16_matmul"]]
    assert torch.equal(outputs[0], outputs[2])
    check_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)  # rounding of bfloat16


def test_few_tokens_go_to_torch_where_its_product_was_faster():
    x, w = torch.randn(2, 1024), torch.randn(1024, 1024)
    with torch.no_grad():
        with assume_points(points_of_class("x86-avx512")):
            assert not uses_gemv_kernel(x, [w])
            plain = linear(x, w)
        with assume_points(points_of_class("x86-avx512-bf16")):
            assert uses_gemv_kernel(x, [w])
            check_close(linear(x, w), plain, rtol=1e-4, atol=1e-4)
        assert torch.equal(plain, torch.nn.functional.linear(x, w))


def test_elementwise_kernels_and_packed_rows_go_by_their_points():
    x = torch.randn(1, 64)
    with torch.no_grad():
        with assume_points(points_of_class("x86-avx2")):
            assert not small_batch_ops.is_small_batch(x)
            packed = str(hw.why(PLAIN, when=["packed"]))
            assert "in one kernel" not in packed
        assert small_batch_ops.is_small_batch(x)
        assert "up to 256 tokens in one kernel" in " ".join(
            str(hw.why(PLAIN, when=["packed"])).split()
        )


@pytest.mark.parametrize("preset", ["mha", "gqa", "moh", "longformer", "linear", "diff2"])
@pytest.mark.parametrize("name", ["x86-avx2", "x86-avx512", "aarch64-bf16"])
def test_results_do_not_depend_on_the_choice(preset: str, name: str):
    layer = hw.Attention(hw.design(preset=preset, model=64, heads=4)).eval()
    own = points_of_class("x86-avx512-bf16").with_sizes(
        flash_cpu=0, routed=0, block_sparse=0, linear=0
    )
    x, outputs, grads = torch.randn(2, 70, 64), [], []
    for points in (own, points_of_class(name)):
        with assume_points(points):
            y = layer(x)
            outputs.append(y.detach())
            grads.append(
                torch.autograd.grad(y.square().sum(), list(layer.parameters()), allow_unused=True)
            )
    check_close(*outputs, rtol=1e-4, atol=1e-5)
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            check_close(one, other, rtol=1e-3, atol=1e-3)


def test_compiled_graphs_leave_out_what_is_never_preferred():
    call = CallSignature(PLAIN, PLAIN.core, is_compiling=True)
    size = hw.CallSize(1, 5, 5, 5)
    assert make_dispatch(call).select_for_size(size) == "flash_cpu"  # at every length
    with assume_points(points_of_class("aarch64")):
        assert make_dispatch(call).select_for_size(size) == "sdpa"
        assert (
            make_dispatch(call, "flash_cpu").select_for_size(size) == "flash_cpu"
        )  # named by the caller


@pytest.mark.compile
def test_a_compiled_layer_runs_by_the_points():
    layer, x = hw.Attention(PLAIN).eval(), torch.randn(1, 70, 64)
    with torch.no_grad(), assume_points(points_of_class("x86-avx2")):
        expected = layer(x)
        compiled = torch.compile(layer, fullgraph=True)
        check_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


# --- the variable ---------------------------------------------------------------------------------


def test_a_class_can_be_chosen_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWISE_MACHINE_CLASS", "x86-avx512")
    assert takeover_points._find_points(XEON, 1) == points_of_class("x86-avx512")
    monkeypatch.setenv("HEADWISE_MACHINE_CLASS", "x86-avx")
    with pytest.raises(
        ValueError, match=r"HEADWISE_MACHINE_CLASS is 'x86-avx'; use one of x86-avx2, x86-avx512, "
    ):
        takeover_points._find_points(XEON, 1)


# --- calibrations ---------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, and no class chosen by name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HEADWISE_MACHINE_CLASS")
    return tmp_path


def calibrated(threads: int = 1, **changed: object) -> Calibration:
    points = {"flash_cpu": 96.0, "bf16_matmul": NEVER}
    made = Calibration(
        XEON.processor, XEON.instructions, threads, installed_versions(), 1.8e9, points
    )
    return replace(made, **changed)


def store(calibration: Calibration, threads: int = 1) -> Path:
    path = calibration_path(threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(takeover_points.write_text_of(calibration))
    return path


def test_a_calibration_replaces_the_table(home: Path):
    assert read_calibration(XEON, 1) == (None, "")
    store(calibrated())
    assert read_calibration(XEON, 1) == (calibrated(), "")
    points = takeover_points._find_points(XEON, 1)
    assert points.points["flash_cpu"].size == 96
    assert points.points["bf16_matmul"].size == NEVER
    assert (
        points.points["block_sparse"] == points_of_class("x86-avx512").points["block_sparse"]
    )  # was not measured
    assert points.describe() == [
        (
            "take-over points: calibration of this machine, 2027-01-15, 1 thread, "
            f"{installed_versions()}"
        )
    ]
    with assume_points(points):
        assert hw.why(PLAIN, tokens=96).backend == "flash_cpu"
        assert hw.why(PLAIN, tokens=95).backend == "sdpa"
        assert "calibration of this machine" in " ".join(str(hw.why(PLAIN)).split())
        assert hw.why(PLAIN).data["takeover_points"]["sizes"]["flash_cpu"] == 96


@pytest.mark.parametrize(
    ("calibration", "reason"),
    [
        (calibrated(processor="AMD EPYC"), "is of another machine (AMD EPYC, not Intel Xeon)"),
        (calibrated(instructions=("AVX2",)), "is of another machine"),
        (
            calibrated(versions="headwise 0.0.1, torch 1.0"),
            "was made with headwise 0.0.1, torch 1.0, not headwise",
        ),
        (calibrated(threads=2), "was made with 2 threads, not 1"),
        (calibrated(points={"flash_cpu": -1.0}), "is damaged"),
    ],
    ids=["processor", "instructions", "version", "threads", "negative"],
)
def test_a_calibration_that_does_not_hold_is_not_used_and_said(
    home: Path, calibration: Calibration, reason: str
):
    path = store(calibration)
    points = takeover_points._find_points(XEON, 1)
    assert points.points == points_of_class("x86-avx512").points
    problem = points.describe()[-1]
    assert problem.startswith(f"the calibration in {path} ")
    assert reason in problem
    assert problem.endswith("it is not used; run headwise bench --calibrate")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"points": {"flash_cpu": "much"}}', "null"])
def test_a_damaged_calibration_is_not_used_and_said(home: Path, text: str):
    store(calibrated()).write_text(text)
    calibration, problem = read_calibration(XEON, 1)
    assert calibration is None
    assert "is damaged; it is not used" in problem


def test_a_calibration_that_cannot_be_read_is_said(home: Path):
    calibration_path(1).mkdir(parents=True)
    assert "the calibration cannot be read: " in read_calibration(XEON, 1)[1]


def test_points_follow_the_number_of_threads(home: Path, monkeypatch: pytest.MonkeyPatch):
    """`torch.set_num_threads` between two calls: each goes by the calibration of its number, or by
    the table.
    """
    monkeypatch.setattr(takeover_points, "this_machine", lambda: XEON)
    monkeypatch.setattr(takeover_points, "_CURRENT", takeover_points._CurrentPoints())
    store(calibrated())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert takeover_size("flash_cpu") == 96
        torch.set_num_threads(2)
        assert takeover_size("flash_cpu") == NEVER
        assert (
            current_points().problem
            == "the calibration for 1 threads is not used, because torch has 2 now"
        )
        torch.set_num_threads(1)
        assert takeover_size("flash_cpu") == 96
        store(calibrated(points={"flash_cpu": 7.0}))
        assert takeover_size("flash_cpu") == 96
        takeover_points.forget_points()
        assert takeover_size("flash_cpu") == 7
    finally:
        torch.set_num_threads(threads)


def test_the_cache_folder_is_that_of_the_desktop(home: Path, monkeypatch: pytest.MonkeyPatch):
    assert user_cache_folder() == home / ".cache" / "headwise"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert user_cache_folder() == calibration_path(2).parent == home / "elsewhere" / "headwise"
    monkeypatch.setenv(
        "XDG_CACHE_HOME", "relative"
    )  # to be ignored, says the specification of these folders
    assert user_cache_folder() == home / ".cache" / "headwise"


def test_without_a_home_folder_the_table_applies(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert read_calibration(XEON, 1) == (
        None,
        "the calibration cannot be read: Could not determine home directory.",
    )


def test_the_command_says_the_machine(home: Path):
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "why", "mha", "--model", "64", "--heads", "4", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    data = json.loads(done.stdout)
    assert (
        data["machine"]["class"] == data["takeover_points"]["class"] == this_machine().machine_class
    )
    assert data["machine"]["processor"] == this_machine().processor
