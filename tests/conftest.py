"""Settings of every test: one thread, a seed for each test, and uninitialised memory filled with
NaN.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import zlib
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

try:
    import hypothesis
except ImportError:  # on a GPU's machine: the tests that `make gpu` runs need none
    hypothesis = None

from support.pretended_device import register_device
from support.shape_checks import install_shape_checks

os.environ["LC_ALL"] = "C.UTF-8"  # English texts, whatever the locale of the user
# the same kernels run however many are compiled; processes inherit it
os.environ["HEADWISE_KERNELS"] = "wait"

ROOT = Path(__file__).resolve().parent.parent
FAST_CASES = 3  # how many cases of each parametrised test `--fast` keeps

# the same choices on every machine, whatever was calibrated
os.environ["HEADWISE_MACHINE_CLASS"] = "x86-avx512-bf16"

# several processes share the cores; more threads than cores only wait for each other
torch.set_num_threads(1)


# Without a GPU, seed the generator of the CPU alone: `torch.manual_seed` also stores a stack trace
# for each kind of device that may be initialised later, which takes longer than most tests.
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


# --- hypothesis -----------------------------------------------------------------------------------


class TorchRandom:
    """The random generator of torch for hypothesis: seeded before each example and restored
    afterwards.
    """

    def seed(self, value: int) -> None:
        seed_torch(value)

    def getstate(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()

    def setstate(self, state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


if hypothesis is not None:
    TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference only
    hypothesis.register_random(TORCH_RANDOM)

    # Compiling and first calls make any deadline a coin toss. `--hypothesis-profile=slow` chooses the
    # other.
    hypothesis.settings.register_profile(
        "default", derandomize=True, max_examples=25, deadline=None
    )
    hypothesis.settings.register_profile("slow", derandomize=True, max_examples=500, deadline=None)
    hypothesis.settings.load_profile("default")


# --- around every test ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def seed_generators(request: pytest.FixtureRequest) -> None:
    """Seed all generators from the id of the test, so that numbers depend neither on the run nor on
    its order.
    """
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - seeds what others draw; our own code takes a generator
    seed_torch(seed)


def nan_initialised(make):
    """Wrap a function that creates tensors: floating-point results are filled with NaN."""

    def create(*args, **kwargs):
        fresh = make(*args, **kwargs)
        if fresh.is_floating_point() or fresh.is_complex():
            with torch.no_grad():
                fresh.fill_(float("nan"))
        return fresh

    return create


EMPTY_FUNCTIONS = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name in EMPTY_FUNCTIONS]


@pytest.fixture(autouse=True, scope="session")
def nan_filled():
    """torch.empty, torch.empty_like and Tensor.new_empty return NaN during the whole session,
    fixtures included.
    """
    # `with torch.device(...)` looks functions up in a list that torch makes once.
    importlib.import_module("torch.utils._device")._device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, make in ORIGINALS:
            patch.setattr(owner, name, nan_initialised(make))
        yield


@pytest.fixture(autouse=True)
def plain_empty_in_compile_tests(request: pytest.FixtureRequest, nan_filled: None):
    """Compile tests use the real torch.empty, because decompositions of Inductor call it while
    tracing.
    """
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, make in ORIGINALS if request.node.get_closest_marker("compile") else ():
            patch.setattr(owner, name, make)
        yield


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Hide what earlier modules imported from the garbage collector: a full collection would walk
    through all of it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def small_curves():
    """Figures have few pixels, and runs write small pictures of their learning curves, because
    drawing them takes longer than most of these runs.
    """
    if any(find_spec(name) is None for name in ("matplotlib", "tokenizers")):
        yield  # on a GPU's machine: nothing is drawn
        return
    from headwise.report import plots
    from headwise.training import loop
    from support.small_training import save_small_curves

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_curves", save_small_curves)
        patch.setitem(plots.SAVE_OPTIONS, ".png", {"dpi": 20})
        yield


@contextlib.contextmanager
def without_rendering():
    """Figures are drawn by matplotlib but not rendered, which takes a second each."""
    from headwise.report import plots
    from headwise.util.escaping import escape_svg

    def draw_only(figure, suffix: str, theme: str = "light", font: str = "path") -> bytes:
        with plots.figure_style(plots.THEMES[theme]):
            plots.draw(figure, plots.THEMES[theme])
        text = f'<svg xmlns="http://www.w3.org/2000/svg">{escape_svg(figure.title)}</svg>'
        return b"\x89PNG" if suffix == ".png" else f'<?xml version="1.0"?>{text}'.encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "to_bytes", draw_only)
        yield


@pytest.fixture(scope="module")
def unrendered_figures():
    """Render no figure in the tests of a module."""
    with without_rendering():
        yield


@pytest.fixture
def unrendered_figure():
    """Render no figure in one test."""
    with without_rendering():
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """A folder `shared` with real data beside the checkout; tests that need it are skipped without
    it.
    """
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("there is no folder `shared` beside the checkout")
    return folder


# --- what runs ------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shapes", action="store_true", help="hold every tensor to the letters in its name"
    )
    parser.addoption(
        "--fast", action="store_true", help=f"keep {FAST_CASES} cases of each parametrised test"
    )


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    # before the first backward pass, which counts the devices
    if runs_tests and not torch.cuda.is_available():
        register_device()
    # a process that only hands out tests imports nothing
    if config.getoption("--shapes") and runs_tests:
        install_shape_checks()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector, which took half of the time, and hide what was
    collected from it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "anchors"):
            item.add_marker("anchors")
    selected = select_fast(items) if config.getoption("--fast") else {*items}
    if not torch.cuda.is_available():
        selected -= {item for item in items if item.get_closest_marker("gpu")}
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


def select_fast(items: list[pytest.Item]) -> set[pytest.Item]:
    """All items, except that of each parametrised test only FAST_CASES evenly spaced cases stay."""
    items_by_test: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        items_by_test[item.path, getattr(item, "originalname", item.name)].append(item)
    selected = set()
    for cases in items_by_test.values():
        if len(cases) > FAST_CASES:
            cases = [cases[(len(cases) - 1) * n // (FAST_CASES - 1)] for n in range(FAST_CASES)]
        selected.update(cases)
    return selected


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run in which every test was skipped, as pytest fails a run that found no test."""
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    any_passed = report is None or session.config.option.collectonly or report.stats.get("passed")
    if exitstatus == pytest.ExitCode.OK and not any_passed:
        report.write_line("no test ran: every one was skipped", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
