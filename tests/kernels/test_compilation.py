"""Without Numba, with a broken one, and while kernels are compiled, every call works on torch
operations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.kernels import PagedDecodeOptions, attend_paged, launch
from headwise.kernels.compilation import (
    NO_CACHE_WARNING,
    STATE,
    CompilationState,
    compile_when_called,
)
from headwise.kernels.flash_attention import FLASH_ATTENTION_KERNELS, attend_key_ranges
from headwise.kernels.launch import KernelSet
from headwise.kernels.paged_decode import PAGED_DECODE_KERNELS
from support.tiny_configs import model_config

# Outputs, gradients and decode steps of presets, in float32 or float64 by turns, and of packed
# sequences.
COMPUTE = """
import sys
import torch
import headwise as hw

def results(spec, dtype):
    layer = hw.Attention(spec).to(dtype)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.2)
    x = torch.randn(2, 70, 64, dtype=torch.float64).to(dtype).requires_grad_()
    y = layer.eval()(x)
    yield from (y, *torch.autograd.grad(y.square().sum(), x))
    yield layer(x.detach(), sequence=hw.SequenceInfo.packed([[30, 40], [70]]))
    if spec.pattern.text.startswith("causal"):
        with torch.no_grad():
            cache = layer.cache(batch=2, capacity=72)
            yield layer(x[:, :69], cache=cache)
            yield layer(x[:, 69:], cache=cache)

found = {}
for turn, name in enumerate(sys.argv[2:]):
    options = {} if name in ("bigbird", "longformer", "mohsa", "average") else {"pattern": "causal"}
    torch.manual_seed(1)
    try:
        spec = hw.design(preset=name, model=64, heads=4, **options)
    except hw.SpecError:
        spec = hw.design(preset=name, model=64, heads=4)
    dtype = (torch.float32, torch.float64)[turn % 2]
    found[f"{name} {dtype}"] = [t.detach().double() for t in results(spec, dtype)]
torch.save(found, sys.argv[1])
"""
# Every backend of the CPU runs one of them in each dtype.
PRESETS = ("mha", "mla", "talking", "dcmha", "moh", "entmax", "entmax", "moh", "longformer")
WHY = "print(hw.why(hw.design(model=64, heads=4, pattern='causal')))\n"
HIDE_NUMBA = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.split(".")[0] in ("numba", "llvmlite") else find(name, *more)
"""


