"""Serving a model on several devices: memory, time and communication with tensor, pipeline and
expert parallelism.

`ParallelPlan` divides devices and refuses impossible divisions; `stage_shares` gives what one
device of each pipeline stage holds; `ParallelCost` sums memory, a decode step, a prompt and the
bytes that devices exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import SpecError, pluralise
from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    OutputHeadSpec,
    StackSpec,
)
from ..spec.attention_spec import AttentionSpec
from ..translation.terminal_text import pad, pad_left, wrap
from .cost_report import format_seconds
from .flops import CostTerm
from .kv_cache_memory import RequestBatch, list_cache_terms
from .roofline import (
    DEFAULT_FORMATS,
    Device,
    NumberFormats,
    RooflineOperation,
    dtype_bytes,
    format_gigabytes,
)
from .serving_cost import RequestChunk, ServingCost
from .weight_storage import (
    DTYPE_BYTES,
    group_stored_alike,
    is_routed,
    list_feed_weights,
    select_layers_storage,
    total_weight_bytes,
)
from .workload import MAX_SIZE


@dataclass(frozen=True)
class ParallelPlan:
    """Division of `devices`: `tensor` of them divide every layer, `pipeline` groups of these divide
    the layers.

    What is left are replicas of the model, which divide the requests. `experts` devices divide the
    experts of every layer, among those of one pipeline stage and, if they are more than `tensor`,
    of several replicas.

    >>> ParallelPlan(16, tensor=4, pipeline=2).replicas
    2
    """

    devices: int
    tensor: int = 1
    pipeline: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        for name in ("devices", "tensor", "pipeline", "experts"):
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= MAX_SIZE:
                raise SpecError(f"{name} must be a whole number of at least 1, got {size!r}")
        if self.devices % (self.tensor * self.pipeline):
            possible = _join(
                size
                for size in _divisors(self.devices)
                if self.devices % (size * self.pipeline) == 0
            )
            fact = (
                f"{self.devices} devices cannot be divided into tensor={self.tensor} x "
                f"pipeline={self.pipeline}"
            )
            if not possible:
                raise SpecError(f"{fact}; use pipeline={_join(_divisors(self.devices))}")
            raise SpecError(f"{fact}; use tensor={possible} with this pipeline")
        per_stage = self.devices // self.pipeline
        if per_stage % self.experts or (self.experts % self.tensor and self.tensor % self.experts):
            possible = [
                n for n in _divisors(per_stage) if not n % self.tensor or not self.tensor % n
            ]
            fact = (
                f"experts={self.experts} does not divide {per_stage} devices per stage with "
                f"tensor={self.tensor}"
            )
            raise SpecError(f"{fact}; use experts={_join(possible)}")

    @property
    def replicas(self) -> int:
        """Number of copies of the model, each with its own requests."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def replicas_sharing_experts(self) -> int:
        """Number of replicas whose tokens meet in one group of experts."""
        return max(1, self.experts // self.tensor)

    @property
    def parts_of_expert(self) -> int:
        """Number of devices that divide each single expert."""
        return max(1, self.tensor // self.experts)

    def check_model(self, model: ModelSpec) -> None:
        """Raise an error, with the possible values, if the model cannot be divided like this."""
        if len(model.stacks) != 1 or model.kind != "decoder":
            raise SpecError(
                f"{model.name} is of kind {model.kind}; only decoders can be divided among devices"
            )
        layers = model.stacks[0].layers
        if self.pipeline > len(layers):
            fact = f"pipeline={self.pipeline} is more than the {len(layers)} layers of {model.name}"
            raise SpecError(f"{fact}; use at most {len(layers)}")
        if model.stacks[0].weights_of == "first" and self.pipeline > 1:
            raise SpecError(f"the layers of {model.name} share one set of weights; use pipeline=1")
        if any(not _can_divide(block, self.tensor) for block in dict.fromkeys(layers)):
            sizes = sorted(
                {spec.heads.q for block in layers for spec in block.attention_specs.values()}
            )
            possible = [
                n
                for n in range(1, max(sizes, default=1) + 1)
                if all(_can_divide(b, n) for b in dict.fromkeys(layers))
            ]
            heads = _join(sizes)
            fact = (
                f"tensor={self.tensor} does not divide the heads ({heads}) and feed-forwards "
                f"of {model.name}"
            )
            raise SpecError(f"{fact}; use tensor={_join(possible)}")
        counts = {block.feed.count for block in layers if isinstance(block.feed, ExpertsSpec)}
        if self.experts > 1 and not counts:
            fact = f"experts={self.experts} divides a mixture of experts, and {model.name} has none"
            raise SpecError(f"{fact}; use experts=1")
        if any(count % self.experts for count in counts):
            common = math.gcd(*counts)
            possible = _join(n for n in _divisors(self.devices // self.pipeline) if not common % n)
            fact = (
                f"experts={self.experts} does not divide the {_join(sorted(counts))} experts "
                f"of {model.name}"
            )
            raise SpecError(f"{fact}; use experts={possible}")


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _join(values: Iterable[int]) -> str:
    *most, last = [str(value) for value in values] or [""]
    return f"{', '.join(most)} or {last}" if most else last


def _can_divide(block: BlockSpec, tensor: int) -> bool:
    feeds = (
        [block.feed.each, block.feed.shared]
        if isinstance(block.feed, ExpertsSpec)
        else [block.feed]
    )
    try:
        divided = [divide_attention(spec, tensor) for spec in block.attention_specs.values()]
    except SpecError:
        return False
    return len(divided) > 0 and all(feed is None or feed.hidden % tensor == 0 for feed in feeds)


def divide_attention(spec: AttentionSpec, tensor: int) -> AttentionSpec:
    """Return the share of one of `tensor` devices: its query heads, and the key-value heads that
    they read.

    More devices than key-value heads each hold a copy of one of them.

    >>> import headwise as hw
    >>> share = divide_attention(hw.design(preset="gqa", model=4096, heads=32, kv=8), 16)
    >>> share.heads.q, share.heads.kv
    (2, 1)
    """
    if tensor == 1:
        return spec
    q, kv, outs = spec.heads.q, spec.heads.kv, len(spec.score_head_of_output)
    if q % tensor or (kv % tensor and tensor % kv):
        raise SpecError(f"{q} query heads on {kv} key-value heads cannot be divided by {tensor}")
    if any(len(spec.required_score_heads(out)) * outs > q for out in range(outs)):
        raise SpecError("heads that are mixed cannot be divided among devices; use tensor=1")
    return spec.with_heads(q=q // tensor, kv=max(1, kv // tensor))


# --- What one device of a stage holds -------------------------------------------------------------


class ExpertLayers(NamedTuple):
    """Equal expert layers of a stage: the experts, the share of one expert on a device, and the
    number of layers.

    `num_norm_weights` are weights of norms that a layer has for its experts alone.
    """

    experts: ExpertsSpec
    each: FeedForwardSpec
    place: str
    num_layers: int
    num_norm_weights: int


@dataclass(frozen=True)
class StageShare:
    """The share of one device of a pipeline stage: a model without routed experts, and layers of
    these.
    """

    model: ModelSpec
    expert_layers: tuple[ExpertLayers, ...]
    num_layers: int
    num_reductions: int  # of hidden states, which every device of a tensor group has a summand of


def stage_shares(model: ModelSpec, plan: ParallelPlan) -> list[StageShare]:
    """Return the share of one device of each stage; stages differ by at most one layer."""
    plan.check_model(model)
    stack = model.stacks[0]
    layers, start = stack.layers, 0
    shares: list[StageShare] = []
    for stage in range(plan.pipeline):
        stop = start + (len(layers) + plan.pipeline - 1 - stage) // plan.pipeline
        is_first, is_last = stage == 0, stage == plan.pipeline - 1
        blocks = [_divide_block(block, plan.tensor) for block in layers[start:stop]]
        embedding = (
            _divide_embedding(stack.embedding, plan.tensor)
            if is_first and stack.embedding
            else None
        )
        norm = stack.norm if is_last else None
        options = {"embedding": embedding, "norm": norm, "weights_of": stack.weights_of}
        share = StackSpec.from_blocks(stack.name, stack.model, blocks, **options)
        heads = tuple(_divide_head(head, plan) for head in model.heads) if is_last else ()
        stored = select_layers_storage(model.quantization, stack.name, range(start, stop))
        feeds = [
            (n, block.feed)
            for n, block in enumerate(layers[start:stop])
            if isinstance(block.feed, ExpertsSpec)
        ]
        experts = tuple(
            ExpertLayers(
                feed,
                replace(feed.each, hidden=feed.each.hidden // plan.parts_of_expert),
                f"{stack.name}.{first}.feed",
                times,
                _num_norm_weights(layers[start + first], stack.model)
                - _num_norm_weights(blocks[first], stack.model),
            )
            for first, feed, times in group_stored_alike(share, feeds, stored)
        )
        local = ModelSpec(model.name, model.kind, (share,), heads, quantization=stored)
        reductions = sum(map(_num_reductions, layers[start:stop])) + (1 if embedding else 0)
        shares.append(StageShare(local, experts, stop - start, reductions))
        start = stop
    return shares


def _num_norm_weights(block: BlockSpec, width: int) -> int:
    return sum(weight.numel for weight in block.norm.weights(width)) * len(block.norm_names)


def _num_reductions(block: BlockSpec) -> int:
    """Sums of hidden states over a tensor group: one after each sublayer, or one after parallel
    sublayers.
    """
    return min(len(block.sublayer_names), 1 if block.placement in ("parallel", "abreast") else 2)


def _divide_block(block: BlockSpec, tensor: int) -> BlockSpec:
    attention, feed = block.attention, block.feed
    if isinstance(attention, ApproximateAttention):
        attention = replace(attention, like=divide_attention(attention.like, tensor))
    elif attention is not None:
        attention = divide_attention(attention, tensor)
    dense = feed.shared if isinstance(feed, ExpertsSpec) else feed
    dense = replace(dense, hidden=dense.hidden // tensor) if dense is not None else None
    return replace(block, attention=attention, feed=dense)


def _divide_embedding(embedding: EmbeddingSpec, tensor: int) -> EmbeddingSpec:
    return replace(embedding, tokens=-(-embedding.tokens // tensor), table="")


def _divide_head(head: OutputHeadSpec, plan: ParallelPlan) -> OutputHeadSpec:
    """Return the share of a head; the last of several stages has its own copy of a tied table."""
    return replace(
        head,
        outputs=-(-head.outputs // plan.tensor),
        table=head.table if plan.pipeline == 1 else "",
    )


# --- Memory, time and communication ---------------------------------------------------------------


class Communication(NamedTuple):
    """Bytes that one device sends in a step, by kind of exchange, and how they were computed."""

    name: str
    formula: str
    sent: int


@dataclass(frozen=True)
class StepCost:
    """A step on all stages: operations of one device of each stage, and what a device of each stage
    sends.
    """

    operations: tuple[tuple[RooflineOperation, ...], ...]
    communication: tuple[tuple[Communication, ...], ...]
    link_bandwidth: float

    @property
    def compute_seconds(self) -> tuple[float, ...]:
        """Lower bound of the time of each stage without communication."""
        return tuple(sum(operation.seconds for operation in stage) for stage in self.operations)

    @property
    def communication_seconds(self) -> tuple[float, ...]:
        """Lower bound of the communication of each stage; infinite without a
        link between devices.
        """
        return tuple(
            (sent / self.link_bandwidth if self.link_bandwidth else math.inf)
            if (sent := _total_sent(stage))
            else 0.0
            for stage in self.communication
        )

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """Lower bound of the time of each stage: each operation waits for what it receives."""
        return tuple(
            a + b for a, b in zip(self.compute_seconds, self.communication_seconds, strict=True)
        )

    @property
    def seconds(self) -> float:
        """Lower bound of the time of the step: the stages run one after another."""
        return sum(self.stage_seconds)


def _total_sent(stage: Iterable[Communication]) -> int:
    return sum(exchange.sent for exchange in stage)


@dataclass(frozen=True)
class ParallelCost:
    """Cost of serving `requests` with a model on the devices of a plan.

    The requests have one length. They are divided among replicas, and those of a replica among as
    many micro-batches as there are stages, so that every stage has one.

    >>> from headwise.families import read_model_spec
    >>> plan, llama = ParallelPlan(8, tensor=8), read_model_spec("llama-3-8b")
    >>> cost = ParallelCost(llama, plan, Device.from_name("h200"), RequestBatch.uniform(16, 8192))
    >>> cost.cache_bytes_per_device, 16 * 8192 * 131_072 // 8
    (2147483648, 2147483648)
    """

    model: ModelSpec
    plan: ParallelPlan
    device: Device
    requests: RequestBatch
    formats: NumberFormats = DEFAULT_FORMATS

    def __post_init__(self) -> None:
        self.plan.check_model(self.model)
        if len(self.requests.counts_by_length) != 1:
            raise SpecError(
                "requests of several lengths cannot be divided among replicas; give one length"
            )

    @property
    def shares(self) -> list[StageShare]:
        """The share of one device of each stage."""
        return stage_shares(self.model, self.plan)

    @property
    def rows_per_replica(self) -> int:
        """Number of requests of the replica that has most."""
        return -(-self.requests.num_requests // self.plan.replicas)

    @property
    def rows_per_micro_batch(self) -> int:
        """Number of requests that pass through the stages together."""
        return -(-self.rows_per_replica // self.plan.pipeline)

    @property
    def weight_terms(self) -> list[CostTerm]:
        """Bytes of the weights on one device of each stage."""
        terms: list[CostTerm] = []
        for number, share in enumerate(self.shares):
            dense = total_weight_bytes(share.model, self.formats.storage(share.model))
            routed = sum(
                layers.num_layers * self._expert_layer_bytes(share, layers)
                for layers in share.expert_layers
            )
            text = f"{share.num_layers} layers: {dense:,} bytes, and {routed:,} of experts"
            terms.append(CostTerm(f"weights of stage {number}", text, dense + routed))
        return terms

    @property
    def cache_bytes_per_device(self) -> int:
        """Bytes of the KV cache on a device of the stage that has most."""
        return max(self._stage_cache_bytes(share) for share in self.shares)

    @property
    def weight_bytes_per_device(self) -> int:
        """Bytes of the weights on a device of the stage that has most."""
        return max(term.value for term in self.weight_terms)

    @property
    def memory_per_device(self) -> int:
        """Bytes of weights and cache on a device of the stage that needs most."""
        stages = zip(self.weight_terms, self.shares, strict=True)
        return max(term.value + self._stage_cache_bytes(share) for term, share in stages)

    @property
    def fits(self) -> bool:
        """Whether the devices hold weights and cache."""
        return self.memory_per_device <= self.device.memory

    @property
    def decode_step(self) -> StepCost:
        """A step that decodes one token of every request of a micro-batch, on all stages."""
        rows, length = self.rows_per_micro_batch, self.requests.counts_by_length[0][0]
        return self._step({RequestChunk(1, length - 1): rows}, rows, rows)

    def prefill_step(self, tokens: int) -> StepCost:
        """Prefill of one prompt of `tokens` tokens in every replica, on all stages."""
        return self._step({RequestChunk(tokens): 1}, tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Upper bound of the tokens that all devices decode, if every stage has a micro-batch at
        all times.
        """
        return self.plan.replicas * self.rows_per_micro_batch / max(self.decode_step.stage_seconds)

    def _stage_cache_bytes(self, share: StageShare) -> int:
        length, prefix = self.requests.counts_by_length[0][0], self.requests.shared_prefix
        requests = RequestBatch.uniform(self.rows_per_replica, length, prefix)
        serving = ServingCost(share.model, self.device, self.formats)
        return sum(
            term.value
            for term in list_cache_terms(
                serving.attentions, requests, serving.allocator, self.formats
            )
        )

    def _expert_layer_bytes(self, share: StageShare, layers: ExpertLayers) -> int:
        """Bytes of the router, and of the experts of a device, in one layer."""
        local = replace(layers.experts, each=layers.each, shared=None)
        weights = list_feed_weights(local, share.model.stacks[0].model, layers.place)
        storage = self.formats.storage(share.model)
        routed = storage.total_bytes(weight for weight in weights if is_routed(weight))
        dense = storage.total_bytes(weight for weight in weights if not is_routed(weight))
        return (
            dense
            + layers.num_norm_weights * DTYPE_BYTES[storage.dtype]
            + routed // self.plan.experts
        )

    def _step(self, chunks: dict[RequestChunk, int], tokens: int, scored: int) -> StepCost:
        shares = self.shares
        operations: list[tuple[RooflineOperation, ...]] = []
        for share in shares:
            serving = ServingCost(share.model, self.device, self.formats)
            expert_operations = [
                self._expert_operation(share, layers, tokens) for layers in share.expert_layers
            ]
            operations.append((*serving.estimate_step(chunks).operations, *expert_operations))
        sent = tuple(
            tuple(self._exchanges(share, tokens, scored, is_last=share is shares[-1]))
            for share in shares
        )
        return StepCost(tuple(operations), sent, self.device.link_bandwidth)

    def _expert_operation(
        self, share: StageShare, layers: ExpertLayers, tokens: int
    ) -> RooflineOperation:
        """Router and routed experts of one device, for its part of the tokens of all replicas that
        share them.
        """
        plan, experts, width = self.plan, layers.experts, share.model.stacks[0].model
        local, storage = (
            replace(experts, each=layers.each, shared=None),
            self.formats.storage(share.model),
        )
        weights = list_feed_weights(local, width, layers.place)
        met = tokens * plan.replicas_sharing_experts
        routed = storage.total_bytes(weight for weight in weights if is_routed(weight))
        dense = storage.total_bytes(weight for weight in weights if not is_routed(weight))
        read = routed * experts.expected_experts(met) / experts.count / plan.experts
        elements = sum(matrix.numel for matrix in layers.each.matmul_weights(width))
        flops = 2 * (
            tokens * experts.count * width + -(-met * experts.active * elements // plan.experts)
        )
        values = tokens * (width + experts.count)
        per_choice = sum(sum(matrix.shape) for matrix in layers.each.matmul_weights(width))
        values += -(-met * experts.active * per_choice // plan.experts)
        moved = dense + round(read) + dtype_bytes(self.formats.compute) * values
        dtype = storage.product_dtype(weights, self.formats.compute, self.device)
        times = layers.num_layers
        seconds = self.device.min_seconds(flops, moved, dtype)
        bound = self.device.limiting_resource(flops, moved, dtype)
        return RooflineOperation(
            f"{times:,} x experts", times * flops, times * moved, times * seconds, bound
        )

    def _exchanges(
        self, share: StageShare, tokens: int, scored: int, is_last: bool
    ) -> Iterator[Communication]:
        """Yield what one device of a stage sends; collectives run in rings, which send the least
        possible.
        """
        plan, width, size = (
            self.plan,
            share.model.stacks[0].model,
            dtype_bytes(self.formats.compute),
        )
        hidden, t = tokens * width * size, self.plan.tensor
        num_experts = sum(layers.num_layers for layers in share.expert_layers)
        dispatched = num_experts if plan.experts > t else 0
        if t > 1:
            reduced = share.num_reductions
            text = f"{reduced - dispatched} x 2 (t - 1) / t x {hidden:,} bytes, t = {t}"
            yield Communication(
                "all-reduce", text, 2 * (reduced - dispatched) * (t - 1) * hidden // t
            )
        if t > 1 and is_last and share.model.heads:
            logits = scored * share.model.heads[0].outputs * size
            yield Communication(
                "all-gather of logits", f"(t - 1) x {logits:,} bytes, t = {t}", (t - 1) * logits
            )
        if dispatched:
            yield from self._dispatch(share, hidden, dispatched)
        if not is_last:
            yield Communication("hidden states to the next stage", f"{hidden:,} bytes", hidden)

    def _dispatch(self, share: StageShare, hidden: int, num_layers: int) -> Iterator[Communication]:
        """Yield the exchange of tokens with experts of other devices, and of the outputs within a
        tensor group.

        A token is sent once to each device that holds one of its experts; each device of a tensor
        group sends its part.
        """
        plan, t = self.plan, self.plan.tensor
        remote = sum(
            layers.num_layers * remote_devices(layers.experts, plan.experts)
            for layers in share.expert_layers
        )
        text = (
            f"2 x {num_layers} layers x {remote / num_layers:.2f} other devices x {hidden:,} / "
            f"{t} bytes"
        )
        yield Communication("dispatch and combine of experts", text, round(2 * remote * hidden / t))
        if t > 1:
            # Summands of a shared expert are first reduced to the part of each device.
            count = sum(
                layers.num_layers * (2 if layers.experts.shared else 1)
                for layers in share.expert_layers
            )
            text = f"{count} x (t - 1) / t x {hidden:,} bytes, t = {t}"
            yield Communication(
                "reduction and all-gather of expert outputs", text, count * (t - 1) * hidden // t
            )


def remote_devices(experts: ExpertsSpec, devices: int) -> float:
    """Expected number of other devices with experts of a token, if `devices` divide the experts
    evenly.

    >>> remote_devices(
    ...     ExpertsSpec(FeedForwardSpec(3), count=4, active=1), 4
    ... )  # one device, another in 3 of 4 cases
    0.75
    """
    experts_per_device = experts.count // devices
    missed = math.comb(experts.count - experts_per_device, experts.active) / math.comb(
        experts.count, experts.active
    )
    return (devices - 1) * (1 - missed)


NOTE = (
    "Times are lower bounds: every operation waits for what it receives, collectives run in rings "
    "at the full "
    "bandwidth of the link, and latency is left out. Memory leaves out activations."
)


@dataclass(frozen=True)
class ParallelReport:
    """The cost of a model on the devices of a plan, as text and as plain values; `prompt` is in
    tokens.
    """

    name: str
    cost: ParallelCost
    prompt: int

    def __str__(self) -> str:
        return "\n".join(self._lines())

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values; without steps if the devices cannot hold the model."""
        cost, plan = self.cost, self.cost.plan
        steps = (
            {"decode": cost.decode_step, "prefill": cost.prefill_step(self.prompt)}
            if cost.fits
            else {}
        )
        return {
            "name": self.name,
            "devices": plan.devices,
            "tensor": plan.tensor,
            "pipeline": plan.pipeline,
            "experts": plan.experts,
            "replicas": plan.replicas,
            "weights_bytes_per_device": cost.weight_bytes_per_device,
            "kv_bytes_per_device": cost.cache_bytes_per_device,
            "memory_per_device": cost.memory_per_device,
            "stages": [term._asdict() for term in cost.weight_terms],
            "fits": cost.fits,
            "steps": {name: _step_data(step) for name, step in steps.items()},
            "tokens_per_second": cost.tokens_per_second if cost.fits else None,
        }

    def _lines(self) -> Iterator[str]:
        cost, plan = self.cost, self.cost.plan
        division = (
            f"tensor {plan.tensor}, pipeline {plan.pipeline}, experts {plan.experts}, "
            f"replicas {plan.replicas}"
        )
        title = f"{self.name} on {plan.devices:,} x {cost.device.description}: {division}"
        yield from wrap(title)
        rows, length = cost.requests.num_requests, cost.requests.counts_by_length[0][0]
        yield (
            f"{pluralise(rows, 'row')} of {length:,} tokens, {cost.rows_per_replica:,} in each "
            "replica"
        )
        yield ""
        yield "on one device of the largest stage"
        yield _line("weights", format_gigabytes(cost.weight_bytes_per_device))
        yield _line("KV cache", format_gigabytes(cost.cache_bytes_per_device))
        yield _line("weights and cache", format_gigabytes(cost.memory_per_device))
        yield _line("memory", format_gigabytes(int(cost.device.memory)))
        yield ""
        if not cost.fits:
            missing = format_gigabytes(cost.memory_per_device - int(cost.device.memory))
            fact = (
                f"A device lacks {missing}, so no time of a step is estimated. Divide the "
                "model among more devices."
            )
            yield from wrap(fact)
            return
        step_rows = pluralise(cost.rows_per_micro_batch, "row")
        yield from _step_lines(f"decode step of {step_rows}, all stages", cost.decode_step)
        yield _line("tokens per second, all devices", f"{cost.tokens_per_second:,.0f}")
        yield ""
        yield from _step_lines(
            f"prefill of a prompt of {self.prompt:,} tokens", cost.prefill_step(self.prompt)
        )
        yield ""
        yield from wrap(NOTE)


def _step_lines(title: str, step: StepCost) -> Iterator[str]:
    yield title
    yield _line("computing", format_seconds(sum(step.compute_seconds)))
    yield _line("communicating", format_seconds(sum(step.communication_seconds)))
    yield _line("least time", format_seconds(step.seconds))
    for number, stage in enumerate(step.communication):
        if stage:
            yield f"  a device of stage {number} sends, bytes"
        for exchange in stage:
            yield pad(f"    {exchange.name}", 46) + f"{exchange.sent:>22,}"
            yield from wrap(exchange.formula, indent=" " * 6, hanging=" " * 8)


def _step_data(step: StepCost) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "compute_seconds": list(step.compute_seconds),
        "communication_seconds": list(step.communication_seconds),
        "communication": [
            [exchange._asdict() for exchange in stage] for stage in step.communication
        ],
    }


def _line(name: str, value: str) -> str:
    return pad(f"  {name}", 46) + pad_left(value, 22)
