"""Ways to run the core. A backend is a module with `refuses`, `attend` and `spent`; nothing else chooses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from ..errors import NoBackend, nearest
from ..terms import Work
from . import banded, composed, dense, flex, grouped, halves, linear, packed, paged, ragged, routed, sdpa, tiled
from .blocks import BLOCK
from .bound import Bound
from .job import Inputs, Job
from .linear import heard
from .paged import gathered
from .sdpa import is_plain, plainly

Attend = Callable[..., Any]

# In the order of preference (see `order`): the first that does not refuse runs.
BACKENDS: dict[str, ModuleType] = {
    "paged": paged,
    "ragged": ragged,
    "routed": routed,
    "grouped": grouped,
    "banded": banded,
    "halves": halves,
    "tiled": tiled,
    "sdpa": sdpa,
    "linear": linear,
    "flex": flex,
    "composed": composed,
    "dense": dense,
}

LENGTHS = tuple(
    sorted({module.LEAST for module in (banded, linear, routed, tiled)})
)  # keys at which another is preferred


def choose(job: Job, only: str | None = None) -> ModuleType:
    """The first backend that takes the job; `only` insists on one by name, be it the fastest or not."""
    known(only)
    if only:
        job = replace(job, keys=None)
    refusals = {}
    for name in [only] if only else order(job):
        if not (reasons := _reasons(name, job)):
            return BACKENDS[name]
        refusals[name] = reasons
    said = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refusals.items())
    raise NoBackend(f"the backend asked for refuses this call: {said}" if only else f"nothing can run this: {said}")


def forms_again(backend: ModuleType, job: Job, work: Work, core: int) -> int:
    """Of so many FLOPs in the core, those that a backend spends once more backwards: on scores that it did not keep.

    Kernels that are fused keep none (2205.14135), `composed` none of a call that it cut into blocks.
    """
    if backend in (dense, linear) or (backend is composed and work.queries <= BLOCK):
        return 0
    if backend is halves and halves.keeps(work.keys):
        return 0
    scores, values = job.core.width * len(job.core.keys), job.core.vdim * len(job.core.values)
    return core * scores // (scores + values)


def known(only: str | None) -> None:
    """Refuse a name that no backend has."""
    if only is not None and only not in BACKENDS:
        raise NoBackend(f"there is no backend {only!r}; {nearest(str(only), BACKENDS)}")


def notes(name: str, job: Job) -> list[str]:
    """What a backend does with a job that it takes, beyond what it does with every one."""
    return composed.notes(job) if BACKENDS[name] is composed else []


def order(job: Job) -> list[str]:
    """The names of all backends, the preferred first."""
    return sorted(BACKENDS, key=lambda name: _late(name, job))


def reads_stored(backend: ModuleType, job: Job) -> bool:
    """Whether it reads keys and values as a cache keeps them; others are handed numbers in full."""
    return backend is paged or (backend is ragged and ragged.reads_stored(job))


def stage(keys: int) -> int:
    """The last length that a call of so many keys has, of those at which another backend is preferred."""
    return max((least for least in LENGTHS if least <= keys), default=0)


def stages(job: Job) -> list[tuple[int, str]]:
    """From how many keys on which backend runs such a job."""
    found: list[tuple[int, str]] = []
    for least in (0, *LENGTHS):
        told = replace(job, keys=least)
        name = next((name for name in order(told) if not BACKENDS[name].refuses(told)), None)
        if name is not None and (not found or found[-1][1] != name):
            found.append((least, name))
    return found


def why(job: Job) -> dict[str, list[str]]:
    """Every backend, in order of preference, with its reasons to refuse; none means it takes the job."""
    return {name: _reasons(name, job) for name in order(job)}


def _late(name: str, job: Job) -> bool:
    """Whether even dense goes before it."""
    if name == "flex":  # on the CPU it compiles for seconds and then forms every score
        return job.device == "cpu"
    return name == "halves" and not halves.leads(job)


def _reasons(name: str, job: Job) -> list[str]:
    """Each reason once: two parts of one kind say the same."""
    return list(dict.fromkeys(BACKENDS[name].refuses(job)))


__all__ = ["BACKENDS", "Attend", "Bound", "Inputs", "Job", "choose", "forms_again", "gathered", "heard"]
__all__ += ["is_plain", "notes", "packed", "plainly", "reads_stored", "stage", "stages", "why"]