def run_python(code: str, *args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process of this interpreter; its package is that of these tests."""
    first = environment.pop("first_on_path", "")
    path = os.pathsep.join(filter(None, [first, str(Path(hw.__file__).parents[1])]))
    command = [sys.executable, "-W", "error", "-c", code, *map(str, args)]
    env = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.fixture(scope="module")
def kernel_results(tmp_path_factory) -> dict[str, list[Tensor]]:
    """The results of `COMPUTE` with kernels, in this process."""
    path = tmp_path_factory.mktemp("kernels") / "results.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", str(path), *PRESETS])
        exec(COMPUTE, {})
    return torch.load(path)


def check_results(path: Path, expected: dict[str, list[Tensor]]) -> None:
    found = torch.load(path)
    assert found.keys() <= expected.keys()
    for name in found:
        tensors = expected[name]
        rtol = 1e-3 if "float32" in name else 1e-9
        for ours, theirs in zip(found[name], tensors, strict=True):
            error = (ours - theirs).abs().max() / theirs.abs().max()
            assert error <= rtol, f"{name}: relative error {error:.1e}"


def test_everything_works_without_numba(tmp_path, kernel_results):
    code = HIDE_NUMBA + COMPUTE + "assert not {'numba', 'llvmlite'} & set(sys.modules)\n" + WHY
    run = run_python(code, tmp_path / "results.pt", *PRESETS)
    assert not run.returncode, run.stderr
    text = " ".join(run.stdout.split())
    assert "flash_cpu no: needs Numba, which is not installed" in text
    assert "paged caches are gathered before they are read" in text
    check_results(tmp_path / "results.pt", kernel_results)


def test_a_broken_numba_is_named(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(
        "raise ImportError('Numba needs NumPy 1.0 or less')"
    )
    run = run_python("import headwise as hw\n" + WHY, first_on_path=str(tmp_path))
    assert not run.returncode, run.stderr
    text = " ".join(run.stdout.split())
    assert (
        "needs Numba, which cannot be imported (ImportError: Numba needs NumPy 1.0 or less)" in text
    )
    assert "CPU kernels are off: flash_cpu, ragged and paged do not run" in text


def test_kernels_can_be_switched_off(monkeypatch):
    spec = hw.design(model=64, heads=4, pattern="causal")
    assert not hw.why(spec).reasons_against["flash_cpu"]
    monkeypatch.setattr(STATE, "setting", "off")
    assert hw.why(spec).reasons_against["flash_cpu"] == [
        "needs Numba kernels, which HEADWISE_KERNELS=off disables"
    ]
    monkeypatch.setattr(STATE, "setting", "later")
    with pytest.raises(ValueError, match="HEADWISE_KERNELS is 'later'; use one of auto, wait, off"):
        hw.why(spec)


def test_importing_and_building_a_layer_does_not_import_numba():
    code = """
import sys
import headwise as hw, headwise.attention.parts, headwise.attention.backends, headwise.kernels
hw.Attention(hw.design(preset="entmax", model=64, heads=4))
assert not {"numba", "llvmlite"} & set(sys.modules)
"""
    run = run_python(code)
    assert not run.returncode, run.stderr


# Softmax, as its kernel compiles faster than others.
FIRST_CALLS = """
import os, sys
os.environ["HEADWISE_KERNELS"] = "auto"
import torch
import headwise as hw
from headwise.kernels.compilation import STATE
from headwise.kernels.row_normalisers import SOFTMAX_KERNELS as KERNELS

torch.manual_seed(0)
s, allowed = torch.randn(1, 2, 70, 70), torch.rand(1, 1, 70, 70) < 0.7
plain = hw.parts.Softmax().normalise(s, allowed, {})
first = hw.parts.Softmax().fused_normalise(s, allowed, {})
assert torch.equal(first, plain), "the first call waits for no kernel"
(task, process), = STATE.running.items()
assert not KERNELS.compiled_functions
assert process.wait(240) == 0
then = hw.parts.Softmax().fused_normalise(s, allowed, {})
assert KERNELS.compiled_functions and KERNELS.compiled_functions["softmax", torch.float32].cache_hits == 1
assert not torch.equal(then, plain), "the kernel sums in another order"
torch.save(then, sys.argv[1])
"""


def test_torch_operations_run_while_a_process_compiles_the_kernel(tmp_path):
    run = run_python(FIRST_CALLS, tmp_path / "auto.pt", NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert not run.returncode, run.stderr
    torch.manual_seed(0)
    s, allowed = torch.randn(1, 2, 70, 70), torch.rand(1, 1, 70, 70) < 0.7
    assert torch.equal(
        torch.load(tmp_path / "auto.pt"), hw.parts.Softmax().fused_normalise(s, allowed, {})
    )


@pytest.mark.slow
def test_a_failed_background_compilation_leaves_it_to_the_call(tmp_path):
    code = """
import os, sys
os.environ["HEADWISE_KERNELS"] = "auto"
import torch
sys.executable = "/bin/false"
from headwise.kernels.compilation import STATE
from headwise.kernels.head_mixing import HEAD_MIXING_KERNELS
if not HEAD_MIXING_KERNELS.is_usable(torch.float32):
    [process] = STATE.running.values()
    assert process.wait(20) == 1
assert HEAD_MIXING_KERNELS.is_usable(torch.float32) and STATE.failed
"""
    run = run_python(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert not run.returncode, run.stderr


NO_CACHE = f"""
import os, sys, tempfile, warnings
from pathlib import Path
from types import SimpleNamespace
os.environ["HEADWISE_KERNELS"] = "auto"
import torch
from headwise.kernels.compilation import STATE
from headwise.kernels.linear import GEMV_KERNELS, multiply_small_batch
def check():
    assert multiply_small_batch(torch.ones(1, 16), [torch.ones(1, 16)]).tolist() == [[16.0]]
    assert [str(w.message) for w in caught] == [{NO_CACHE_WARNING!r}], [str(w.message) for w in caught]
"""
WITH_TEMPORARY_FOLDER = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert not GEMV_KERNELS.is_usable(torch.float32), "the first call waits for no kernel"
    [process] = STATE.running.values()
    assert process.wait(240) == 0
    assert GEMV_KERNELS.is_usable(torch.float32)
    check()
assert all(kernel.cache_hits == 1 for kernel in GEMV_KERNELS.compiled_functions.values())
print(STATE.temporary_folder())
"""
WITHOUT_TEMPORARY_FOLDER = """
tempfile.tempdir = os.environ["NUMBA_CACHE_DIR"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert GEMV_KERNELS.is_usable(torch.float32)
    check()
assert not STATE.running
"""


@pytest.fixture
def unwritable(tmp_path) -> dict[str, str]:
    """Cache folders inside a file, which nobody can make, whatever the permissions of the tests
    are.
    """
    (tmp_path / "file").touch()
    return {
        name: str(tmp_path / "file" / "cache") for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }


@pytest.mark.slow
def test_without_a_writable_cache_kernels_last_until_the_process_ends(unwritable):
    run = run_python(NO_CACHE + WITH_TEMPORARY_FOLDER, **unwritable)
    assert not run.returncode, run.stderr
    folder = Path(run.stdout.strip())
    assert folder.name.startswith("headwise-")
    assert not folder.exists()
    assert not run.stderr  # no warning either that the folder was left to the interpreter


@pytest.mark.slow
def test_without_any_writable_folder_the_call_compiles(unwritable):
    run = run_python(NO_CACHE + WITHOUT_TEMPORARY_FOLDER, **unwritable)
    assert not run.returncode, run.stderr


SCALE = """
import os, sys
from pathlib import Path
import numba
import torch
from headwise.kernels.linear import GEMV_KERNELS, multiply_small_batch

def scale():  # in a fork that has imported everything but kernels
    child = os.fork()
    if child == 0:
        assert multiply_small_batch(torch.ones(1, 16), [torch.ones(1, 16)]).tolist() == [[16.0]]
        print(GEMV_KERNELS.compiled_functions["gemv", torch.float32].cache_hits, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

assert not [name for name in sys.modules if name.startswith("headwise.kernels.") and name.endswith("_kernels")]
scale()
"""
DAMAGE = """
for pattern in ("*.nbi", "*.nbc"):
    for path in Path(os.environ["NUMBA_CACHE_DIR"]).rglob(pattern):
        path.write_bytes(path.read_bytes()[:-20])
    scale()
    scale()
"""


def list_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


@pytest.mark.slow
def test_kernels_are_kept_in_the_users_cache_folder_and_not_in_the_package(tmp_path):
    (tmp_path / "headwise" / "headwise-kernels-0").mkdir(parents=True)
    (tmp_path / "headwise" / "headwise-kernels-1").mkdir()
    # unchanged for more than 30 days
    os.utime(tmp_path / "headwise" / "headwise-kernels-0", (0, 0))
    folders = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    before = list_files(Path(hw.__file__).parent, "*.nb[ic]")
    run = run_python(SCALE + "scale()", **folders)
    assert (run.stdout, run.stderr) == ("0\n1\n", "")
    assert list_files(Path(hw.__file__).parent, "*.nb[ic]") == before
    kept, _ = sorted(
        (tmp_path / "headwise").iterdir(), key=lambda folder: len(folder.name), reverse=True
    )
    assert [path.suffix for path in list_files(kept, "*gemv*")] == [".nbc", ".nbi"]
    assert not (tmp_path / "headwise" / "headwise-kernels-0").exists()


@pytest.mark.slow
def test_damaged_files_in_the_cache_are_written_again(tmp_path):
    run = run_python(SCALE + DAMAGE, NUMBA_CACHE_DIR=str(tmp_path))
    assert (run.stdout.split(), run.stderr) == (["0", "0", "1", "0", "1"], "")


def test_a_compilation_that_leaves_nothing_on_disk_is_not_repeated(monkeypatch):
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **_: started.append(command) or EndedProcess()
    )
    state = CompilationState()
    state.start("a")
    assert not state.is_running("a")
    assert not state.failed
    state.start("a")
    assert len(started) == 1
    assert state.failed == {"a"}


