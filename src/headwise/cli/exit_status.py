"""Exit handling of commands: one-line errors and warnings, exit codes, closed streams, SIGTERM."""

from __future__ import annotations

import errno
import io
import logging
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from .. import __version__
from ..util.errors import NoBackend
from ..util.escaping import escape_page, shorten_message
from .arguments import BAD_INPUT

INTERNAL_ERROR = 3
INTERRUPTED = 130
PIPE_CLOSED = 141
TERMINATED = 143
OUT_OF_MEMORY = "out of memory; use a smaller batch, model or number of tokens"
DEVICE_OUT_OF_MEMORY = f"the device is {OUT_OF_MEMORY}, --dtype bf16, or --device cpu"
MAX_MESSAGE = 2000  # characters of an error line
REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOENT: "give a path that exists",
    errno.EACCES: "give a path that you may use",
    errno.EPERM: "give a path that you may use",
    errno.ENOSPC: "make room and try again",
    errno.EDQUOT: "make room and try again",
    errno.EMFILE: "allow more open files with ulimit -n",
}


class Terminated(SystemExit):
    """Raised on SIGTERM, so that the command's context managers exit as after an error."""


def run_guarded(command: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    0 is success, 1 a result, 2 bad input, 3 an internal error, 130 Ctrl-C, 141 a closed pipe, 143
    SIGTERM.
    """
    signals = _SignalRecord()
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        with signals, _notices_in_one_line(), _sigterm_as_exception():
            code = command(list(argv))
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return TERMINATED if signal.SIGTERM in signals.received else INTERRUPTED
    except Terminated:
        return TERMINATED
    except SystemExit:
        raise
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError as error:
        return print_error(_describe_os_error(error))
    except (ValueError, OverflowError, NoBackend) as error:
        # arguments of functions as the options of the same name
        text = _text_of(error).replace("overwrite=True", "--overwrite")
        text = text.replace("device='", "--device '").replace("dtype='", "--dtype '")
        return print_error(text or type(error).__name__)
    except MemoryError:
        return print_error(OUT_OF_MEMORY)
    except BaseException as error:  # Rust panics do not derive from Exception
        if isinstance(error, RuntimeError) and "allocate memory" in _text_of(error):
            return print_error(OUT_OF_MEMORY)
        if isinstance(error, RuntimeError) and "out of memory" in _text_of(error):  # of CUDA, MPS
            return print_error(DEVICE_OUT_OF_MEMORY)
        return _report_internal_error(error, argv)
    finally:
        _drop_unwritten_output()


def _text_of(error: BaseException) -> str:
    """Return the text of an exception; "" if its class cannot make one."""
    try:
        return str(error)
    except Exception:
        return ""


def _describe_os_error(error: OSError) -> str:
    """Describe an OS error: path, system message, and a remedy. Keeps errors already explained by
    headwise.
    """
    if error.strerror is None or error.errno is None:
        return _text_of(error) or type(error).__name__
    name = "go on" if error.filename is None else f"use {os.fsdecode(error.filename)!r}"
    return (
        f"cannot {name}: {error.strerror.lower()}; {REMEDIES.get(error.errno, 'give another path')}"
    )


def print_error(message: str, code: int = BAD_INPUT) -> int:
    """Print an error as one line to stderr, if possible; return the exit code."""
    line = shorten_message(message)
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ..."
    with suppress(OSError, ValueError):
        print(f"headwise: {line}", file=sys.stderr, flush=True)
    return code


def _report_internal_error(error: BaseException, argv: Sequence[str]) -> int:
    """Write the traceback to a temporary file, and print its path in one line."""
    reason = " ".join(f"{type(error).__name__}: {_text_of(error)}".split())[:300]
    versions = f"headwise {__version__}, Python {platform.python_version()}, {platform.platform()}"
    lines = [versions, f"arguments: {list(argv)!r}", "", "".join(traceback.format_exception(error))]
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="headwise-error-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write("\n".join(lines))
    except OSError:
        return print_error(f"error of headwise itself: {reason}; please report it", INTERNAL_ERROR)
    return print_error(
        f"error of headwise itself: {reason}; please report it with {file.name}", INTERNAL_ERROR
    )


def open_closed_streams() -> None:
    """Connect closed standard streams to the null device.

    Otherwise the next opened file would get a closed stream's number, and libraries would write to
    it.
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
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - kept open


def _drop_unwritten_output() -> None:
    """Connect unwritable streams to the null device; otherwise Python reports the error again on
    exit.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


class _SignalRecord:
    """Context that records received signals, including handled ones. Main thread only."""

    def __init__(self) -> None:
        self.received: set[int] = set()
        self._pipe: tuple[int, ...] = ()
        self._before = -1

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            for handle in self._pipe:
                os.set_blocking(handle, False)
            self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def __exit__(self, *_: object) -> None:
        if not self._pipe:
            return
        signal.set_wakeup_fd(self._before)
        with suppress(BlockingIOError):
            self.received.update(os.read(self._pipe[0], 1 << 16))
        for handle in self._pipe:
            os.close(handle)


@contextmanager
def _notices_in_one_line() -> Iterator[None]:
    """Show warnings in the same way as errors, and escape invisible characters in log records."""

    def make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_any_record(*args, **kwargs)
        with suppress(
            TypeError, ValueError
        ):  # the logger reports arguments that do not fit their message
            record.msg = escape_page(record.getMessage())
            record.args = ()
        return record

    make_any_record = logging.getLogRecordFactory()
    format_any_warning = warnings.formatwarning
    logging.setLogRecordFactory(make_record)
    warnings.formatwarning = lambda message, *_, **__: (
        f"headwise: {shorten_message(str(message))}\n"
    )
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_any_record)
        warnings.formatwarning = format_any_warning


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, unless the caller has installed a handler.

    Python drops what is raised while it deletes an object: the signal is then sent again.
    """

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise Terminated(TERMINATED)

    def send_again(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not Terminated:
            report_dropped(dropped)
            return
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    report_dropped = sys.unraisablehook
    sys.unraisablehook = send_again
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = report_dropped
