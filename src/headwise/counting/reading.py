"""An attention where it stands, and what its products are in one call: asked, counted by torch, and spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from ..backends import Job, choose, forms_again, linear
from ..pattern import Pattern
from ..spec import AttentionSpec
from ..terms import Work
from .bills import Product, products, reading_factors
from .symbols import Symbol

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Call(NamedTuple):
    """New tokens of each row behind `past` ones, and the tokens of the source that they read.

    way="whole": all at once, as in training; "prompt": the same, but of heads over each token only the last is asked;
    "steps": single tokens one after another, the source long remembered.
    """

    batch: int
    tokens: int
    past: int = 0
    source: int = 0
    way: str = "whole"

    @property
    def before(self) -> Call:
        """The same call, as stacks before the last one see it."""
        return self._replace(tokens=0 if self.way == "steps" else self.source, past=0)


class On(NamedTuple):
    """What a call runs on: a kind of device, and a precision."""

    device: str = "cpu"
    dtype: str = "fp32"


HERE = On()


@dataclass(frozen=True)
class Reader:
    """An attention, alone or as it stands in a model so many times.

    `role` is "attention", or "cross" where it reads the source; `early` says that it stands before the last stack.
    """

    name: str
    spec: AttentionSpec
    role: str = "attention"
    times: int = 1
    early: bool = False

    @property
    def decodes(self) -> bool:
        """Whether single tokens can be asked one after another."""
        return self.role == "cross" or self.spec.pattern.opening == 0

    def work(self, call: Call) -> Work:
        """The work of a call; of single steps, their sum."""
        batch, new, past, source, way = call.before if self.early else call
        pattern, asks = self.spec.pattern, range(past, past + new)
        if self.role == "cross" and way == "steps":
            return Work(batch, new, 0, new * source, pattern.pairs(asks, range(source)))
        if self.role == "cross":
            return Work(batch, new, source, source, pattern.pairs(asks, range(source)))
        read = _read_by_steps(pattern, past, new) if way == "steps" else past + new
        return Work(batch, new, new, read, pattern.pairs(asks, range(past + new)))

    def asked(self, call: Call) -> Iterator[Product]:
        """What is asked for: allowed pairs only, and sums over tokens where these are the same function."""
        work, job = self.work(call), self._job(call)
        pairs = Symbol.of(work.pairs, f"pairs[{self.spec.pattern.text}]" if self.name else "pairs")
        every = products(self._running(call), replace(work, pairs=pairs))
        if self.spec.folder is None or linear.refuses(job):
            yield from every
            return
        yield from (one for one in every if not one.name.startswith("core"))
        how = "a reading of the state, and each chunk of tokens among itself"
        sums = Symbol.of(_executed(linear, job, work, call), how, loose="sum")
        # A product of two things that learn is two products; shares that no token has a say in do not learn.
        yield Product("core (sums)", sums, 2 if self.spec.folder[1].features(job.core) else 1)

    def counted(self, call: Call) -> list[Product] | None:
        """What torch's counter sees of the dense backend, allowed or not; None of steps that keep only a state."""
        work = self.work(call)
        if self._job(call).stated:
            return None
        rectangle = work.keys if call.way == "steps" else work.queries * work.keys
        return list(products(self._running(call), replace(work, pairs=rectangle)))

    def spent(self, call: Call, on: On) -> int:
        """What the backend executes that the layer would choose there."""
        job = self._job(call, on)
        core = _executed(choose(_long(job, self.work(call))), job, self.work(call), call)
        return core + sum(one.flops for one in self._around(call, core))

    def spent_back(self, call: Call, on: On) -> int:
        """The same of gradients, with the scores that a backend did not keep and so forms once more."""
        job = replace(self._job(call, on), grad=True, training=True)
        work = self.work(call)
        backend = choose(_long(job, work))
        core = _executed(backend, job, work, call)
        around = sum(one.factors * one.flops for one in self._around(call, core))
        again = forms_again(backend, job, work, core)
        return around + core * reading_factors(self.spec, job.core) + again

    def weights(self, call: Call) -> int:
        """How many learned numbers are read: all, but for maps of tokens that do not come."""
        running, work = self._running(call), self.work(call)
        every = ((part, param) for _, part in running.parts() for param in part.params(running).values())
        met = ((part, one) for part, one in every if one.learned and (not one.applied or work.tokens(one.applied)))
        return sum(one.layout.numel(running.sizes_of(part)) for part, one in met)

    def _running(self, call: Call) -> AttentionSpec:
        return replace(self.spec, project=self.spec.form(call.way == "steps"))

    def _job(self, call: Call, on: On = HERE) -> Job:
        spec, one = self.spec, call.way == "steps"
        stated = one and spec.stateful and self.role == "attention"
        core = spec.core_of(spec.form(one))
        return Job(spec, core, device=on.device, dtype=DTYPES[on.dtype], one=one, stated=stated)

    def _around(self, call: Call, core: int) -> Iterable[Product]:
        """The products outside the core, where a backend forms as many pairs as its core tells of."""
        work, running = self.work(call), self._running(call)
        pair = running.core.flops(work.batch)
        formed = core // pair if pair else work.keys if call.way == "steps" else work.queries * work.keys
        every = products(running, replace(work, pairs=formed))
        return (one for one in every if not one.name.startswith("core"))


def _read_by_steps(pattern: Pattern, past: int, steps: int) -> int:
    """Tokens that single queries find remembered, all steps together: a ring holds no more than may be read."""
    first, last = pattern.memory
    kept = past + steps if last is None else min(past + steps, first + last)
    growing = max(kept - past, 0)  # steps that find one more than the step before
    return growing * past + growing * (growing + 1) // 2 + (steps - growing) * kept


def _long(job: Job, work: Work) -> Job:
    """The same, told how many keys it has: who runs it may be chosen by that."""
    return job if job.one else replace(job, keys=work.keys)


def _executed(backend: ModuleType, job: Job, work: Work, call: Call) -> int:
    """What a backend spends in the core; of one query at a time it grows evenly with the keys it finds."""
    run: Callable[[Job, Work], int] = backend.spent
    if call.way != "steps":
        return run(job, work)
    none, every = (run(job, Work(work.batch, 1, 1, keys)) for keys in (0, work.keys))
    return none * work.queries + every - none
