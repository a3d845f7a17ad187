"""The checks that every part keeps: `check_part` runs them on small specs with the part and on its
own examples.

The report has one row per check and is printed as a table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import costs
from ...attention import head_axis_ops
from ...attention.attention import Attention
from ...attention.interfaces import Part
from ...attention.interfaces.core_types import CallSize, Probe
from ...attention.presets import from_json, from_toml
from ...attention.reference import reference_attention
from ...attention.spec.attention_spec import AttentionSpec
from ...attention.spec.serialization import to_json, to_toml
from ...models import build, load, save
from ...models.model_spec import BlockSpec, EmbeddingSpec, ModelSpec, StackSpec
from ...util.errors import SpecError
from . import layer_cases as cases
from .layer_cases import count_torch_flops, decode_in_chunks, layer_gradients

# Errors are relative to |expected| + ERROR_OFFSET, so that values near zero are compared by their
# absolute error.
MAX_ERROR = 1e-10
ERROR_OFFSET = 0.1
MAX_FAILURES = 8  # printed for each check


@dataclass
class CheckResult:
    """One check: the number of comparisons, the largest error of those of tensors, and the
    failures, one line each.

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
    """The largest |actual - expected| / (|expected| + 0.1); infinite if one is not finite where the
    other is.

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
        """Whether no check failed."""
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
        lines += ["", *self._format_table(), "", f"specs      {'; '.join(self.specs)}"]
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

    def _format_table(self) -> list[str]:
        rows = [("check", "compares", "comparisons", "largest error", "result")]
        for result in self.results:
            error = "-" if result.largest_error is None else f"{result.largest_error:.1e}"
            rows.append(
                (result.name, result.description, f"{result.comparisons:,}", error, result.outcome)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return [
            (
                f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
                f"{row[3]:>{widths[3]}}  {row[4]}"
            )
            for row in rows
        ]


CHUNKINGS = ((7,), (1,) * 7, (3, 1, 3), (2, 5))
NUM_TOKEN_IDS = 17


class NotApplicableError(Exception):
    """A check that a spec has no form for, such as decoding of a part that needs future tokens."""


@dataclass(frozen=True)
class Comparison:
    """Two values that must be equal: tensors within rounding, other values exactly."""

    label: str
    actual: Any
    expected: Any


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
    >>> report = check_part(hw.Softcap(limit=2.0))
    >>> report.passed, report.results[0].name
    (True, 'definition')
    """
    if not isinstance(part, Part):
        hint = f"{part.__name__}()" if isinstance(part, type) else "MyPart()"
        raise SpecError(
            f"part={part!r} is not a part; give an object of a class with @part, such as {hint}"
        )
    specs, impossible = cases.list_cases(part)
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
        backends = dict.fromkeys(
            name for spec in specs.values() for name in cases.supporting_backends(spec)
        )
    reasons = tuple(f"{name}: {reason}" for name, reason in impossible.items())
    return PartReport(repr(part), tuple(specs), tuple(backends), reasons, tuple(results))


def _run_check(result: CheckResult, name: str, spec: AttentionSpec, check: Check) -> None:
    try:
        for comparison in check(spec):
            result.compare(f"{name}: {comparison.label}", comparison.actual, comparison.expected)
    except NotApplicableError as reason:
        result.skipped.append(f"{name}: {reason}")
    except Exception as error:  # a part of the user may raise anything
        result.failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")


def _as_causal(spec: AttentionSpec) -> AttentionSpec:
    try:
        return cases.as_causal(spec)
    except SpecError as reason:
        raise NotApplicableError(str(reason)) from None


# --- The checks -----------------------------------------------------------------------------------


def compare_outputs(spec: AttentionSpec) -> Iterator[Comparison]:
    """Every backend, on whole, padded and packed batches, and the definition."""
    layer = cases.make_layer(spec)
    x, source = cases.make_inputs(spec)
    for batch, sequence in cases.sequence_infos(x).items():
        expected = reference_attention(layer, x, source=source, tokens=sequence)
        for layer.backend_name in cases.supporting_backends(spec):
            actual = layer(x, source=source, sequence=sequence)
            yield Comparison(f"{batch} rows, backend {layer.backend_name}", actual, expected)


def compare_gradients(spec: AttentionSpec) -> Iterator[Comparison]:
    """Gradients of the input and of every parameter, by every backend, and
    those of the definition.
    """
    layer = cases.make_layer(spec)
    x, source = cases.make_inputs(spec)
    x.requires_grad_()
    sequence = cases.sequence_infos(x)["packed"]
    expected = layer_gradients(
        layer, reference_attention(layer, x, source=source, tokens=sequence), x
    )
    for layer.backend_name in cases.supporting_backends(spec, needs_grad=True):
        actual = layer_gradients(layer, layer(x, source=source, sequence=sequence), x)
        for name, gradient in expected.items():
            yield Comparison(
                f"gradient of {name}, backend {layer.backend_name}", actual[name], gradient
            )


