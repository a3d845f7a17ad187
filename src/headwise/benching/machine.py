"""The machine and the versions that a run belongs to, and what is odd about them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..counting.here import processor_name
from ..errors import SpecError
from .limits import MachineLimits

# Whoever a row may be compared with, by the name under which it is installed.
PACKAGES = ("torch", "numpy", "numba", "transformers", "x-transformers", "entmax", "local-attention", "ctranslate2")
UNKNOWN = "unknown"
BUSY_LOAD = 1.0  # a load that is more than this process starting


def describe_machine(limits: MachineLimits, threads: int) -> dict[str, Any]:
    """Processor, threads, caches, versions, rates, and labels: what a reader has to know before the numbers."""
    said = package_versions()
    told = limits.last_level_cache.is_reported
    labels = ["1 thread: others use more"] if threads == 1 else []
    labels += [f"{name}: unknown version" for name, which in said.items() if which == UNKNOWN]
    load = os.getloadavg()[0]  # of the last minute, in processes that want to run
    labels += [f"other work ran too: a load of {load:.1f} before"] if load > BUSY_LOAD else []
    labels += [] if told else ["the size of the last-level cache is assumed"]
    name = torch.cuda.get_device_name() if limits.device_type == "cuda" else processor_name()
    return {
        "processor": name, "threads": threads, "processors": num_processors(), "last_level_cache_bytes": limits.last_level_cache.size,
        "buffer_bytes": limits.buffer_bytes, "versions": said, **limits.measure_rates(), "labels": labels,
    }  # fmt: skip


def package_versions() -> dict[str, str]:
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


def num_processors() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux says which: elsewhere it may use all
        return os.cpu_count() or 1


def check_threads(threads: int | None) -> int:
    """So many threads, or as many as there are processors.

    >>> check_threads(0)
    Traceback (most recent call last):
    headwise.errors.SpecError: threads=0 are not between 1 and ...; leave it out to use all
    """
    most = num_processors()
    if threads is not None and not 1 <= threads <= most:
        raise SpecError(f"threads={threads} are not between 1 and the {most} processors; leave it out to use all")
    return threads or most


@contextmanager
def use_threads(count: int) -> Iterator[None]:
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
