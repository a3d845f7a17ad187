"""No code of the working folder runs, whatever its files are called: in no command, nor in
processes that it starts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import headwise as hw
from headwise.cli import COMMANDS
from headwise.kernels.compilation import CompilationState
from headwise.studies.cells import Cell
from headwise.studies.process_engine import ProcessEngine
from support.saved_models import save_models

SOURCE = Path(hw.__file__).parent
NOT_INSTALLED = {"ray", "wandb", "mlflow", "triton", "sitecustomize", "usercustomize"}


def plant_modules(folder: Path, ran: Path) -> None:
    """Write a file for every module of Python and of the environment, which records in `ran` that
    it was run.
    """
    ran.mkdir()
    installed = {name for name in packages_distributions() if name.isidentifier()}
    for name in sys.stdlib_module_names | installed | NOT_INSTALLED:
        code = f"open({str(ran / name)!r}, 'w').close()\nraise ImportError('planted {name}')\n"
        (folder / f"{name}.py").write_text(code)


def test_processes_import_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    plant_modules(folder, ran)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    state, cell = CompilationState(), Cell("no", "task", 1.0, 1, {})
    state.start("no kernel")
    with pytest.raises(KeyError, match="task"), ProcessEngine(1) as engine:  # raised by a worker
        list(engine.run_cells([cell], tmp_path / "study"))
    [process] = state.running.values()
    assert process.wait(120) == 0
    assert [path.name for path in ran.iterdir()] == []


def test_python_is_started_in_one_place():
    files = [path for path in SOURCE.rglob("*.py") if "sys.executable" in path.read_text()]
    assert [path.relative_to(SOURCE).as_posix() for path in files] == ["util/python_processes.py"]


STUDY = """
hypothesis = "A window of 3 recalls less than full attention"
seeds = [1]
[recipe]
steps = 2
batch = 4
lr = [0.001]
evaluate_every = 2
evaluate_batches = 1
[variants.mha]
[variants.near]
options = { pattern = "window(3)" }
[tasks.recall]
vocabulary = 16
length = 16
pairs = [2, 3]
"""
TEXTS = "the cat sat\non the mat\nand the dog\nlay by it\n"
RECIPE = ("--steps", "4", "--set", "recipe.batch=4", "--set", "recipe.evaluate_batches=1")
FAST = ("--seconds", "0.05", "--length", "8")
# Arguments of every command; the working folder is a model folder with texts, a study file and
# planted modules.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "demo": ("--quick", "--out", "demo-out"),
    "learn": ("000",),
    "view": (".", "--text", "a cat", "--export", "page.html"),
    "spec": (".",),
    "cost": (".", "--plot", "cost.svg"),
    "walk": ("mha",),
    "train": ("copy", "--out", "run", "--set", "recipe.compile=on", *RECIPE),
    "study": ("study.toml", "--jobs", "2", "--out", "study-out"),
    "run": (".", "the cat", "--max-new-tokens", "4"),
    "sites": (".",),
    "heads": (".", "--data", "texts.txt", "--out", "heads-out"),
    "prune": (".", "--keep", "0.5", "--data", "texts.txt", "--out", "pruned", *FAST),
    "convert": (".", "--kv", "1", "--data", "texts.txt", "--out", "converted", *FAST),
    "trace": (".", "--text", "a cat", "--out", "a.trace"),
    "bench": ("qkv_projection:1 token", "--quick", "--out", "bench-out"),
    "why": ("mha",),
}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_the_working_folder(command: str, tmp_path: Path):
    folder, ran = save_models(tmp_path / "models")["gpt2"], tmp_path / "ran"
    plant_modules(folder, ran)
    (folder / "texts.txt").write_text(TEXTS)
    (folder / "study.toml").write_text(STUDY)
    environment = os.environ | {
        "HEADWISE_KERNELS": "auto",
        "NUMBA_CACHE_DIR": str(tmp_path / "kernels"),
    }
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    environment.pop("PYTHONSAFEPATH", None)
    argv = [str(Path(sys.executable).with_name("headwise")), command, *ARGUMENTS[command]]
    with subprocess.Popen(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _, errors = process.communicate(timeout=1500)
    wait_for_processes(folder)
    assert [path.name for path in ran.iterdir()] == []
    assert process.returncode == 0, errors


def wait_for_processes(folder: Path) -> None:
    """Wait until no process works in the folder: compilations go on after their
    command has ended.
    """
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        working = set[str]()
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                working.add(os.readlink(link))
        if str(folder) not in working:
            return
        time.sleep(0.5)
    raise TimeoutError("a background process did not end")
