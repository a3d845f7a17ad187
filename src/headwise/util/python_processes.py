"""Start Python processes that import nothing from the working folder.

`python -c` and `python -m` put the working folder first in `sys.path`. If that is a model folder,
its `torch.py` would run. Every Python process that headwise starts uses `python_command`, or starts
within `safe_import_path`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH = "PYTHONSAFEPATH"


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this Python with `arguments`, without the working folder in
    `sys.path`.

    >>> python_command("-m", "headwise")[1:]
    ['-P', '-m', 'headwise']
    """
    return [sys.executable, "-P", *arguments]


@contextmanager
def safe_import_path() -> Iterator[None]:
    """Context in which processes that a library starts (workers of a pool, of Ray, of a compiler)
    have `-P` too.
    """
    previous = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(SAFE_PATH, None)
        else:
            os.environ[SAFE_PATH] = previous
