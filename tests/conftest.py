"""What every test may rely on: one thread, a seed of its own, and uninitialised memory that reads NaN."""

from __future__ import annotations

import os
import random
import zlib
from collections import defaultdict
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from shapes import hold_all

os.environ["HEADWISE_KERNELS"] = "wait"  # the same kernels run however many are compiled; processes inherit it

ROOT = Path(__file__).resolve().parent.parent
FAST_CASES = 3  # how many cases of each parametrised test `--fast` keeps

torch.set_num_threads(1)  # two processes on two cores; more threads than cores only wait for each other


# --- hypothesis ----------------------------------------------------------------------------------------


class TorchRandom:
    """torch's generator as hypothesis manages random ones: seeded before each example, restored after."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def getstate(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()

    def setstate(self, state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference only
hypothesis.register_random(TORCH_RANDOM)

# Compiling and first calls make any deadline a coin toss. `--hypothesis-profile=slow` chooses the other.
hypothesis.settings.register_profile("default", derandomize=True, max_examples=25, deadline=None)
hypothesis.settings.register_profile("slow", derandomize=True, max_examples=500, deadline=None)
hypothesis.settings.load_profile("default")


# --- around every test ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers in every run and in any order: the seed follows from the test's own name."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - seeds what others draw; our own code takes a generator
    torch.manual_seed(seed)


def poisoned(make):
    """`make`, its uninitialised floating-point memory set to NaN, so that reading it shows."""

    def made(*args, **kwargs):
        fresh = make(*args, **kwargs)
        if fresh.is_floating_point() or fresh.is_complex():
            with torch.no_grad():
                fresh.fill_(float("nan"))
        return fresh

    return made


UNINITIALISED = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
PLAIN = [(owner, name, getattr(owner, name)) for owner, name in UNINITIALISED]


@pytest.fixture(autouse=True, scope="session")
def nan_filled():
    """torch.empty, torch.empty_like and Tensor.new_empty give NaN, in fixtures too."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, make in PLAIN:
            patch.setattr(owner, name, poisoned(make))
        yield


@pytest.fixture(autouse=True)
def plain_for_the_compiler(request: pytest.FixtureRequest, nan_filled: None):
    """Inductor's own decompositions call torch.empty while tracing, so compile tests have the real one."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, make in PLAIN if request.node.get_closest_marker("compile") else ():
            patch.setattr(owner, name, make)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """A folder of real data and checkpoints named `shared`, beside the checkout, where there is one."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("there is no folder `shared` beside the checkout")
    return folder


# --- what runs -----------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shapes", action="store_true", help="hold every tensor to the letters in its name")
    parser.addoption("--fast", action="store_true", help=f"keep {FAST_CASES} cases of each parametrised test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shapes"):
        hold_all()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "anchors"):
            item.add_marker("anchors")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and torch finds none here"))
    if config.getoption("--fast"):
        spared = thinned(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in spared])
        items[:] = [item for item in items if item in spared]


def thinned(items: list[pytest.Item]) -> set[pytest.Item]:
    """All items, but of each parametrised test only the first, the last and those evenly between."""
    families: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.path, getattr(item, "originalname", item.name)].append(item)
    spared = set()
    for cases in families.values():
        if len(cases) > FAST_CASES:
            cases = [cases[(len(cases) - 1) * n // (FAST_CASES - 1)] for n in range(FAST_CASES)]
        spared.update(cases)
    return spared


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which every test was skipped has tested nothing: it ends as one that found no test."""
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    ran = report is None or session.config.option.collectonly or report.stats.get("passed")
    if exitstatus == pytest.ExitCode.OK and not ran:
        report.write_line("no test ran: every one was skipped", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
