"""What a model costs before and after: counted from its description, and checked against its tensors."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ... import costs
from ...costs.cost_report import CostEstimate, CostReport, Workload, cost
from ...costs.workload import image_tokens, max_lengths
from ...errors import SpecError
from ...generation import eval_mode, max_positions as known
from ...masking.sequence_info import SequenceInfo
from ...models import Transformer
from ...models.model_cache import EncoderOutput, ModelCache
from ...spec.attention_spec import AttentionSpec

COUNTED_LENGTH = 512  # tokens that are priced, unless said
COUNTED_BYTES = 4  # bytes of each number in a price; the model's own precision is put in their place


class CostPair(NamedTuple):
    """One number of both models."""

    name: str
    unit: str
    before: int
    after: int

    @property
    def ratio(self) -> float | None:
        """What is left of it, as a share."""
        return self.after / self.before if self.before else None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return {**self._asdict(), "ratio": self.ratio}


class AttentionSize(NamedTuple):
    """What one attention has: output heads, key-value heads, parameters, numbers remembered of a token."""

    heads: int = 0
    kv: int = 0
    parameters: int = 0
    remembered: int = 0

    @staticmethod
    def of_spec(spec: AttentionSpec | None) -> AttentionSize:
        """Of a spec; of an attention that is gone, nothing."""
        if spec is None:
            return AttentionSize()
        return AttentionSize(
            len(spec.score_head_of_output),
            spec.heads.kv,
            costs.count_parameters(spec),
            costs.cached_numbers_per_token(spec),
        )


@dataclass(frozen=True)
class CostComparison:
    """Numbers of both models under one load of so many tokens, and of every attention whose numbers changed."""

    length: int
    source_length: int | None
    dtype: str
    costs: tuple[CostPair, ...]
    sites: Mapping[str, tuple[AttentionSize, AttentionSize]]

    def get_cost(self, name: str) -> CostPair:
        """One of them."""
        return next(pair for pair in self.costs if pair.name == name)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        sites = [
            {"site": site, "before": before._asdict(), "after": after._asdict()}
            for site, (before, after) in self.sites.items()
        ]
        told = {"length": self.length, "source": self.source_length, "dtype": self.dtype}
        return told | {"numbers": [pair.data for pair in self.costs], "sites": sites}

    @property
    def summary(self) -> str:
        """What was saved, in words; nothing is said too."""
        parts = list[str]()
        for name, what in (("parameters", "parameters"), ("cache, a token", "bytes of every token that is remembered")):
            pair = next((one for one in self.costs if one.name == name), None)
            if pair is not None and pair.before:
                less = pair.before - pair.after
                parts.append(f"{less:,} of {pair.before:,} {what} ({less / pair.before:.1%})")
        return f"Saved: {' and '.join(parts)}."

    @property
    def uncut_cache_notes(self) -> list[str]:
        """Attentions that lost heads and have as many keys and values as before; those that are alike are one line."""
        found: dict[str, list[str]] = {}
        for site, (before, after) in self.sites.items():
            if after.heads < before.heads and before.remembered == after.remembered and after.remembered:
                gone = f"{before.heads - after.heads} of {before.heads} heads are gone"
                found.setdefault(f"{gone}, and all {before.kv} key-value heads are still read", []).append(site)
        return [f"{_join_sites(sites)}: {what}" for what, sites in found.items()]


def compare_cost(
    before: Transformer, after: Transformer, length: int | None = None, source_length: int | None = None
) -> CostComparison:
    """What both cost for a row of `length` tokens, and `source` of them where one is read.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0
    ... )
    >>> found = compare_cost(net, net)
    >>> found.length, found.get_cost("cache, a token").before, found.get_cost("parameters").ratio
    (512, 64, 1.0)
    """
    load = default_workload(before, length, source_length)
    prices = cost({"before": before.spec, "after": after.spec}, load)
    nets = {"before": before, "after": after}
    for name, net in nets.items():
        _check_parameter_count(name, net, prices[name])
    specs = tuple(dict(net.spec.attention_specs()) for net in nets.values())
    sites = {
        site: (AttentionSize.of_spec(specs[0].get(site)), AttentionSize.of_spec(specs[1].get(site)))
        for site in specs[0]
    }
    dtype = str(next(before.parameters()).dtype).removeprefix("torch.")
    changed = {site: pair for site, pair in sites.items() if pair[0] != pair[1]}
    reads = load.source if len(before.spec.stacks) > 1 else None
    return CostComparison(prices["before"].full_call.tokens, reads, dtype, tuple(_iter_costs(nets, prices)), changed)


def _join_sites(sites: Sequence[str]) -> str:
    return sites[0] if len(sites) == 1 else f"{sites[0]} and {len(sites) - 1} more"


def default_workload(net: Transformer, length: int | None, source_length: int | None) -> Workload:
    """A row as long as is asked for, or as the model takes."""
    most = max_lengths(net.spec)
    own = length or min(COUNTED_LENGTH, most.own or COUNTED_LENGTH)
    read = source_length or min(own, most.source or own)
    return Workload(context=own, dtype="fp32", source=read)


def _iter_costs(nets: Mapping[str, Transformer], prices: CostReport) -> Iterator[CostPair]:
    one, other = prices["before"], prices["after"]
    each = {name: next(net.parameters()).element_size() for name, net in nets.items()}
    numels = {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()}
    yield CostPair("parameters", "", one.parameters.total, other.parameters.total)
    yield CostPair("weights", "bytes", *(numels[name] * each[name] for name in nets))
    yield CostPair(
        "forward" if one.decode_flops is None else "prefill",
        "FLOPs",
        one.prefill_flops.total,
        other.prefill_flops.total,
    )
    if one.decode_flops is None:
        return
    yield CostPair(
        "decode, a step", "FLOPs", one.decode_flops.total, 0 if other.decode_flops is None else other.decode_flops.total
    )
    for name, told in (
        ("cache, a token", _cache_per_token),
        ("cache, a token of the source", _source_cache_per_token),
        ("cache, in all", _cache_bytes),
    ):
        before, after = (told(prices[which]) // COUNTED_BYTES * each[which] for which in nets)
        if before or after:
            yield CostPair(name, "bytes", before, after)


def _cache_per_token(price: CostEstimate) -> int:
    return price.cache_bytes_per_token or 0


def _source_cache_per_token(price: CostEstimate) -> int:
    return price.source_cache_bytes_per_token or 0


def _cache_bytes(price: CostEstimate) -> int:
    return price.cache_bytes


def _check_parameter_count(name: str, net: Transformer, price: CostEstimate) -> None:
    """Refuse a description that does not count what the model holds."""
    held, counted = sum(p.numel() for p in net.parameters()), price.parameters.total
    if held != counted:
        raise ValueError(f"the model {name} holds {held:,} parameters and is described with {counted:,}; build it anew")


# --- What is timed of a model --------------------------------------------------------------------------

ATTENTION_PHASE = "attention"  # by itself
TIMED_LENGTH = 256  # tokens that are read, unless said


@dataclass(frozen=True)
class TimingOptions:
    """Rows, tokens of each that are read, and that are then said one by one; and seconds for all rounds together.

    Without a length it is 256, or as many as the model takes.
    """

    batch: int = 1
    length: int | None = None
    steps: int = 16
    seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("batch", "length", "steps"):
            told = getattr(self, name)
            if not (name == "length" and told is None) and (type(told) is not int or told < 1):
                raise ValueError(f"{name}={told!r} cannot be measured; give a whole number of at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds!r} leave no time to measure; give more than 0")


class TimedPhase(NamedTuple):
    """What is timed: so many units in every run of what `begin` gives for a model."""

    name: str
    unit: str
    count: int
    prepare: Callable[[Transformer], Callable[[], object]]


def fit_lengths(net: Transformer, timing: TimingOptions) -> tuple[int, int]:
    """How many tokens are read and said: what is asked for, as far as the model has positions for both.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}))
    >>> fit_lengths(net, TimingOptions())
    (256, 16)
    >>> fit_lengths(net, TimingOptions(length=2000))
    Traceback (most recent call last):
    ValueError: 2000 tokens read and 16 said are more than the 1024 positions of gpt2; give length=1008
    """
    described, most = net.spec, max_lengths(net.spec)
    if described.kind == "vision":
        return image_tokens(described)[-1] or 1, timing.steps
    two = len(described.stacks) > 1
    said = (
        min(timing.steps, most.own or timing.steps)
        if two
        else min(timing.steps, (most.own or 2 * timing.steps) // 2 or 1)
    )
    room = most.source if two else most.own and most.own - (0 if described.kind == "encoder" else said)
    asked = timing.length or min(TIMED_LENGTH, room or TIMED_LENGTH)
    if room and asked > room:
        fact = f"{asked} tokens read and {said} said are more than the {room + (0 if two else said)} positions"
        raise ValueError(f"{fact} of {described.name}; give length={room}")
    return asked, said


def make_timing_input(net: Transformer, batch: int, length: int) -> Tensor:
    """Something to read for the first stack: ids in turn, or noise where it reads numbers."""
    stack = net.spec.stacks[0]
    embedding, weight = stack.embedding, next(net.parameters())
    draw = torch.Generator().manual_seed(0)
    if embedding is not None and embedding.tokens:
        return torch.randint(0, embedding.tokens, (batch, length), generator=draw).to(weight.device)
    if embedding is not None and (told := embedding.patches) is not None:
        shape = (batch, told.channels, told.rows * told.high, told.columns * told.wide)
    else:
        shape = (batch, length, stack.model)
    return torch.randn(shape, generator=draw).to(weight)


def list_phases(
    net: Transformer, inputs: Tensor, how: tuple[TimingOptions, int], notes: list[str]
) -> Iterator[TimedPhase]:
    """Every phase of a kind of model; `notes` hear what cannot be timed."""
    pace, length = how
    read = pace.batch * length
    if any(net.spec.attention_specs()):
        count, unit = (pace.batch, "images/s") if net.spec.kind == "vision" else (read, "tokens/s")
        yield TimedPhase(ATTENTION_PHASE, unit, count, partial(_prepare_attentions, pace.batch, length))
    if net.spec.kind == "vision":
        yield TimedPhase("forward", "images/s", pace.batch, lambda one: partial(one, inputs))
    elif net.spec.kind == "encoder":
        yield TimedPhase("forward", "tokens/s", read, lambda one: partial(one, inputs))
    elif net.spec.kind == "encoder-decoder":
        yield TimedPhase("encode", "tokens/s", read, lambda one: partial(one.encode, inputs))
        yield TimedPhase(
            "decode", "tokens/s", pace.batch * pace.steps, partial(_prepare_source_decode, inputs, pace.steps)
        )
    else:
        yield TimedPhase("prefill", "tokens/s", read, lambda one: partial(_prefill, one, inputs, length))
        if next(iter(cost(net.spec, default_workload(net, None, None)))).decode_flops is None:
            notes.append(f"{net.spec.name} reads ahead and says nothing token by token, so no decoding is timed")
        else:
            yield TimedPhase(
                "decode", "tokens/s", pace.batch * pace.steps, partial(_prepare_decode, inputs, pace.steps)
            )


def _prepare_attentions(batch: int, length: int, net: Transformer) -> Callable[[], object]:
    """All attentions of a model, each by itself."""
    weight, draw = next(net.parameters()), torch.Generator().manual_seed(0)
    given = {
        stack.name: torch.randn(batch, min(length, known(stack) or length), stack.model, generator=draw).to(weight)
        for stack in net.spec.stacks
    }
    source, every = next(iter(given.values())), list[Callable[[], object]]()
    for name, stack in net.stacks.items():
        for layer in stack.blocks:
            for role, attention in layer.attentions.items():
                read = source if role == "cross" else None
                every.append(partial(attention, given[name], source=read))
    return lambda: [run() for run in every]


def _prefill(net: Transformer, given: Tensor, capacity: int) -> tuple[Tensor, ModelCache | None]:
    """A prompt, remembered, and what is said behind its last token."""
    cache = _make_cache(net, len(given), capacity)
    return net.read(net.hidden(given, cache=cache)[:, -1:]), cache


def _prepare_decode(given: Tensor, steps: int, net: Transformer) -> Callable[[], object]:
    length = given.shape[1]
    _, cache = _prefill(net, given, length + steps)
    return partial(_decode_steps, net, given[:, :1], cache, (steps, length, None))


def _prepare_source_decode(given: Tensor, steps: int, net: Transformer) -> Callable[[], object]:
    memory = net.encode(given)
    first = torch.zeros(len(given), 1, dtype=torch.int64, device=given.device)
    return partial(_decode_steps, net, first, _make_cache(net, len(given), steps), (steps, 0, memory))


def _decode_steps(
    net: Transformer, one: Tensor, cache: ModelCache | None, how: tuple[int, int, EncoderOutput | None]
) -> Tensor:
    """One token after the other, the same each time: what it is changes no time."""
    steps, past, memory = how
    said = one
    for step in range(steps):
        at = None if cache is not None else SequenceInfo.contiguous(past + step, 1, one.device)
        said = net.read(net.hidden(one, sequence=at, source=memory, cache=cache))
    return said


def _make_cache(net: Transformer, batch: int, capacity: int) -> ModelCache | None:
    """What it remembers; nothing where all that read their past are gone."""
    try:
        return net.cache(batch=batch, capacity=capacity)
    except SpecError:
        return None


# --- Bytes of the tensors that a call holds at once, weights aside -------------------------------------


class TensorMemoryMode(TorchDispatchMode):
    """While this lasts, storages that operations make are counted as they come and go; `most` is their largest sum.

    What an operation takes and gives back inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak_bytes = 0
        self._known: dict[int, int] = {}  # bytes of each storage; 0 of those that were there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and look at what it made."""
        self._count_storage((args, kwargs), counts=0)
        found = func(*args, **(kwargs or {}))
        self._count_storage(found, counts=1)
        return found

    def _count_storage(self, some: Any, counts: int) -> None:
        for one in tree_leaves(some):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self._known:
                storage = one.untyped_storage()
                self._known[storage._cdata] = counts * storage.nbytes()
                self.now += counts * storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.now)
                weakref.finalize(storage, self._release_storage, storage._cdata)

    def _release_storage(self, name: int) -> None:
        self.now -= self._known.pop(name)


