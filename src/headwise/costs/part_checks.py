"""Checks that every part keeps, for a part of your own too: `hw.check_part(MyPart())`.

`check_part` runs six checks on small specs with the part and on its own examples, and returns a
report with one row per check. The cases are small layers with random weights and inputs in which no
two axes are equal: batch 3, tokens 7, source tokens 11, source width 13, model 10, heads 6, dim 4.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from .. import costs, models
from ..attention import head_axis_ops
from ..attention.attention import Attention
from ..attention.backends import BACKENDS, CallSignature, split_by_pattern, unsupported_reasons
from ..attention.cache import KVCache
from ..attention.interfaces import Modifier, Part
from ..attention.interfaces.core_types import CallSize, Probe
from ..attention.masking.patterns import Causal, Full
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.presets import design, from_json, from_toml
from ..attention.reference import reference_attention
from ..attention.spec.attention_spec import SLOTS, AttentionSpec
from ..attention.spec.serialization import to_json, to_toml
from ..models.model_spec import BlockSpec, EmbeddingSpec, ModelSpec, StackSpec
from ..report.data import Column, Table
from ..report.render import to_text
from ..util.errors import SpecError

BATCH = 3
TOKENS = 7
SOURCE = 11
WIDTH = 13
CAPACITY = 9  # slots of a cache that all tokens fit in
# Layers around a part that is checked.
SURROUNDINGS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal, 2 key-value heads": {"pattern": "causal()", "kv": 2},
    "window of 3 keys, values of width 5": {"pattern": "window(3)", "vdim": 5},
}
CROSS_ATTENTION = "cross-attention"
COMPILED_BACKENDS = ("flex",)  # compile every call, which takes minutes


def make_base_spec(**sizes: Any) -> AttentionSpec:
    """Make a small spec; sizes that are not given differ from each other."""
    options: dict[str, Any] = {"model": 10, "heads": 6, "dim": 4} | sizes
    return design(**options)


def list_cases(part: Part) -> tuple[dict[str, AttentionSpec], dict[str, str]]:
    """Specs that contain this part or are examples of its class, by name; and the reasons why
    others are impossible.
    """
    slot = _slot_of(part)
    specs: dict[str, AttentionSpec] = {}
    reasons: dict[str, str] = {}
    for name, options in SURROUNDINGS.items():
        try:
            specs[name] = make_base_spec(**options, **slot)
        except SpecError as reason:
            reasons[name] = str(reason)
    if specs:
        try:
            specs[CROSS_ATTENTION] = as_cross_attention(next(iter(specs.values())))
        except SpecError as reason:
            reasons[CROSS_ATTENTION] = str(reason)
    for n, spec in enumerate(type(part).examples(make_base_spec)):
        if not any(isinstance(one, type(part)) for _, one in spec.parts()):
            raise SpecError(
                f"example {n} of {type(part).__name__} does not contain it; yield "
                f"base(modifiers=(cls(),)), or give it to its own slot"
            )
        if spec not in specs.values():
            specs[f"example {n}"] = spec
    return specs, reasons


def _slot_of(part: Part) -> dict[str, Any]:
    """Return the argument of `design` that puts this part into a spec."""
    if isinstance(part, Modifier):
        return {"modifiers": (part,)}
    slots = [name for name, kind in SLOTS.items() if isinstance(part, kind)]
    if not slots:
        raise SpecError(
            f"{part!r} fills no slot of a spec; derive its class from one of "
            "headwise.attention.interfaces"
        )
    return {slots[0]: part}


class NotApplicableError(SpecError):
    """A check that a spec has no form for, such as decoding of a part that needs future tokens."""


def as_causal(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec in a form that can be decoded: self-attention, causal where its own pattern
    reads future tokens.
    """
    pattern = spec.pattern if spec.pattern.tokens_before_decode == 0 else Causal()
    try:
        return replace(spec, pattern=pattern, source=None)
    except SpecError as reason:
        raise NotApplicableError(str(reason)) from None