def compare_decoding(spec: AttentionSpec) -> Iterator[Comparison]:
    """Tokens that arrive in chunks through a KV cache, and one pass over all of them."""
    spec = _as_causal(spec)
    layer = cases.make_layer(spec)
    x, _ = cases.make_inputs(spec)
    expected = reference_attention(layer, x)
    for chunks in CHUNKINGS:
        cache = layer.cache(batch=cases.BATCH, capacity=cases.CAPACITY)
        label = f"chunks of {', '.join(map(str, chunks))} tokens"
        yield Comparison(label, decode_in_chunks(layer, x, chunks, cache), expected)


def compare_pruning(spec: AttentionSpec) -> Iterator[Comparison]:
    """A layer without some heads, and the whole layer with the outputs of these
    heads set to zero.
    """
    layer = cases.make_layer(spec)
    x, source = cases.make_inputs(spec)
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
        for pruned.backend_name in (None, *cases.supporting_backends(small)):
            yield Comparison(
                f"{label}, backend {pruned.backend_name}", pruned(x, source=source), expected
            )
        pruned.backend_name = None
        if not small.is_recurrent:
            yield Comparison(
                f"{label}, probed", pruned(x, source=source, probe=Probe("weights")), expected
            )


def compare_counts(spec: AttentionSpec) -> Iterator[Comparison]:
    """Counted and real numbers: parameters, constants, shapes, FLOPs of the dense backend, and
    bytes of the cache.
    """
    layer = cases.make_layer(spec, torch.float32, "dense")
    yield Comparison(
        "parameters", costs.count_parameters(spec), sum(p.numel() for p in layer.parameters())
    )
    yield Comparison(
        "constants", costs.count_constants(spec), sum(b.numel() for b in layer.buffers())
    )
    yield Comparison(
        "shapes", spec.shapes(), {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    )
    x, source = cases.make_inputs(spec, torch.float32)
    keys = cases.TOKENS if source is None else cases.SOURCE
    work = CallSize(cases.BATCH, cases.TOKENS, keys, keys)
    yield Comparison(
        "FLOPs", costs.counted_flops(spec, work), count_torch_flops(layer, x, source=source)
    )
    causal = _as_causal(spec)
    cache = cases.make_layer(causal, torch.float32).cache(
        batch=cases.BATCH, capacity=cases.CAPACITY
    )
    counted = costs.cache_bytes(causal, batch=cases.BATCH, capacity=cases.CAPACITY)
    yield Comparison("bytes of the KV cache", counted, cache.nbytes)


def compare_saved(spec: AttentionSpec) -> Iterator[Comparison]:
    """Specs written as text and read again; a model written to a folder and loaded again."""
    yield Comparison("TOML", from_toml(to_toml(spec)), spec)
    yield Comparison("JSON", from_json(to_json(spec)), spec)
    if spec.source is not None:
        return
    embedding = EmbeddingSpec(NUM_TOKEN_IDS)
    kind = "decoder" if spec.pattern.tokens_before_decode == 0 else "encoder"
    stack = StackSpec.from_blocks(
        kind, spec.model, [BlockSpec(spec), BlockSpec(spec)], embedding=embedding
    )
    net = build(ModelSpec("checked", kind, (stack,)), seed=0).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    ids = torch.randint(NUM_TOKEN_IDS, (cases.BATCH, cases.TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        save(net, folder)
        loaded = load(folder)
    yield Comparison("spec of a saved model", loaded.spec, net.spec)
    expected: dict[str, Tensor] = net.state_dict()
    yield Comparison("names of saved tensors", sorted(loaded.state_dict()), sorted(expected))
    for name, tensor in loaded.state_dict().items():
        yield Comparison(f"saved {name}", tensor, expected[name])
    yield Comparison("output of a saved model", loaded(ids), net(ids))


CHECKS: dict[str, tuple[str, Check]] = {
    "definition": ("every backend with the definition per pair", compare_outputs),
    "gradients": ("gradients with those of the definition", compare_gradients),
    "decoding": ("decoding with a cache with one pass", compare_decoding),
    "pruning": ("pruned heads with heads set to zero", compare_pruning),
    "counts": ("counted parameters, FLOPs, cache with real ones", compare_counts),
    "saving": ("what is loaded with what was saved", compare_saved),
}
