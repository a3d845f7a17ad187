"""Ways to run the core. A backend is a module with `refuses`, `attend` and `spent`; nothing else chooses it."""

from __future__ import annotations

from types import ModuleType

from ..errors import NoBackend, nearest
from . import dense, flex, grouped, linear, sdpa
from .bound import Bound, spread_heads
from .job import Inputs, Job

# In the order of preference: the first that does not refuse runs.
BACKENDS: dict[str, ModuleType] = {
    "grouped": grouped,
    "sdpa": sdpa,
    "linear": linear,
    "flex": flex,
    "dense": dense,
}


def choose(job: Job, only: str | None = None) -> ModuleType:
    """The first backend that takes the job; `only` insists on one by name."""
    if only is not None and only not in BACKENDS:
        raise NoBackend(f"there is no backend {only!r}; {nearest(only, BACKENDS)}")
    refusals = {}
    for name in [only] if only else BACKENDS:
        if not (reasons := BACKENDS[name].refuses(job)):
            return BACKENDS[name]
        refusals[name] = reasons
    said = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refusals.items())
    raise NoBackend(f"nothing can run this layer here: {said}")


def why(job: Job) -> dict[str, list[str]]:
    """Every backend, in order of preference, with its reasons to refuse; none means it takes the job."""
    return {name: backend.refuses(job) for name, backend in BACKENDS.items()}


__all__ = ["BACKENDS", "Bound", "Inputs", "Job", "choose", "spread_heads", "why"]
