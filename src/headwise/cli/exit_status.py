"""How a command ends: one line for every error, its exit code, closed streams, and SIGTERM."""

from __future__ import annotations

import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from .. import __version__
from ..errors import NoBackend
from ..escaping import shorten_message
from .arguments import BAD_INPUT

INTERNAL_ERROR, INTERRUPTED, PIPE_CLOSED, TERMINATED = 3, 130, 141, 143
OUT_OF_MEMORY = "out of memory; use a smaller batch, model or number of tokens"
MAX_MESSAGE = 2000  # characters of an error line


class Terminated(SystemExit):
    """SIGTERM was received; every context manager of the command ends as after an error."""


def run_guarded(command: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    0 is success, 1 and 2 are results and bad input, 3 an error of headwise itself, 130 Ctrl-C, 141 a reader that has
    left, 143 SIGTERM.
    """
    try:
        with _sigterm_as_exception():
            code = command(list(argv))
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated:
        return TERMINATED
    except SystemExit:
        raise
    except BrokenPipeError:
        return PIPE_CLOSED
    except (ValueError, OSError, OverflowError, NoBackend) as error:
        return print_error(str(error) or type(error).__name__)
    except MemoryError:
        return print_error(OUT_OF_MEMORY)
    except BaseException as error:  # panics of libraries written in Rust are no Exception
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            return print_error(OUT_OF_MEMORY)
        return _report_internal_error(error, argv)
    finally:
        _drop_unwritten_output()


def print_error(message: str, code: int = BAD_INPUT) -> int:
    """Print an error in one line to stderr, if it can be written; return the exit code."""
    line = shorten_message(message)
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ..."
    with suppress(OSError, ValueError):
        print(f"headwise: {line}", file=sys.stderr, flush=True)
    return code


def _report_internal_error(error: BaseException, argv: Sequence[str]) -> int:
    """Write the traceback to a temporary file, and print one line that names it."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    versions = f"headwise {__version__}, Python {platform.python_version()}, {platform.platform()}"
    lines = [versions, f"arguments: {list(argv)!r}", "", "".join(traceback.format_exception(error))]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="headwise-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write("\n".join(lines))
    except OSError:
        return print_error(f"error of headwise itself: {reason}; please report it", INTERNAL_ERROR)
    return print_error(f"error of headwise itself: {reason}; please report it with {file.name}", INTERNAL_ERROR)


def open_closed_streams() -> None:
    """Connect standard streams that are closed to the null device.

    Otherwise the next file that is opened would get the number of a closed stream, and libraries would write to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - kept open


def _drop_unwritten_output() -> None:
    """Connect streams that cannot be written to the null device; Python would report the error again when it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, unless the caller has a handler of its own."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise Terminated(TERMINATED)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
