"""When kernels are compiled: by a background process while torch operations do the work, or by the
first call.

A kernel takes 1 to 15 seconds to compile, once per user and version; the result is kept on disk
(`jit`). If the disk cannot be written, it is kept in a temporary folder until the process ends,
with one warning. The environment variable HEADWISE_KERNELS, read once at import, chooses what
a call does with a kernel that is not compiled yet:

- `auto` (default): a background process compiles it, and until then the call uses torch operations.
  Their results
  differ from the kernel's in the last bits.
- `wait`: the call compiles it. Training and benchmarks do this (`compile_when_called`), so that a
  run gives
  the same bits on a new machine as on one with compiled kernels.
- `off`: kernels are not used.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from tempfile import TemporaryDirectory
from typing import ParamSpec, TypeVar

import torch

from ..util.python_processes import python_command

POLICIES = ("auto", "wait", "off")
NO_CACHE_WARNING = (
    "compiled kernels cannot be kept on disk, so every process compiles them again; "
    "set NUMBA_CACHE_DIR to a folder that can be written"
)


class CompilationState:
    """The policy of this process, and its background compilations."""

    def __init__(self) -> None:
        self.setting = os.environ.get("HEADWISE_KERNELS", "auto")
        self.waiting = 0  # number of open `compile_when_called` contexts
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.started: set[str] = set()  # each at most once
        self.failed: set[str] = set()  # compiled by the call that needs them
        self.has_warned = False
        self._temporary: TemporaryDirectory[str] | None = None

    @property
    def policy(self) -> str:
        """The policy that applies now: one of `POLICIES`."""
        if self.setting not in POLICIES:
            raise ValueError(
                f"HEADWISE_KERNELS is {self.setting!r}; use one of {', '.join(POLICIES)}"
            )
        return "wait" if self.setting == "auto" and self.waiting else self.setting

    def is_running(self, task: str) -> bool:
        """Return True while the background process of this task is compiling; add the task to
        `failed` if it failed.
        """
        process = self.running.get(task)
        if process is None:
            return False
        if process.poll() is None:
            return True
        del self.running[task]
        if process.returncode:
            self.failed.add(task)
        return False

    def start(self, task: str) -> None:
        """Start a process that runs `python -m headwise.kernels TASK`, unless one already runs on
        every spare core.

        If it ran before, and the kernels still cannot be loaded, the task is added to `failed`.
        """
        if len(self.running) >= max(1, (os.cpu_count() or 2) - 1):
            return
        if task in self.started:
            self.failed.add(task)
            return
        self.started.add(task)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HEADWISE_KERNELS": "wait",
        }
        if self._temporary is not None:
            environment["NUMBA_CACHE_DIR"] = self._temporary.name
        try:
            self.running[task] = subprocess.Popen(
                python_command("-m", "headwise.kernels", task),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C ends the caller only; the kernels are then ready for the next process
                start_new_session=True,
            )
        except OSError:
            self.failed.add(task)

    def temporary_folder(self) -> str | None:
        """Return a folder for compiled kernels that is deleted when this process ends; warn about
        it once.

        None if no temporary folder can be made.
        """
        self.warn_without_cache()
        if self._temporary is None:
            try:
                self._temporary = TemporaryDirectory(prefix="headwise-", ignore_cleanup_errors=True)
            except OSError:
                return None
            atexit.register(self.stop)
        return self._temporary.name

    def stop(self) -> None:
        """End the background processes, which write into the temporary folder, and delete it."""
        for process in self.running.values():
            process.kill()
            process.wait()
        self.running.clear()
        if self._temporary is not None:
            self._temporary.cleanup()

    def warn_without_cache(self) -> None:
        """Warn once per process that compiled kernels cannot be kept."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(NO_CACHE_WARNING, stacklevel=2)


STATE = CompilationState()
# whether each kernel was usable when a function first ran that `with_same_kernels` made
CHOICES: ContextVar[dict[str, bool] | None] = ContextVar("CHOICES", default=None)
Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")


def with_same_kernels(run: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Return a function whose later calls use the kernels of its first call.

    For torch's checkpoint, which calls it again in the backward pass and then needs the same
    tensors to be saved, also if a kernel has been compiled in between.
    """
    choices: dict[str, bool] = {}

    def run_with_choices(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        token = CHOICES.set(choices)
        try:
            return run(*args, **kwargs)
        finally:
            CHOICES.reset(token)

    return run_with_choices


@contextmanager
def compile_when_called() -> Iterator[None]:
    """Compile missing kernels inside the call, so that its bits do not depend on the disk cache."""
    STATE.waiting += 1
    try:
        yield
    finally:
        STATE.waiting -= 1