def as_cross_attention(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec as cross-attention over a source of another width."""
    return replace(spec, pattern=Full(), source=WIDTH)


def make_layer(
    spec: AttentionSpec, dtype: torch.dtype = torch.float64, backend: str | None = None
) -> Attention:
    """Make a layer with random weights, so that no parameter stays at its initial zero or one."""
    layer = Attention(spec, backend=backend).to(dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return layer


def make_inputs(
    spec: AttentionSpec, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor | None]:
    """Random input x, and a source if the spec is a cross-attention."""
    x = torch.randn(BATCH, TOKENS, spec.model, dtype=torch.float64).to(dtype)
    return x, None if spec.source is None else torch.randn(
        BATCH, SOURCE, spec.source, dtype=torch.float64
    ).to(dtype)


def sequence_infos(x: Tensor) -> dict[str, SequenceInfo]:
    """Full, right-padded, left-padded and packed batches of seven tokens."""
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 1, 1, 1, 1]])
    return {
        "whole": SequenceInfo.from_batch(x),
        "right": SequenceInfo.from_batch(x, lengths=[7, 3, 0]),
        "left": SequenceInfo.from_batch(x, lengths=[5, 7, 2], pad="left"),
        "packed": SequenceInfo.from_batch(x, segments=packed),
    }


def supporting_backends(
    spec: AttentionSpec,
    *,
    dtype: torch.dtype = torch.float64,
    single_query: bool = False,
    **more: Any,
) -> list[str]:
    """Backends that run this spec on the CPU; `more` are further fields of the `CallSignature`."""
    more = {"grad_enabled": torch.is_grad_enabled()} | more
    core = spec.core_of(spec.projection_form(single_query))
    call = CallSignature(spec, core, "cpu", dtype, single_query=single_query, **more)

    def supports(name: str) -> bool:
        return not any(unsupported_reasons(name, one) for one in split_by_pattern(call, name))

    return [name for name in BACKENDS if name not in COMPILED_BACKENDS and supports(name)]


# --- FLOPs, decoding and gradients ----------------------------------------------------------------


def _flash_flops_on_cpu(
    q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """FLOPs of flash attention on the CPU, for which FlopCounterMode has no
    entry and counts zero.
    """
    return sdpa_flop(q, k, v)


FLOP_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops_on_cpu}


def count_torch_flops(layer: Attention, x: Tensor, **call: Any) -> int:
    """FLOPs of a call as counted by torch's FlopCounterMode."""
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter, torch.no_grad():
        layer(x, **call)
    return counter.get_total_flops()


def decode_in_chunks(
    layer: Attention, x: Tensor, chunks: Iterable[int], cache: KVCache, **call: Any
) -> Tensor:
    """Run a layer on chunks of its input through a cache, and return the whole output."""
    outputs = list[Tensor]()
    start = 0
    for count in chunks:
        outputs.append(layer(x[:, start : start + count], cache=cache, **call))
        start += count
    return torch.cat(outputs, 1)


def layer_gradients(layer: Attention, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Gradients of x and every parameter under a loss that weights every output differently."""
    weight = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device)
    loss = (y * weight.view_as(y)).sum()
    named = dict(layer.named_parameters()) | {"x": x}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(named[name]) if gradient is None else gradient
        for name, gradient in zip(named, gradients, strict=True)
    }


# Errors are relative to |expected| + ERROR_OFFSET, so that values near zero are compared by their
# absolute error.
MAX_ERROR = 1e-10
ERROR_OFFSET = 0.1
MAX_FAILURES = 8  # printed for each check
COLUMNS = (
    *("check", "compares", "comparisons"),
    Column("largest error", "{:.1e}".format, align="right"),
    "result",
)


@dataclass
class CheckResult:
    """One check: the number of comparisons, the largest tensor error, and the failures, one line
    each.

    `skipped` are the specs that the check does not apply to, with the reasons.
    """

    name: str
    description: str
    comparisons: int = 0
    largest_error: float | None = None
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def compare(self, label: str, actual: Any, expected: Any) -> None:
        """Compare two tensors within rounding, or two other values exactly."""
        self.comparisons += 1
        if not isinstance(expected, Tensor):
            if actual != expected:
                self.failures.append(f"{label}: {actual}, expected {expected}")
            return
        if actual.shape != expected.shape:
            self.failures.append(
                f"{label}: shape {list(actual.shape)}, expected {list(expected.shape)}"
            )
            return
        error = measure_error(actual, expected)
        self.largest_error = error if self.largest_error is None else max(error, self.largest_error)
        if not error <= MAX_ERROR:
            self.failures.append(f"{label}: error {error:.2g}, at most {MAX_ERROR:g} is rounding")

    @property
    def outcome(self) -> str:
        """ "passed", "failed", or "does not apply" if nothing could be compared."""
        if self.failures:
            return "failed"
        return "passed" if self.comparisons else "does not apply"

    @property
    def data(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "check": self.name,
            "outcome": self.outcome,
            "comparisons": self.comparisons,
            "largest_error": self.largest_error,
            "failures": list(self.failures),
            "skipped": list(self.skipped),
        }


def measure_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest |actual - expected| / (|expected| + 0.1); infinite if one is not finite
    where the other is.

    >>> round(measure_error(torch.tensor([0.9, 2.0]), torch.tensor([0.9, 2.1])), 4)
    0.0455
    """
    if not actual.numel():
        return 0.0
    actual = actual.detach().double()
    expected = expected.detach().double()
    errors = (actual - expected).abs() / (expected.abs() + ERROR_OFFSET)
    equal = torch.where(actual == expected, torch.zeros_like(errors), errors)
    return torch.where(equal.isnan(), torch.full_like(equal, torch.inf), equal).max().item()


@dataclass(frozen=True)
class PartReport:
    """The results of all checks of a part, with the specs and backends that were used; printed as a
    table.
    """

    part: str
    specs: tuple[str, ...]
    backends: tuple[str, ...]
    impossible: tuple[str, ...]  # specs that the part cannot be used in, with the reasons
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not any(result.failures for result in self.results)

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "part": self.part,
            "passed": self.passed,
            "specs": list(self.specs),
            "backends": list(self.backends),
            "impossible": list(self.impossible),
            "results": [result.data for result in self.results],
        }

    def raise_if_failed(self) -> None:
        """Raise AssertionError with this report unless all checks passed."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        failed = sum(bool(result.failures) for result in self.results)
        count = len(self.results)
        lines = [
            f"{self.part}: {failed} of {count} checks failed"
            if failed
            else f"{self.part}: all {count} checks hold"
        ]
        rows: list[tuple[str | int | float | None, ...]] = []
        for result in self.results:
            values = (result.comparisons, result.largest_error, result.outcome)
            rows.append((result.name, result.description, *values))
        lines += [
            "",
            to_text(Table("", COLUMNS, rows), width=120),
            "",
            f"specs      {'; '.join(self.specs)}",
        ]
        lines += [f"backends   {', '.join(self.backends)}"]
        lines += [f"not used   {text}" for text in self.impossible]
        for result in self.results:
            lines += [f"skipped    {result.name}: {text}" for text in result.skipped]
        for result in self.results:
            lines += ["", f"{result.name} failed:"] if result.failures else []
            lines += [f"  {failure}" for failure in result.failures[:MAX_FAILURES]]
            if len(result.failures) > MAX_FAILURES:
                lines += [f"  and {len(result.failures) - MAX_FAILURES} more"]
        return "\n".join(lines)


CHUNKINGS = ((7,), (1,) * 7, (3, 1, 3), (2, 5))
NUM_TOKEN_IDS = 17


Comparison = tuple[str, Any, Any]  # a label and two values that must be equal
Check = Callable[[AttentionSpec], Iterator[Comparison]]


def check_part(part: Part, *, seed: int = 0) -> PartReport:
    """Check a part as headwise checks its own, and report the results; failed checks raise nothing.

    The part is put into small layers with random weights, and the specs of its `examples` are used
    too. Six checks run on each: every backend equals the definition for one query and one key at a
    time, in float64; so do all gradients; decoding with a KV cache equals one pass; pruning heads
    equals setting their outputs to zero; parameters, FLOPs and cache are counted as they are; and
    text and folders give back what was written. `raise_if_failed` of the report turns a failure
    into an AssertionError, for tests.

    >>> import headwise as hw
    >>> report = check_part(hw.parts.Softcap(limit=2.0))
    >>> report.passed, report.results[0].name
    (True, 'definition')
    """
    if not isinstance(part, Part):
        hint = f"{part.__name__}()" if isinstance(part, type) else "MyPart()"
        raise SpecError(
            f"part={part!r} is not a part; give an object of a class with @part, such as {hint}"
        )
    specs, impossible = list_cases(part)
    if not specs:
        reasons = "; ".join(dict.fromkeys(impossible.values()))
        raise SpecError(
            f"{part!r} fits none of the layers that parts are checked in: {reasons}; add specs to "
            "examples"
        )
    results = [CheckResult(name, description) for name, (description, _) in CHECKS.items()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for result in results:
            for name, spec in specs.items():
                _run_check(result, name, spec, CHECKS[result.name][1])
        backends = dict.fromkeys(chain.from_iterable(map(supporting_backends, specs.values())))
    reasons = tuple(f"{name}: {reason}" for name, reason in impossible.items())
    return PartReport(repr(part), tuple(specs), tuple(backends), reasons, tuple(results))


def _run_check(result: CheckResult, name: str, spec: AttentionSpec, check: Check) -> None:
    try:
        for label, actual, expected in check(spec):
            result.compare(f"{name}: {label}", actual, expected)
    except NotApplicableError as reason:
        result.skipped.append(f"{name}: {reason}")
    except Exception as error:  # a part of the user may raise anything
        result.failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")


# --- The checks -----------------------------------------------------------------------------------


def compare_outputs(spec: AttentionSpec) -> Iterator[Comparison]:
    """Every backend, on whole, padded and packed batches, and the definition."""
    layer = make_layer(spec)
    x, source = make_inputs(spec)
    for batch, sequence in sequence_infos(x).items():
        expected = reference_attention(layer, x, source=source, tokens=sequence)
        for layer.backend_name in supporting_backends(spec):
            actual = layer(x, source=source, sequence=sequence)
            yield (f"{batch} rows, backend {layer.backend_name}", actual, expected)


def compare_gradients(spec: AttentionSpec) -> Iterator[Comparison]:
    """Compare gradients of the input and every parameter: each backend against the definition."""
    layer = make_layer(spec)
    x, source = make_inputs(spec)
    x.requires_grad_()
    sequence = sequence_infos(x)["packed"]
    expected = layer_gradients(
        layer, reference_attention(layer, x, source=source, tokens=sequence), x
    )
    for layer.backend_name in supporting_backends(spec, grad_enabled=True):
        actual = layer_gradients(layer, layer(x, source=source, sequence=sequence), x)
        for name, gradient in expected.items():
            yield (f"gradient of {name}, backend {layer.backend_name}", actual[name], gradient)


def compare_decoding(spec: AttentionSpec) -> Iterator[Comparison]:
    """Tokens that arrive in chunks through a KV cache, and one pass over all of them."""
    spec = as_causal(spec)
    layer = make_layer(spec)
    x, _ = make_inputs(spec)
    expected = reference_attention(layer, x)
    for chunks in CHUNKINGS:
        cache = layer.cache(batch=BATCH, capacity=CAPACITY)
        label = f"chunks of {', '.join(map(str, chunks))} tokens"
        yield (label, decode_in_chunks(layer, x, chunks, cache), expected)


def compare_pruning(spec: AttentionSpec) -> Iterator[Comparison]:
    """Compare a layer without some heads to the whole layer with the outputs of these heads set to
    zero.
    """
    layer = make_layer(spec)
    x, source = make_inputs(spec)
    count = len(spec.score_head_of_output)
    for remaining in sorted({(0,), (0, count - 1), tuple(range(1, count)) or (0,)}):
        factors = torch.zeros(count, 1, dtype=x.dtype)
        factors[list(remaining)] = 1
        probe = Probe("heads", callback=lambda _, o_BTOV, factors=factors: o_BTOV * factors)
        expected = layer(x, source=source, probe=probe)
        small, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), sorted(set(remaining)))
        pruned = Attention(small).double().eval()
        pruned.load_state_dict(weights)
        label = f"heads {', '.join(map(str, remaining))} are kept"
        for pruned.backend_name in (None, *supporting_backends(small)):
            yield (f"{label}, backend {pruned.backend_name}", pruned(x, source=source), expected)
        pruned.backend_name = None
        if not small.is_recurrent:
            yield (f"{label}, probed", pruned(x, source=source, probe=Probe("weights")), expected)


def compare_counts(spec: AttentionSpec) -> Iterator[Comparison]:
    """Counted and real numbers: parameters, constants, shapes, FLOPs of the dense backend, and
    bytes of the cache.
    """
    layer = make_layer(spec, torch.float32, "dense")
    yield ("parameters", costs.count_parameters(spec), sum(p.numel() for p in layer.parameters()))
    yield ("constants", costs.count_constants(spec), sum(b.numel() for b in layer.buffers()))
    yield (
        "shapes",
        spec.shapes(),
        {name: tuple(t.shape) for name, t in layer.state_dict().items()},
    )
    x, source = make_inputs(spec, torch.float32)
    keys = TOKENS if source is None else SOURCE
    work = CallSize(BATCH, TOKENS, keys, keys)
    yield ("FLOPs", costs.counted_flops(spec, work), count_torch_flops(layer, x, source=source))
    causal = as_causal(spec)
    cache = make_layer(causal, torch.float32).cache(batch=BATCH, capacity=CAPACITY)
    counted = costs.cache_bytes(causal, batch=BATCH, capacity=CAPACITY)
    yield ("bytes of the KV cache", counted, cache.nbytes)


def compare_saved(spec: AttentionSpec) -> Iterator[Comparison]:
    """Specs written as text and read again; a model written to a folder and loaded again."""
    yield ("TOML", from_toml(to_toml(spec)), spec)
    yield ("JSON", from_json(to_json(spec)), spec)
    if spec.source is not None:
        return
    embedding = EmbeddingSpec(NUM_TOKEN_IDS)
    kind = "decoder" if spec.pattern.tokens_before_decode == 0 else "encoder"
    stack = StackSpec.from_blocks(
        kind, spec.model, [BlockSpec(spec), BlockSpec(spec)], embedding=embedding
    )
    net = models.build(ModelSpec("checked", kind, (stack,)), seed=0).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    ids = torch.randint(NUM_TOKEN_IDS, (BATCH, TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        models.save(net, folder)
        loaded = models.load(folder)
    yield ("spec of a saved model", loaded.spec, net.spec)
    expected: dict[str, Tensor] = net.state_dict()
    yield ("names of saved tensors", sorted(loaded.state_dict()), sorted(expected))
    for name, tensor in loaded.state_dict().items():
        yield (f"saved {name}", tensor, expected[name])
    yield ("output of a saved model", loaded(ids), net(ids))


CHECKS: dict[str, tuple[str, Check]] = {
    "definition": ("every backend with the definition per pair", compare_outputs),
    "gradients": ("gradients with those of the definition", compare_gradients),
    "decoding": ("decoding with a cache with one pass", compare_decoding),
    "pruning": ("pruned heads with heads set to zero", compare_pruning),
    "counts": ("counted parameters, FLOPs, cache with real ones", compare_counts),
    "saving": ("what is loaded with what was saved", compare_saved),
}
