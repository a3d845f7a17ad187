"""The machine and the versions that a run belongs to, and what is odd about them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..counting.here import processor
from ..errors import SpecError
from .limits import Limits

# Whoever a row may be compared with, by the name under which it is installed.
PACKAGES = ("torch", "numpy", "numba", "transformers", "x-transformers", "entmax", "local-attention", "ctranslate2")
UNKNOWN = "unknown"
BUSY = 1.0  # a load that is more than this process starting


def machine(limits: Limits, threads: int) -> dict[str, Any]:
    """Processor, threads, caches, versions, rates, and labels: what a reader has to know before the numbers."""
    said = versions()
    told = limits.last.told
    labels = ["1 thread: others use more"] if threads == 1 else []
    labels += [f"{name}: unknown version" for name, which in said.items() if which == UNKNOWN]
    load = os.getloadavg()[0]  # of the last minute, in processes that want to run
    labels += [f"other work ran too: a load of {load:.1f} before"] if load > BUSY else []
    labels += [] if told else ["the size of the last-level cache is assumed"]
    name = torch.cuda.get_device_name() if limits.kind == "cuda" else processor()
    return {
        "processor": name, "threads": threads, "processors": processors(), "last_level_cache_bytes": limits.last.size,
        "buffer_bytes": limits.bytes_read, "versions": said, **limits.header(), "labels": labels,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """The version of everything that is installed; what says none is unknown."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name) or UNKNOWN
        except PackageNotFoundError:
            continue
        except (KeyError, TypeError):  # there, but its description is damaged
            found[name] = UNKNOWN
    return found


def processors() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux says which: elsewhere it may use all
        return os.cpu_count() or 1


def checked(threads: int | None) -> int:
    """So many threads, or as many as there are processors.

    >>> checked(0)
    Traceback (most recent call last):
    headwise.errors.SpecError: threads=0 are not between 1 and ...; leave it out to use all
    """
    most = processors()
    if threads is not None and not 1 <= threads <= most:
        raise SpecError(f"threads={threads} are not between 1 and the {most} processors; leave it out to use all")
    return threads or most


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """torch and numba use so many threads; afterwards, as many as before."""
    numba: Any = import_module("numba")  # of whose types little is told
    before, others = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # it cannot use more than it began with
    try:
        yield
    finally:
        torch.set_num_threads(before)
        numba.set_num_threads(others)
