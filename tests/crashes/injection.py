"""Run an action in a forked process that is ended at a file operation or after a time, or whose
disk fills.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TIME_LIMIT = 240.0  # seconds, after which a run counts as hanging
# Operations of Python that change a folder, as `sys.audit` names them, before which a process may
# be ended. Those with "ctypes" are the exchange of two folders.
CHANGES = (
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.truncate",
    "os.symlink",
    "ctypes.dlopen",
)
WRITING = os.O_WRONLY | os.O_RDWR


class Fault(NamedTuple):
    """What happens to a run: a signal before its n-th file operation or after some seconds; a disk
    with few bytes.
    """

    signal: int = 0
    operation: int = 0
    seconds: float = 0.0
    disk_bytes: int = -1


NO_FAULT = Fault()


class Run(NamedTuple):
    """How a run ended: its exit code, negative for a signal; how long it took, what it did, and
    what it printed.
    """

    code: int
    seconds: float
    operations: int
    disk_bytes: int
    output: str


def run_forked(action: Callable[[], int], folder: Path, fault: Fault = NO_FAULT) -> Run:
    """Run an action in a forked process; file operations below `folder` are counted."""
    receiver, sender = os.pipe()
    with tempfile.TemporaryFile(dir=folder.parent) as printed:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(receiver)
            _run_child(action, folder, fault, printed.fileno(), sender)
        os.close(sender)
        if fault.seconds:
            select.select([receiver], [], [], fault.seconds)
            os.kill(child, fault.signal)
        if not select.select([receiver], [], [], TIME_LIMIT)[0]:
            os.kill(child, signal.SIGKILL)
        data = b""
        while piece := os.read(receiver, 1 << 16):
            data += piece
        os.close(receiver)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    counts = json.loads(data) if data else {"operations": 0, "disk_bytes": 0}
    return Run(
        os.waitstatus_to_exitcode(status), time.monotonic() - started, **counts, output=output
    )


class OperationCounter:
    """Counts the file operations of this process below a folder, and sends it a signal before the
    n-th.
    """

    def __init__(self, folder: Path, fault: Fault) -> None:
        self.folder, self.fault, self.count = str(folder), fault, 0

    def install(self) -> None:
        """Count from now on, until the process ends."""
        sys.addaudithook(self._hear)
        for name in ("write", "fsync"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            is_change = isinstance(path, (str, bytes)) and bool((flags or 0) & WRITING)
        else:
            path, is_change = args[0] if args else None, event in CHANGES
        if is_change and (event == "ctypes.dlopen" or self._is_below(path)):
            self._tick()

    def _is_below(self, path: object) -> bool:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        return os.path.abspath(os.fsdecode(str(path))).startswith(self.folder)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(handle: int, *args: Any) -> Any:
            if self._is_below(handle):
                self._tick()
            return call(handle, *args)

        return counted

    def _tick(self) -> None:
        self.count += 1
        if self.count == self.fault.operation:
            signal.raise_signal(self.fault.signal)


def _run_child(
    action: Callable[[], int], folder: Path, fault: Fault, printed: int, sender: int
) -> None:
    """Run the action and leave the process; never returns."""
    code = 70
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for handle, number in ((null, 0), (printed, 1), (printed, 2)):
            os.dup2(handle, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        counter = OperationCounter(folder, fault)
        disk = ctypes.CDLL(None)
        disk.count_disk_bytes.restype = ctypes.c_long
        disk.set_disk_budget(ctypes.c_long(fault.disk_bytes))
        counter.install()
        code = action()
        sys.stdout.flush()
        report = json.dumps({"operations": counter.count, "disk_bytes": disk.count_disk_bytes()})
        os.write(sender, report.encode())
    except KeyboardInterrupt:  # after the end of the command
        code = 128 + signal.SIGINT
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
