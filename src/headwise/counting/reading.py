"""An attention where it stands, and what its products are in one call: asked, counted by torch, and spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from ..backends import CallSignature, choose_backend, recomputed_flops, linear
from ..pattern import Pattern
from ..spec import AttentionSpec
from ..terms import CallSize
from .bills import MatrixProduct, list_products, value_grad_factors
from .symbols import SymbolicInt

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardCall(NamedTuple):
    """New tokens of each row behind `past` ones, and the tokens of the source that they read.

    way="whole": all at once, as in training; "prompt": the same, but of heads over each token only the last is asked;
    "steps": single tokens one after another, the source long remembered.
    """

    batch: int
    tokens: int
    past: int = 0
    source: int = 0
    mode: str = "whole"

    @property
    def encoder_call(self) -> ForwardCall:
        """The same call, as stacks before the last one see it."""
        return self._replace(tokens=0 if self.mode == "steps" else self.source, past=0)


class ExecutionTarget(NamedTuple):
    """What a call runs on: a kind of device, and a precision."""

    device: str = "cpu"
    dtype: str = "fp32"


CPU_FP32 = ExecutionTarget()


@dataclass(frozen=True)
class AttentionComponent:
    """An attention, alone or as it stands in a model so many times.

    `role` is "attention", or "cross" where it reads the source; `early` says that it stands before the last stack.
    """

    name: str
    spec: AttentionSpec
    role: str = "attention"
    times: int = 1
    before_last_stack: bool = False

    @property
    def can_decode(self) -> bool:
        """Whether single tokens can be asked one after another."""
        return self.role == "cross" or self.spec.pattern.tokens_before_decode == 0

    def work(self, call: ForwardCall) -> CallSize:
        """The work of a call; of single steps, their sum."""
        batch, new, past, source, way = call.encoder_call if self.before_last_stack else call
        pattern, asks = self.spec.pattern, range(past, past + new)
        if self.role == "cross" and way == "steps":
            return CallSize(batch, new, 0, new * source, pattern.pairs(asks, range(source)))
        if self.role == "cross":
            return CallSize(batch, new, source, source, pattern.pairs(asks, range(source)))
        read = _cached_tokens_read(pattern, past, new) if way == "steps" else past + new
        return CallSize(batch, new, new, read, pattern.pairs(asks, range(past + new)))

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """What is asked for: allowed pairs only, and sums over tokens where these are the same function."""
        work, job = self.work(call), self._call_signature(call)
        pairs = SymbolicInt.of(work.pairs, f"pairs[{self.spec.pattern.text}]" if self.name else "pairs")
        every = list_products(self._executed_spec(call), replace(work, pairs=pairs))
        if self.spec.recurrent_part is None or linear.unsupported_reasons(job):
            yield from every
            return
        yield from (one for one in every if not one.name.startswith("core"))
        how = "a reading of the state, and each chunk of tokens among itself"
        sums = SymbolicInt.of(_executed_core_flops(linear, job, work, call), how, loose="sum")
        # A product of two things that learn is two products; shares that no token has a say in do not learn.
        yield MatrixProduct("core (sums)", sums, 2 if self.spec.recurrent_part[1].num_state_features(job.core) else 1)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct] | None:
        """What torch's counter sees of the dense backend, allowed or not; None of steps that keep only a state."""
        work = self.work(call)
        if self._call_signature(call).has_recurrent_state:
            return None
        rectangle = work.keys if call.mode == "steps" else work.queries * work.keys
        return list(list_products(self._executed_spec(call), replace(work, pairs=rectangle)))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """What the backend executes that the layer would choose there."""
        job = self._call_signature(call, on)
        core = _executed_core_flops(choose_backend(_with_key_count(job, self.work(call))), job, self.work(call), call)
        return core + sum(one.flops for one in self._products_outside_core(call, core))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """The same of gradients, with the scores that a backend did not keep and so forms once more."""
        job = replace(self._call_signature(call, on), needs_grad=True, training=True)
        work = self.work(call)
        backend = choose_backend(_with_key_count(job, work))
        core = _executed_core_flops(backend, job, work, call)
        around = sum(one.num_grad_factors * one.flops for one in self._products_outside_core(call, core))
        again = recomputed_flops(backend, job, work, core)
        return around + core * value_grad_factors(self.spec, job.core) + again

    def num_weights_read(self, call: ForwardCall) -> int:
        """How many learned numbers are read: all, but for maps of tokens that do not come."""
        running, work = self._executed_spec(call), self.work(call)
        every = ((part, param) for _, part in running.parts() for param in part.params(running).values())
        met = ((part, one) for part, one in every if one.trainable and (not one.applied or work.tokens(one.applied)))
        return sum(one.layout.numel(running.sizes_of(part)) for part, one in met)

    def _executed_spec(self, call: ForwardCall) -> AttentionSpec:
        return replace(self.spec, project=self.spec.projection_form(call.mode == "steps"))

    def _call_signature(self, call: ForwardCall, on: ExecutionTarget = CPU_FP32) -> CallSignature:
        spec, one = self.spec, call.mode == "steps"
        stated = one and spec.is_recurrent and self.role == "attention"
        core = spec.core_of(spec.projection_form(one))
        return CallSignature(spec, core, device=on.device, dtype=TORCH_DTYPES[on.dtype], single_query=one, has_recurrent_state=stated)

    def _products_outside_core(self, call: ForwardCall, core: int) -> Iterable[MatrixProduct]:
        """The products outside the core, where a backend forms as many pairs as its core tells of."""
        work, running = self.work(call), self._executed_spec(call)
        pair = running.core.flops(work.batch)
        formed = core // pair if pair else work.keys if call.mode == "steps" else work.queries * work.keys
        every = list_products(running, replace(work, pairs=formed))
        return (one for one in every if not one.name.startswith("core"))


def _cached_tokens_read(pattern: Pattern, past: int, steps: int) -> int:
    """Tokens that single queries find remembered, all steps together: a ring holds no more than may be read."""
    first, last = pattern.retention
    kept = past + steps if last is None else min(past + steps, first + last)
    growing = max(kept - past, 0)  # steps that find one more than the step before
    return growing * past + growing * (growing + 1) // 2 + (steps - growing) * kept


def _with_key_count(job: CallSignature, work: CallSize) -> CallSignature:
    """The same, told how many keys it has: who runs it may be chosen by that."""
    return job if job.single_query else replace(job, num_keys=work.keys)


def _executed_core_flops(backend: ModuleType, job: CallSignature, work: CallSize, call: ForwardCall) -> int:
    """What a backend spends in the core; of one query at a time it grows evenly with the keys it finds."""
    run: Callable[[CallSignature, CallSize], int] = backend.executed_flops
    if call.mode != "steps":
        return run(job, work)
    none, every = (run(job, CallSize(work.batch, 1, 1, keys)) for keys in (0, work.keys))
    return none * work.queries + every - none