def test_runs_that_must_repeat_compile_first(monkeypatch):
    monkeypatch.setattr(STATE, "setting", "auto")
    assert STATE.policy == "auto"
    with compile_when_called():
        assert STATE.policy == "wait"
        with compile_when_called():
            pass
        assert STATE.policy == "wait"
    assert STATE.policy == "auto"


@pytest.mark.parametrize("name", ["dcmha", "entmax", "recomputed blocks"])
def test_kernels_that_are_ready_before_the_backward_pass_wait_for_the_next_call(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """What is computed again saves the same tensors, as torch's checkpoint needs."""
    is_ready = [False]
    monkeypatch.setattr(KernelSet, "_is_usable_now", lambda self, dtype: is_ready[0])
    if name == "recomputed blocks":
        config = model_config("gpt2", n_embd=16, n_head=2, n_layer=1, vocab_size=11)
        spec = hw.families.read_model_spec(config)
        mixing = hw.design(preset="dcmha", model=16, heads=2, pattern="causal")
        (run,) = spec.stacks[0].runs
        run = replace(run, blocks=(replace(run.blocks[0], attention=mixing),))
        run = hw.build(replace(spec, stacks=(replace(spec.stacks[0], runs=(run,)),)), seed=0)
        run.checkpointing = "block"
        inputs = torch.arange(60).view(1, 60) % 11
    else:
        run = hw.Attention(hw.design(preset=name, model=16, heads=2, pattern="causal"))
        inputs = torch.randn(1, 300, 16)
    outputs = run(inputs)
    is_ready[0] = True
    outputs.sum().backward()
    torch.testing.assert_close(run(inputs), outputs, rtol=1e-4, atol=1e-5)


def test_a_block_table_is_checked_by_torch_operations_too(monkeypatch):
    k = torch.randn(2, 1, 4, 16)
    q, spans = torch.randn(1, 1, 16), torch.tensor([[[1, 0, 3], [9, 2, 2]]])
    expected, _ = attend_paged(q, k, k, spans, scale=0.25)
    monkeypatch.setattr(PAGED_DECODE_KERNELS, "is_usable", lambda dtype: False)
    found, _ = attend_paged(q, k, k, spans, scale=0.25)
    torch.testing.assert_close(found, expected)
    with pytest.raises(
        ValueError, match=r"spans hold \[1, 0, 5\]; give page, begin, end within 2 pages of 4 slots"
    ):
        attend_paged(q, k, k, torch.tensor([[[1, 0, 5]]]), scale=0.25)
    with pytest.raises(ValueError, match=r"sink is torch.float32 \[3\]"):
        attend_paged(q, k, k, spans, scale=0.25, options=PagedDecodeOptions(sink=torch.zeros(3)))


@pytest.mark.parametrize(("ends", "ahead"), [(None, None), (None, 0), (None, 7), ("ranges", None)])
def test_references_of_flash_attention_equal_the_kernels(monkeypatch, ends, ahead):
    def call() -> list[Tensor]:
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(2, n, h, d, dtype=torch.float64)
            for n, h, d in ((150, 4, 8), (157, 2, 8), (157, 2, 5))
        )
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        first = torch.randint(0, 100, (2, 150, 1))
        table = None
        if ends:
            table = torch.cat([first, first + torch.randint(-5, 60, (2, 150, 1)).clamp(min=0)], -1)
        o = attend_key_ranges(q, k, v, table, ahead, 0.3)
        return [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]

    expected = call()
    monkeypatch.setattr(FLASH_ATTENTION_KERNELS, "is_usable", lambda dtype: False)
    for found, expected_tensor in zip(call(), expected, strict=True):
        torch.testing.assert_close(found, expected_tensor, rtol=1e-10, atol=1e-12)


