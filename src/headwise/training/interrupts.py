"""Ctrl-C and a request to end, put off until a step is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptGuard:
    """Inside, the first Ctrl-C or SIGTERM only sets `asked`; the second ends at once, as outside.

    Only a main thread hears signals; in another one nothing changes.

    >>> with InterruptGuard() as interrupts:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupts.asked
    True
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