def measure_peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the tensors of a call take at once; its result counts, what was there before does not.

    >>> import torch
    >>> measure_peak_bytes(lambda: torch.zeros(100) + torch.ones(100))
    1200
    """
    with TensorMemoryMode() as seen:
        run()
    return seen.peak_bytes


# --- How fast two models run and how much they hold, measured in turns ---------------------------------

MIN_ROUNDS, MAX_ROUNDS = 5, 31  # rounds of both models
MAX_SPREAD = 0.2  # spread beyond which nothing is concluded


@dataclass(frozen=True)
class PhaseSpeed:
    """One phase of both models: units a second, medians over rounds; `spread` is the width of the middle half of the
    rounds over their median, the larger of both; `faster` the median over rounds of what after gains on before.

    `verdict` is "faster", "slower", "as fast" where that half holds 1, or none where the spread is too large or rounds
    are too few. `held` are the most bytes that tensors take at once from the beginning of a run on: caches, but no
    weights.
    """

    phase: str
    unit: str
    before: float
    after: float
    faster: float
    low: float
    high: float
    spread: float
    rounds: int
    held: tuple[int, int]

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.rounds < MIN_ROUNDS:
            return f"none: {self.rounds} rounds in the time, {MIN_ROUNDS} are needed"
        if self.spread > MAX_SPREAD:
            return f"no verdict: rounds spread {self.spread:.0%}, more than {MAX_SPREAD:.0%}"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "as fast"

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"held": list(self.held), "verdict": self.verdict}


@dataclass(frozen=True)
class SpeedComparison:
    """Every phase, under which load, on what."""

    phases: tuple[PhaseSpeed, ...]
    batch: int
    length: int
    steps: int
    machine: str
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"batch": self.batch, "length": self.length, "steps": self.steps, "machine": self.machine}
        return told | {"phases": [one.data for one in self.phases], "notes": list(self.notes)}


def compare_speed(before: Transformer, after: Transformer, timing: TimingOptions) -> SpeedComparison:
    """Both models timed in turns in this process, after a run of each that does not count.

    Its attentions read states, one after the other. Then all of it: a decoder reads a prompt and says tokens behind it;
    one with a source encodes it and says tokens; an encoder reads; a model of images looks at them.
    """
    length, steps = fit_lengths(before, timing)
    timing = replace(timing, steps=steps)
    read, notes = make_timing_input(before, timing.batch, length), list[str]()
    every = list(list_phases(before, read, (timing, length), notes))
    if not any(after.spec.attention_specs()):
        every = [phase for phase in every if phase.name != ATTENTION_PHASE]
        notes.append("the model after has no attention left, so none is timed by itself")
    each = timing.seconds / len(every)
    with eval_mode(before), eval_mode(after), torch.inference_mode():
        found = tuple(_measure_phase(phase, (before, after), each) for phase in every)
    threads = torch.get_num_threads()
    device = next(before.parameters()).device
    machine = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    return SpeedComparison(found, timing.batch, length, steps, machine, tuple(notes))


def _measure_phase(phase: TimedPhase, nets: tuple[Transformer, Transformer], seconds: float) -> PhaseSpeed:
    """Rounds of both, the first of which does not count."""
    held = tuple(measure_peak_bytes(lambda net=net: phase.prepare(net)()) for net in nets)
    for net in nets:
        _time_run(phase, net)
    end, taken = time.perf_counter() + seconds, list[list[float]]()
    while len(taken) < MAX_ROUNDS and (not taken or time.perf_counter() < end):
        order = nets if len(taken) % 2 == 0 else nets[::-1]
        both = [_time_run(phase, net) for net in order]
        taken.append(both if order is nets else both[::-1])
    return summarise_rounds(phase, np.array(taken), (held[0], held[1]))


def _time_run(phase: TimedPhase, net: Transformer) -> float:
    run = phase.prepare(net)
    _synchronise(net)
    begun = time.perf_counter()
    run()
    _synchronise(net)
    return max(time.perf_counter() - begun, 1e-9)


def _synchronise(net: Transformer) -> None:
    if next(net.parameters()).device.type == "cuda":
        torch.cuda.synchronize()


def summarise_rounds(phase: TimedPhase, seconds: Any, peak_bytes: tuple[int, int]) -> PhaseSpeed:
    """What the seconds of both in every round, [rounds, 2], come to.

    >>> summarise_rounds(
    ...     TimedPhase("forward", "tokens/s", 8, lambda net: lambda: None), np.array([[2.0, 1.0]] * 5), (0, 0)
    ... ).verdict
    'faster'
    """
    median = np.median(seconds, axis=0)
    low, high = np.quantile(seconds, (0.25, 0.75), axis=0)
    gains = seconds[:, 0] / seconds[:, 1]
    spread = float(((high - low) / median).max())
    before, after = (phase.count / float(one) for one in median)
    least, faster, most = (float(np.quantile(gains, share)) for share in (0.25, 0.5, 0.75))
    return PhaseSpeed(phase.name, phase.unit, before, after, faster, least, most, spread, len(seconds), peak_bytes)
