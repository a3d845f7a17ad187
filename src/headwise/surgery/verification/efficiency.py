"""Cost of a model before and after a change: parameters, FLOPs and cache from its spec; speed
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ... import costs
from ...attention.masking.sequence_info import SequenceInfo
from ...costs.cost_report import Workload, cost
from ...costs.counted_model import CountedModel
from ...costs.workload import image_tokens, max_lengths
from ...kernels.compilation import compile_when_called
from ...kernels.devices import dtype_name, synchronize
from ...models import Transformer
from ...models.generation import eval_mode, max_positions as known
from ...models.model_spec import ModelSpec
from ...models.transformer import ModelCache
from ...observe.inspect.attention_sites import find_attention
from ...observe.inspect.model_inputs import get_device, get_max_length, is_encoder_decoder
from ...util.errors import SpecError
from .model_comparison import (
    JsonRecord,
    is_language_model,
    parameter_dtype,
    random_ids,
    random_input,
)

LogFunction = Callable[[str], object]
COUNTED_LENGTH = 512  # default number of tokens for FLOPs and cache
COUNTED_BYTES = 4  # bytes per number in cost estimates; replaced by the element size of the model


class CostPair(NamedTuple):
    """One cost of both models."""

    computed = ("ratio",)
    name: str
    unit: str
    before: int
    after: int

    @property
    def ratio(self) -> float | None:
        """After divided by before; None if before is 0."""
        return self.after / self.before if self.before else None


class AttentionSize(NamedTuple):
    """Size of one attention: output heads, key-value heads, parameters, cached
    numbers per token (None: unknown).
    """

    heads: int = 0
    kv: int = 0
    parameters: int = 0
    remembered: int | None = 0


class SizeChange(NamedTuple):
    """Size of one attention in both models."""

    site: str
    before: AttentionSize
    after: AttentionSize


@dataclass(frozen=True)
class CostComparison(JsonRecord):
    """Costs of both models for one sequence of `length` tokens, and the sizes of every attention
    that changed.
    """

    length: int
    source_length: int | None
    dtype: str
    costs: tuple[CostPair, ...]
    sites: tuple[SizeChange, ...]
    notes: tuple[str, ...] = ()

    def get_cost(self, name: str) -> CostPair:
        """Return the cost of this name."""
        return next(pair for pair in self.costs if pair.name == name)

    @property
    def uncut_cache_notes(self) -> list[str]:
        """Notes on attentions that lost query heads but no key-value heads, one per group of equal
        ones.
        """
        sites_by_note: dict[str, list[str]] = {}
        for site, before, after in self.sites:
            is_uncut = before.remembered == after.remembered != 0
            is_uncut &= before.remembered is not None or before.kv == after.kv
            if after.heads < before.heads and is_uncut:
                removed = f"{before.heads - after.heads} of {before.heads} heads removed"
                note = f"{removed}, but all {before.kv} key-value heads are still in use"
                sites_by_note.setdefault(note, []).append(site)
        notes = list[str]()
        for note, sites in sites_by_note.items():
            others = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
            notes.append(f"{sites[0]}{others}: {note}")
        return notes


def compare_cost(before: nn.Module, after: nn.Module, length: int | None = None) -> CostComparison:
    """Compare the costs of both models for a sequence of `length` tokens, and a source of as many.

    Models of transformers are counted by their modules; costs that cannot be counted are left out,
    with a note.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... )
    >>> costs = compare_cost(net, net)
    >>> costs.length, costs.get_cost("cache per token").before, costs.get_cost("parameters").ratio
    (512, 64, 1.0)
    """
    nets = {"before": before, "after": after}
    described = {name: _describe_cost(net) for name, net in nets.items()}
    workload = default_workload(before, length)
    estimates = cost(described, workload)
    old = estimates["before"]
    new = estimates["after"]
    sizes = {site: [size, AttentionSize()] for site, size in _list_sizes(before)}
    for site, size in _list_sizes(after):
        sizes[site][1] = size
    counts = list[int]()
    for name, net in nets.items():
        counts.append(sum(p.numel() for p in net.parameters()))
        counted = estimates[name].parameters.total
        if isinstance(net, Transformer) and counts[-1] != counted:
            raise ValueError(
                f"the model {name} has {counts[-1]:,} parameters but its spec counts {counted:,}. "
                "Rebuild it from its spec"
            )
    widths = [parameter_dtype(net).itemsize for net in nets.values()]

    def bytes_pair(name: str, before: int, after: int) -> CostPair:
        return CostPair(name, "bytes", before * widths[0], after * widths[1])

    pairs = [CostPair("parameters", "", *counts), bytes_pair("weights", *counts)]
    name = "forward" if old.decode_flops is None else "prefill"
    if old.prefill_flops.total and new.prefill_flops.total:
        pairs.append(CostPair(name, "FLOPs", old.prefill_flops.total, new.prefill_flops.total))
    if old.decode_flops is not None:
        after_decode = 0 if new.decode_flops is None else new.decode_flops.total
        pairs.append(CostPair("decode step", "FLOPs", old.decode_flops.total, after_decode))
        caches = {
            "cache per token": "cache_bytes_per_token",
            "cache per source token": "source_cache_bytes_per_token",
            "cache total": "cache_bytes",
        }
        for name, field in caches.items():
            numbers = [(getattr(one, field) or 0) // COUNTED_BYTES for one in (old, new)]
            pairs += [bytes_pair(name, *numbers)] if any(numbers) else []
    changes = [SizeChange(site, *pair) for site, pair in sizes.items()]
    notes = list[str]()
    for one in described.values():
        notes += one.notes if isinstance(one, CountedModel) else ()
    return CostComparison(
        length=old.full_call.tokens,
        source_length=workload.source if is_encoder_decoder(before) else None,
        dtype=dtype_name(parameter_dtype(before)),
        costs=tuple(pairs),
        sites=tuple(change for change in changes if change.before != change.after),
        notes=tuple(dict.fromkeys(notes)),
    )


def _describe_cost(net: nn.Module) -> ModelSpec | CountedModel:
    """Return what the cost of a model is estimated from: its spec, or counts of its modules."""
    if isinstance(net, Transformer):
        return net.spec
    from ...hub.module_counting import count_module  # imports transformers

    return count_module(net)


def _list_sizes(net: nn.Module) -> Iterator[tuple[str, AttentionSize]]:
    """Yield the name and the size of every attention."""
    if isinstance(net, Transformer):
        for site, spec in net.spec.attention_specs():
            size = costs.count_parameters(spec), costs.cached_numbers_per_token(spec)
            yield site, AttentionSize(len(spec.score_head_of_output), spec.heads.kv, *size)
        return
    for one in find_attention(net):
        count = sum(parameter.numel() for parameter in one.module.parameters())
        yield one.site.name, AttentionSize(one.site.heads, one.site.kv, count, None)


def default_workload(net: nn.Module, length: int | None) -> Workload:
    """Return the workload of one sequence: the given length, or a default within the model's
    maximum.
    """
    limits = max_lengths(net.spec) if isinstance(net, Transformer) else None
    own = get_max_length(net) if limits is None else limits.own
    context = length or min(COUNTED_LENGTH, own or COUNTED_LENGTH)
    source = min(context, (limits.source if limits else None) or context)
    return Workload(context=context, dtype="fp32", source=source)


# --- Timed phases ---------------------------------------------------------------------------------

ATTENTION_PHASE = "attention"  # attention layers alone
TIMED_LENGTH = 256  # default number of prompt tokens


@dataclass(frozen=True)
class TimingOptions:
    """Batch size, prompt length, decode steps, and the time limit in seconds for all rounds
    together.

    The default length is 256, or the maximum of the model if that is less.
    """

    batch: int = 1
    length: int | None = None
    steps: int = 16
    seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("batch", "length", "steps"):
            value = getattr(self, name)
            if not (name == "length" and value is None) and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be > 0, got {self.seconds!r}")


class TimedPhase(NamedTuple):
    """A timed phase: `prepare(model)` returns the call to time, which processes `count` units."""

    name: str
    unit: str
    count: int
    prepare: Callable[[Any], Callable[[], object]]


def fit_lengths(net: nn.Module, timing: TimingOptions) -> tuple[int, int]:
    """Return prompt length and decode steps that fit into the positions of a model.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     )
    ... )
    >>> fit_lengths(net, TimingOptions())
    (256, 16)
    >>> fit_lengths(net, TimingOptions(length=2000))
    Traceback (most recent call last):
    ValueError: 2000 prompt tokens and 16 decode steps exceed the 1024 positions of gpt2; give
    length=1008
    """
    if not isinstance(net, Transformer):
        return timing.length or min(TIMED_LENGTH, get_max_length(net) or TIMED_LENGTH), 0
    spec = net.spec
    limits = max_lengths(net.spec)
    if spec.kind == "vision":
        return image_tokens(spec)[-1] or 1, timing.steps
    has_source = len(spec.stacks) > 1
    if has_source:
        steps = min(timing.steps, limits.own or timing.steps)
    else:
        steps = min(timing.steps, (limits.own or 2 * timing.steps) // 2 or 1)
    max_length = (
        limits.source
        if has_source
        else limits.own and limits.own - (0 if spec.kind == "encoder" else steps)
    )
    length = timing.length or min(TIMED_LENGTH, max_length or TIMED_LENGTH)
    if max_length and length > max_length:
        positions = max_length + (0 if has_source else steps)
        fact = f"{length} prompt tokens and {steps} decode steps exceed the {positions} positions"
        raise ValueError(f"{fact} of {spec.name}; give length={max_length}")
    return length, steps


def list_module_phases(
    model: nn.Module, timing: TimingOptions, length: int, notes: list[str]
) -> Iterator[TimedPhase]:
    """Yield the forward pass of a language model of transformers on random ids."""
    if not is_language_model(model):
        notes.append("speed is not measured: the model reads more than token ids")
        return
    inputs = random_ids(model, timing.batch, length)
    count = timing.batch * length
    notes.append("decoding is not timed: only models that headwise loads as its own are")
    yield TimedPhase("forward", "tokens/s", count, lambda one: partial(one, **inputs))


def list_phases(
    net: Transformer, inputs: Tensor, timing: TimingOptions, length: int, notes: list[str]
) -> Iterator[TimedPhase]:
    """Yield the phases of this kind of model; phases that cannot be timed are added to `notes`."""
    kind = net.spec.kind
    batch = timing.batch
    unit, count = ("images/s", batch) if kind == "vision" else ("tokens/s", batch * length)
    if any(net.spec.attention_specs()):

        def run_attentions(model: Transformer) -> Callable[[], object]:
            calls = _list_attention_calls(model, batch, length)
            return lambda: [run() for run in calls]

        yield TimedPhase(ATTENTION_PHASE, unit, count, run_attentions)
    if kind in ("vision", "encoder"):
        yield TimedPhase("forward", unit, count, lambda model: partial(model, inputs))
        return
    if kind == "encoder-decoder":
        yield TimedPhase("encode", unit, count, lambda model: partial(model.encode, inputs))
    else:
        run_prompt = partial(partial, _prefill, inputs=inputs, capacity=length)
        yield TimedPhase("prefill", unit, count, run_prompt)
        if next(iter(cost(net.spec, default_workload(net, None)))).decode_flops is None:
            notes.append(
                f"decoding is not timed: {net.spec.name} attends to later tokens and cannot "
                "decode token by token"
            )
            return
    decode = partial(_prepare_decode, inputs, timing.steps)
    yield TimedPhase("decode", unit, batch * timing.steps, decode)


def _list_attention_calls(net: Transformer, batch: int, length: int) -> list[Callable[[], object]]:
    """Return a call of each attention layer of a model on random inputs."""
    weight = next(net.parameters())
    generator = torch.Generator().manual_seed(0)
    source: Tensor | None = None
    calls = list[Callable[[], object]]()
    for spec, stack in zip(net.spec.stacks, net.stacks.values(), strict=True):
        count = min(length, known(spec) or length)
        inputs = torch.randn((batch, count, spec.model), generator=generator).to(weight)
        source = inputs if source is None else source
        for layer in stack.blocks:
            for role, attention in layer.attentions.items():
                cross_input = source if role == "cross" else None
                calls.append(partial(attention, inputs, source=cross_input))
    return calls


def _prefill(net: Transformer, inputs: Tensor, capacity: int) -> tuple[Tensor, ModelCache | None]:
    """Run a prompt; return the logits of its last token and the cache."""
    cache = _make_cache(net, len(inputs), capacity)
    return net.apply_head(net.hidden(inputs, cache=cache)[:, -1:]), cache


def _prepare_decode(inputs: Tensor, steps: int, net: Transformer) -> Callable[[], object]:
    """Prepare decode steps after a prompt, or after a source that is encoded.

    All steps take one token id, because its value does not affect the time.
    """
    if len(net.spec.stacks) > 1:
        past = 0
        memory = net.encode(inputs)
        token = torch.zeros(len(inputs), 1, dtype=torch.int64, device=inputs.device)
        cache = _make_cache(net, len(inputs), steps)
    else:
        past = inputs.shape[1]
        memory = None
        token = inputs[:, :1]
        _, cache = _prefill(net, inputs, past + steps)

    def decode() -> Tensor:
        logits = token
        for position in range(past, past + steps):
            sequence = None
            if cache is None:
                sequence = SequenceInfo.contiguous(position, 1, token.device)
            hidden = net.hidden(token, sequence=sequence, source=memory, cache=cache)
            logits = net.apply_head(hidden)
        return logits

    return decode


def _make_cache(net: Transformer, batch: int, capacity: int) -> ModelCache | None:
    """Return an empty cache; None if no attention with a cache is left."""
    try:
        return net.cache(batch=batch, capacity=capacity)
    except SpecError:
        return None


# --- Speed of two models, measured alternately ----------------------------------------------------

MIN_ROUNDS = 5
MAX_ROUNDS = 31  # rounds; each runs both models once
MAX_SPREAD = 0.2  # relative spread above which there is no verdict


@dataclass(frozen=True)
class PhaseSpeed:
    """Speed of one phase of both models.

    `before` and `after` are units per second, medians over rounds. `speedup` is its median per
    round, `low` and `high` its quartiles. `spread` is the interquartile range of the times over
    their median, the larger of both models.
    """

    computed: ClassVar = ("verdict",)
    phase: str
    unit: str
    before: float
    after: float
    speedup: float
    low: float
    high: float
    spread: float
    rounds: int

    @property
    def verdict(self) -> str:
        """One of "faster", "slower", "as fast" (the quartiles enclose 1), or why there is no
        verdict.
        """
        if self.rounds < MIN_ROUNDS:
            return f"too few rounds: {self.rounds} in the time limit, {MIN_ROUNDS} needed"
        if self.spread > MAX_SPREAD:
            return f"no verdict: spread {self.spread:.0%} of rounds exceeds {MAX_SPREAD:.0%}"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "as fast"

    @property
    def has_verdict(self) -> bool:
        """True if the rounds are many and similar enough for the speedup to mean something."""
        return self.rounds >= MIN_ROUNDS and self.spread <= MAX_SPREAD


@dataclass(frozen=True)
class SpeedComparison(JsonRecord):
    """Speed of every phase, with the workload and the machine."""

    phases: tuple[PhaseSpeed, ...]
    batch: int
    length: int
    steps: int
    machine: str
    notes: tuple[str, ...] = ()


def compare_speed(
    before: nn.Module,
    after: nn.Module,
    timing: TimingOptions,
    log: LogFunction = lambda _: None,
) -> SpeedComparison:
    """Time both models alternately in this process, after one warm-up run of each.

    Phases are the attention layers alone, then the whole model: prefill and decode of a decoder,
    encode and decode of an encoder-decoder, or the forward pass of an encoder or vision model. Of a
    transformers model, the forward pass alone.
    """
    length, steps = fit_lengths(before, timing)
    notes = list[str]()
    if isinstance(before, Transformer):
        timing = replace(timing, steps=steps)
        like = next(before.parameters())
        inputs = random_input(before.spec.stacks[0], like, timing.batch, length)
        phases = list(list_phases(before, inputs, timing, length, notes))
    else:
        phases = list(list_module_phases(before, timing, length, notes))
    if isinstance(after, Transformer) and not any(after.spec.attention_specs()):
        phases = [phase for phase in phases if phase.name != ATTENTION_PHASE]
        notes.append("the model after has no attention layer left, so attention alone is not timed")
    seconds_per_phase = timing.seconds / max(1, len(phases))
    speeds: list[PhaseSpeed] = []
    with eval_mode(before), eval_mode(after), torch.inference_mode():
        for number, phase in enumerate(phases, 1):
            log(f"measuring speed: {phase.name}, {number} of {len(phases)}")
            speeds.append(_measure_phase(phase, (before, after), seconds_per_phase))
    threads = torch.get_num_threads()
    device = next(before.parameters()).device
    machine = (
        f"{device.type}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    )
    return SpeedComparison(tuple(speeds), timing.batch, length, steps, machine, tuple(notes))


@compile_when_called()
def _measure_phase(
    phase: TimedPhase, nets: tuple[nn.Module, nn.Module], seconds: float
) -> PhaseSpeed:
    """Run warm-up and rounds of both models, in alternating order."""
    for net in nets:
        _time_run(phase, net)
    deadline = time.perf_counter() + seconds
    rounds = list[list[float]]()
    while len(rounds) < MAX_ROUNDS and (not rounds or time.perf_counter() < deadline):
        step = 1 if len(rounds) % 2 == 0 else -1
        rounds.append([_time_run(phase, net) for net in nets[::step]][::step])
    return summarise_rounds(phase, np.array(rounds))


def _time_run(phase: TimedPhase, net: nn.Module) -> float:
    device = get_device(net)
    run = phase.prepare(net)
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def summarise_rounds(phase: TimedPhase, seconds: Any) -> PhaseSpeed:
    """Summarise the seconds of both models in every round, [rounds, 2].

    >>> summarise_rounds(
    ...     TimedPhase("forward", "tokens/s", 8, lambda net: lambda: None),
    ...     np.array([[2.0, 1.0]] * 5),
    ... ).verdict
    'faster'
    """
    median = np.median(seconds, axis=0)
    low, high = np.quantile(seconds, (0.25, 0.75), axis=0)
    spread = float(((high - low) / median).max())
    before, after = (phase.count / float(median_seconds) for median_seconds in median)
    gain, lowest, highest = np.quantile(seconds[:, 0] / seconds[:, 1], (0.5, 0.25, 0.75)).tolist()
    return PhaseSpeed(
        phase.name,
        phase.unit,
        before,
        after,
        gain,
        lowest,
        highest,
        spread,
        len(seconds),
    )