def test_background_compilations_leave_a_core_free(monkeypatch):
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **_: started.append(command) or SleepingProcess()
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    state = CompilationState()
    for task in ("a", "b", "c"):
        state.start(task)
    assert [command[-1] for command in started] == ["a", "b"]
    assert state.is_running("a")
    assert not state.is_running("c")


class EndedProcess:
    returncode = 0

    def poll(self) -> int:
        return 0


class SleepingProcess:
    returncode = None

    def poll(self) -> None:
        return None


def test_each_task_names_one_set_of_kernels():
    from headwise.kernels.__main__ import find_kernel_sets

    tasks = [kernels.task_name(dtype) for kernels in find_kernel_sets() for dtype in kernels.dtypes]
    assert len(set(tasks)) == len(tasks) > 10
    assert all(isinstance(kernels, KernelSet) for kernels in find_kernel_sets())


def test_without_the_openmp_runtime_kernels_run_in_one_thread(monkeypatch: pytest.MonkeyPatch):
    """As in builds of torch for macOS, whose runtime has no GOMP_parallel."""
    addresses: list[int] = []
    monkeypatch.setattr(launch, "OPENMP_RUNTIME", None)
    kernels = KernelSet("docs", {})
    kernels.compiled_functions["one", None] = SimpleNamespace(ctypes=addresses.append)
    kernels.run_kernel("one", None, SimpleNamespace(address=7), 4)
    assert (addresses, launch.max_threads()) == ([7], 1)
