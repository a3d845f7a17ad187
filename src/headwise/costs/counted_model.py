"""Models described by their modules, for architectures whose config headwise has no reader for.

`headwise.hub.module_counting` makes them from short runs of a model without weights. Sizes that
grow with the length of a call are polynomials through these runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ..attention.masking.patterns import Pattern
from ..models.model_spec import QuantizationSpec, WeightSpec
from .flops import CostBreakdown, MatrixProduct, SymbolicInt, name_size
from .roofline import (
    ExecutionFormats,
    ExecutionTarget,
    ForwardCall,
    RooflineOperation,
    cached_tokens_read,
)
from .weight_storage import WeightStorage, dtype_bytes


class Growth(NamedTuple):
    """A number that grows with the tokens T and source tokens S of a call: c + t T + tt T^2 + s S +
    ss S^2 + ts T S.

    >>> runs = {(2, 1): 11, (4, 1): 19, (6, 1): 27, (2, 2): 12, (2, 3): 13, (4, 2): 20}
    >>> growth = Growth.through(runs)  # 4 T + S + 2
    >>> growth.at(10, 5), growth.sum_over(range(3), 1)
    (47, 21)
    """

    c: Fraction = Fraction(0)
    t: Fraction = Fraction(0)
    tt: Fraction = Fraction(0)
    s: Fraction = Fraction(0)
    ss: Fraction = Fraction(0)
    ts: Fraction = Fraction(0)

    @staticmethod
    def through(values: Mapping[tuple[int, int], int]) -> Growth:
        """Return the polynomial through the values at (u, v), (2 u, v) and (3 u, v), and at (u, 2
        v), (u, 3 v) and (2 u, 2 v) if the source varies; a number that varies with neither has one.
        """
        u, v = next(iter(values))
        first = values[u, v]

        def rise(x: int, y: int) -> int:
            return values.get((x * u, y * v), values.get((x * u, v), first)) - first

        both = rise(2, 2) - rise(2, 1) - rise(1, 2)
        tt = Fraction(rise(3, 1) - 2 * rise(2, 1), 2)
        ss = Fraction(rise(1, 3) - 2 * rise(1, 2), 2)
        t = rise(2, 1) - 3 * tt - both
        s = rise(1, 2) - 3 * ss - both
        constant = Fraction(first) - t - tt - s - ss - both
        return Growth(constant, t / u, tt / u**2, s / v, ss / v**2, Fraction(both, u * v))

    def at(self, tokens: int, source: int) -> int:
        """Return the value for a number of tokens and source tokens, rounded."""
        per_token = self.t + self.tt * tokens + self.ts * source
        return round(self.c + per_token * tokens + (self.s + self.ss * source) * source)

    def sum_over(self, tokens: range, source: int) -> int:
        """Return the sum of the values over all numbers of tokens of a range, rounded."""
        first, last = tokens.start, tokens.stop - 1
        total = sum(tokens) if len(tokens) < 3 else (first + last) * len(tokens) // 2
        squares = _sum_of_squares(last) - _sum_of_squares(first - 1)
        constant = self.c + (self.s + self.ss * source) * source
        per_token = self.t + self.ts * source
        return round(constant * len(tokens) + per_token * total + self.tt * squares)


NO_GROWTH = Growth()


def _sum_of_squares(last: int) -> int:
    return last * (last + 1) * (2 * last + 1) // 6


@dataclass(frozen=True)
class CountedProducts:
    """Matrix products of a module outside attention cores, as `FlopCounterMode` counted them.

    `whole` are FLOPs of one row of a call, `step` those of a decode step after T tokens. `active`
    is the part of the weights that a token is multiplied with, less than 1 for routed experts.
    """

    name: str
    role: str
    whole: Growth
    step: Growth
    weights: tuple[WeightSpec, ...] = ()
    active: Fraction = Fraction(1)
    times: int = 1
    num_grad_factors: int = 2
    before_last_stack: bool = False

    @property
    def is_linear(self) -> bool:
        """True if the count equals two FLOPs for each active weight and token."""
        numel = sum(weight.numel for weight in self.weights if len(weight.shape) > 1)
        per_token = 2 * self.active * numel
        return bool(numel) and self.whole in (Growth(t=per_token), Growth(s=per_token))

    def _flops(self, call: ForwardCall) -> int:
        if call.mode == "steps":
            past = range(call.past, call.past + call.tokens)
            return call.batch * self.step.sum_over(past, call.source)
        is_last_only = call.mode == "prompt" and self.role == "head"
        return call.batch * self.whole.at(1 if is_last_only else call.tokens, call.source)

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """Yield the products, with a formula if they are those of linear maps."""
        text = "counted by torch"
        if self.is_linear and call.mode != "steps":
            weight = next(weight for weight in self.weights if len(weight.shape) > 1)
            text = f"2 B {'T' if self.whole.t else 'S'} {' '.join(weight.layout.axes)}"
        flops = SymbolicInt.with_formula(
            self._flops(call), text, loose="" if "2 B" in text else "c"
        )
        yield MatrixProduct("products", flops, self.num_grad_factors)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct]:
        """Return the products that `FlopCounterMode` counts, which are the required ones."""
        return list(self.required_products(call))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs executed on any target, which are the required ones."""
        return self._flops(call)

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs executed in the backward pass."""
        return self.num_grad_factors * self._flops(call)

    def operations(
        self, call: ForwardCall, formats: ExecutionFormats
    ) -> Iterator[RooflineOperation]:
        """Yield the operation, which reads its active weights, its inputs and its outputs."""
        flops = self._flops(call)
        matrices = [weight for weight in self.weights if len(weight.shape) > 1]
        numel = sum(weight.numel for weight in matrices)
        if not flops:
            return
        tokens = flops / (2 * self.active * numel) if numel else 0
        # Of experts, the expected number of different ones, if tokens choose them at random.
        read = 1 - float(1 - self.active) ** float(tokens) if self.active < 1 else 1
        moved = read * formats.storage.total_bytes(self.weights)
        widths = sum(weight.shape[-1] + weight.shape[-2] for weight in matrices)
        moved += float(tokens) * widths * dtype_bytes(formats.dtype)
        yield formats.operation(self.role, flops, round(moved), formats.product_dtype(self.weights))


@dataclass(frozen=True)
class CountedCore:
    """The attention core of a layer, or the state of a recurrent layer, and what is cached of it.

    `rows`, `queries` and `keys` are sizes of the core for one row of a call, `step_keys` the keys
    of a decode step; without `pattern`, it is unknown which pairs are allowed, and all are
    required. `kv_values` are read of each key,
    `cached` are kept of each token, of the latest `window` tokens if it is given; `state` and
    `conv` values do not grow with the tokens. `step_sizes` are `dim` and `vdim` in a decode step of
    latent attention, in which queries are compared with the latent vectors themselves.
    """

    name: str
    role: str = "attention"
    heads: int = 0
    dim: int = 0
    vdim: int = 0
    pattern: Pattern | None = None
    rows: Growth = NO_GROWTH
    queries: Growth = NO_GROWTH
    keys: Growth = NO_GROWTH
    step_keys: Growth = NO_GROWTH
    kv_values: int = 0
    cached: int = 0
    state: int = 0
    conv: int = 0
    window: int | None = None
    step_sizes: tuple[int, int] | None = None
    times: int = 1
    in_step: bool = False
    before_last_stack: bool = False

    def _sizes(self, call: ForwardCall) -> tuple[int, int, int]:
        """Return the required pairs of one row, all its pairs, and the keys that it reads."""
        if call.mode == "steps":
            if not self.in_step:
                return 0, 0, 0
            if self.role == "cross":
                keys = call.tokens * self.keys.at(1, call.source)
                return keys, keys, keys
            past = range(call.past, call.past + call.tokens)
            if self.pattern is None:
                keys = self.step_keys.sum_over(past, call.source)
                return keys, keys, keys
            keys = cached_tokens_read(self.pattern, call.past, call.tokens)
            return self.pattern.pairs(past, range(past.stop)), keys, keys
        rows, queries, keys = (
            size.at(call.tokens, call.source) for size in (self.rows, self.queries, self.keys)
        )
        pairs = queries * keys
        if self.pattern is not None and queries <= keys:
            pairs = self.pattern.pairs(range(keys - queries, keys), range(keys))
        return rows * pairs, rows * queries * keys, rows * keys

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """Yield the products of the allowed pairs."""
        pairs = self._sizes(call)[0]
        text = "pairs" if self.pattern is None else f"pairs[{self.pattern.text}]"
        return self._products(call, SymbolicInt.with_formula(pairs, text))

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct]:
        """Return the products of all pairs."""
        return list(self._products(call, self._sizes(call)[1]))

    def _products(self, call: ForwardCall, pairs: int) -> Iterator[MatrixProduct]:
        heads = SymbolicInt.with_formula(self.heads, "q")
        dim = self.dim
        vdim = self.vdim
        if call.mode == "steps" and self.step_sizes:
            dim, vdim = self.step_sizes
        for name, size, axis in (("scores", dim, "dim"), ("values", vdim, "vdim")):
            flops = 2 * SymbolicInt.with_formula(call.batch, "B") * pairs * heads
            yield MatrixProduct(f"core ({name})", flops * SymbolicInt.with_formula(size, axis))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs of all pairs, as fused attention of torch is counted."""
        return sum(product.flops for product in self.counted_products(call))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs of the backward pass, which computes the scores again."""
        scores, values = (product.flops for product in self.counted_products(call))
        return 3 * scores + 2 * values

    def operations(
        self, call: ForwardCall, formats: ExecutionFormats
    ) -> Iterator[RooflineOperation]:
        """Yield the operation, which reads keys, values and states, and writes head outputs."""
        number_bytes = dtype_bytes(formats.dtype)
        flops = sum(product.flops for product in self.required_products(call))
        queries = call.tokens
        if call.mode != "steps":
            rows, queries = (
                size.at(call.tokens, call.source) for size in (self.rows, self.queries)
            )
            queries *= rows
        numbers = self._sizes(call)[2] * self.kv_values
        numbers += queries * self.heads * (self.dim + self.vdim) * bool(flops)
        moved = number_bytes * numbers
        if call.mode == "steps":
            moved += 2 * call.tokens * self.state_bytes(number_bytes)
        if moved:
            yield formats.operation(f"{self.role} core", flops, call.batch * moved, formats.dtype)

    @property
    def num_slots(self) -> int | None:
        """Tokens that the cache keeps; None if it keeps all."""
        return self.window

    def cached_terms(self) -> list[tuple[str, int]]:
        """Return the values cached per token, and those of the state, by name."""
        return [(f"{self.name}.kv", self.cached), (f"{self.name}.state", self.state + self.conv)]

    def cached_bytes(self, tokens: int, number_bytes: int) -> int:
        """Count the bytes that the cache of one row keeps of some tokens."""
        slots = tokens if self.window is None else min(tokens, self.window)
        return slots * self.cached * number_bytes + self.state_bytes(number_bytes)

    def growing_values(self) -> int:
        """Count the values that one more token adds to the cache while no window is full."""
        return self.cached

    def state_bytes(self, number_bytes: int) -> int:
        """Bytes of the state of one row; sums over many tokens have at least 4 bytes per value."""
        return self.state * max(number_bytes, 4) + self.conv * number_bytes


CountedComponent = CountedProducts | CountedCore


@dataclass(frozen=True)
class CountedModel:
    """A model as `headwise.hub.module_counting` counted its modules.

    Without `components` the model could not be run, and only its parameters are known. `looked_up`
    are parameters of embedding tables of which a token only reads rows. `quantization` has the
    format of the weights with the role "linear".
    """

    name: str
    kind: str
    weights: tuple[tuple[WeightSpec, int], ...]
    components: tuple[CountedComponent, ...]
    notes: tuple[str, ...]
    can_decode: bool = False
    looked_up: int = 0
    quantization: QuantizationSpec | None = None

    @property
    def parameters(self) -> CostBreakdown:
        """All parameters, one term per tensor; tensors of equal layers are merged."""
        items: list[tuple[str, int, int]] = []
        for weight, times in self.weights:
            sizes = {axis: name_size(size, axis) for axis, size in weight.axis_sizes.items()}
            items.append((weight.name, weight.layout.numel(sizes), times))
        return CostBreakdown.from_repeated_items(items)

    def active_parameters(self, *, embeddings: bool = True) -> int:
        """Count the parameters that are active for one token, as for other models."""
        idle = Fraction(0)
        for one in self.components:
            if isinstance(one, CountedProducts):
                idle += one.times * (1 - one.active) * sum(w.numel for w in one.weights)
        return self.parameters.total - round(idle) - (0 if embeddings else self.looked_up)

    def weight_bytes(self, storage: WeightStorage) -> int:
        """Count the bytes of all weights."""
        return sum(times * storage.num_bytes(weight) for weight, times in self.weights)
