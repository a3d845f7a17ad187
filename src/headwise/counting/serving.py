"""Answering many requests at once: one step, its parts on the roofline, and how often a token comes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..blueprint import Model
from ..boxes import Memory
from ..errors import SpecError
from ..spec import AttentionSpec
from .allocators import IDEAL, Allocator, Rows
from .asking import Asked, Request, asks, begun
from .calls import LARGEST
from .devices import PLAIN, Device, Formats, bytes_of, stored
from .layers import Held, Layers, Matrices, attentions, held, matrices
from .operations import Operation

STEPS = 4096  # that one prompt may take
Told = Mapping[tuple[Layers, Request], Asked]


@dataclass(frozen=True)
class Step:
    """One pass of tokens through all layers: products with weights, and those with what is remembered."""

    weights: tuple[Operation, ...]
    cores: tuple[Operation, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All of them."""
        return (*self.weights, *self.cores)

    @property
    def seconds(self) -> float:
        """Seconds at least: one operation after the other."""
        return sum(one.seconds for one in self.operations)


@dataclass(frozen=True)
class Serving:
    """A spec in so many layers, or a model, on a device: what a step of it takes.

    >>> import headwise as hw
    >>> llama = Serving(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h200"), layers=32)
    >>> step = llama.decoding(Rows.alike(16, 8192))
    >>> [(one.name, one.bound) for one in step.operations]
    [('projections', 'memory'), ('core, decoding', 'memory')]
    >>> round(step.seconds * 1e3, 2)  # 2.68 GB of weights and 17.2 GB remembered, at 4.8 TB/s
    4.14
    """

    described: AttentionSpec | Model
    device: Device
    formats: Formats = PLAIN
    layers: int = 1
    allocator: Allocator = IDEAL
    source: int = 0  # tokens of another sequence that each request reads
    attentions: tuple[Layers, ...] = field(init=False, repr=False, compare=False)
    matrices: tuple[Matrices, ...] = field(init=False, repr=False, compare=False)
    weights: Held = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attentions", attentions(self.described, self.layers))
        object.__setattr__(self, "matrices", matrices(self.described))
        object.__setattr__(self, "weights", held(self.described, self.formats.weights, self.layers))
        if not self.source and any(each.reads == "source" for each in self.attentions):
            raise SpecError("it reads another sequence of a length that nothing says; give source, in tokens")

    @property
    def model(self) -> int:
        """The width of what runs from layer to layer."""
        described = self.described
        return described.model if isinstance(described, AttentionSpec) else described.stacks[-1].model

    def title(self, what: str, layers: Layers) -> str:
        """What it is; and of which attention, where there are several kinds."""
        told = what if layers.name == "attention" else f"{layers.name} {what}"
        patterns = {each.spec.pattern.text for each in self.attentions if each.name == layers.name}
        return f"{told}, {layers.spec.pattern.text}" if len(patterns) > 1 else told

    def step(self, requests: Mapping[Request, int], shared: int = 0) -> Step:
        """One step of so many requests of each kind: single tokens, and chunks of prompts.

        Those that get a single token begin with so many that they share, which are read once.
        """
        told = {(each, request): asks(each, request, self.formats) for each in self.attentions for request in requests}
        projections = [self._projections(each, requests, told) for each in self.attentions]
        return Step((*projections, *self._matrices(requests)), tuple(self._cores(requests, told, shared)))

    def decoding(self, rows: Rows) -> Step:
        """A step in which every row gets one token; lengths count it."""
        return self.step({Request(1, length - 1, self.source): times for length, times in rows.each}, rows.shared)

    def mixed(self, rows: Rows | None, tokens: int, past: int = 0) -> Step:
        """A step in which every row gets one token, and a prompt of another so many behind what was taken of it."""
        requests = {Request(1, length - 1, self.source): times for length, times in (rows.each if rows else ())}
        prompt = Request(tokens, past, self.source)
        return self.step(requests | {prompt: requests.get(prompt, 0) + 1}, rows.shared if rows else 0)

    def first_token(self, prompt: int, chunk: int, beside: Rows | None = None) -> float:
        """Seconds at least until a prompt's first token: chunk by chunk, others being answered beside it."""
        if chunk < 1 or prompt < 1 or -(-prompt // chunk) > STEPS:
            least = max(1, -(-prompt // STEPS))
            raise SpecError(
                f"a prompt of {prompt:,} tokens cannot be taken {chunk:,} at a time; give a chunk of {least:,} or more"
            )
        starts = range(0, prompt, chunk)
        return sum(self.mixed(beside, min(chunk, prompt - past), past).seconds for past in starts)

    def compute_bound_from(self) -> int | None:
        """Tokens in a step from which products with weights wait for compute; None when they never do."""
        request = Request(1, 0, self.source)
        told = {(each, request): asks(each, request, self.formats) for each in self.attentions}

        def waits(tokens: int) -> bool:
            requests = {request: tokens}
            every = [self._projections(each, requests, told) for each in self.attentions] + [*self._matrices(requests)]
            products = sum(one.flops for one in every) / self.device.flops[self.formats.maths]
            return products >= sum(one.moved for one in every) / self.device.bandwidth

        return first(waits)

    def core_longest_from(self, batch: int) -> int | None:
        """Tokens of context from which cores take longer than products with weights; None when they never do."""

        def dominates(context: int) -> bool:
            step = self.decoding(Rows.alike(batch, context))
            return sum(one.seconds for one in step.cores) >= sum(one.seconds for one in step.weights)

        return first(dominates)

    def _projections(self, layers: Layers, requests: Mapping[Request, int], told: Told) -> Operation:
        tokens = sum(request.tokens * n for request, n in requests.items())
        weights = sum(stored(shape, self.formats.weights) for shape in layers.shapes)
        flops = sum(told[layers, request].weights * n for request, n in requests.items())
        moved = weights + bytes_of(self.formats.maths) * tokens * 2 * layers.spec.model
        return self._operation(self.title("projections", layers), flops, moved, layers.times)

    def _matrices(self, requests: Mapping[Request, int]) -> Iterator[Operation]:
        tokens, answers = sum(request.tokens * n for request, n in requests.items()), sum(requests.values())
        for each in self.matrices:
            met = answers if each.name == "head" else tokens
            moved = each.moved(met, self.formats.weights) + bytes_of(self.formats.maths) * met * each.flowing
            yield self._operation(each.name, each.flops(met), moved, each.times)

    def _cores(self, requests: Mapping[Request, int], told: Told, shared: int) -> Iterator[Operation]:
        kinds = {
            "decoding": [request for request in requests if request.tokens == 1],
            "a prompt": [request for request in requests if request.tokens > 1],
        }
        for each in self.attentions:
            for kind, some in kinds.items():
                flops = sum(told[each, request].core * requests[request] for request in some)
                moved = sum(told[each, request].moved * requests[request] for request in some)
                if kind == "decoding":
                    moved -= self._spared(each, {request: requests[request] for request in some}, shared)
                if some:
                    name = f"{self.title('core', each)}, {kind}"
                    yield self._operation(name, flops, moved, each.times)

    def _spared(self, layers: Layers, requests: Mapping[Request, int], shared: int) -> int:
        """Bytes of a beginning that are not read again for each row: whole pages of it, where rows share pages."""
        count = self.allocator.common(Memory(0, None), shared, shared)
        each = {request: begun(layers, request, count, self.formats) for request in requests}
        return sum(each[request] * times for request, times in requests.items()) - max(each.values(), default=0)

    def _operation(self, name: str, flops: int, moved: int, times: int) -> Operation:
        maths = self.formats.maths
        seconds, bound = self.device.time(flops, moved, maths), self.device.bound(flops, moved, maths)
        many = f"{times:,} x {name}" if times > 1 and not isinstance(self.described, AttentionSpec) else name
        return Operation(many, times * flops, times * moved, times * seconds, bound)


def first(holds: Callable[[int], bool]) -> int | None:
    """The first whole number from 1 up at which something begins to hold, and holds from then on.

    >>> first(lambda n: n * n >= 50), first(lambda n: False)
    (8, None)
    """
    found = bisect_left(range(1, LARGEST + 1), True, key=holds) + 1
    return found if found <= LARGEST else None
