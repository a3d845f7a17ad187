"""`headwise why`: which backend runs a call of a spec, and which property of each other backend
rules it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.capabilities import current_points, machine_notes, this_machine
from ...kernels.devices import DTYPES
from ...kernels.launch import kernel_problem
from ...report.data import Table
from ...report.notebook import NotebookResult
from ...report.text import pad, text_width, wrap
from ...util.errors import suggest
from .. import backends
from ..interfaces.core_types import PROBE_POINTS, CallSize
from ..masking.pattern_base import describe_heads
from ..spec.attention_spec import AttentionSpec
from .core_interface import CallSignature, CoreInputs
from .dispatch import (
    MAX_DENSE_LENGTH,
    CoreDispatch,
    PackedDispatch,
    never_preferred_reasons,
    slower_reasons_by_backend,
)
from .head_group_dispatch import HeadGroupDispatch

STATES = ("grad", "training", "mask", "paged", "packed")
NO_KERNELS_NOTE = (
    "CPU kernels are off: flash_cpu, ragged and paged do not run, paged caches are gathered "
    "before they are read, and "
    "torch operations replace the kernels of parts."
)
PACKED_NOTE = (
    "Packed sequences run separately in groups of similar length, each on the backend of its "
    f"length (up to {MAX_DENSE_LENGTH} tokens on the CPU: dense)."
)
CALL_KINDS = {"many": "several queries per row", "one": "one query per row"}


@dataclass(frozen=True)
class CallReport:
    """One kind of call: the form of the project, and the answer of every backend."""

    tokens: str  # "many" or "one" query per row
    signature: CallSignature
    size: CallSize | None  # None where the caller gave no length
    form: str  # the form of the project that runs, where it is not the spec's own
    # why a backend does not run the call: a limit, or another is faster
    reasons_against: dict[str, list[str]]
    # (least tokens of a row, backend that runs it from there on)
    length_ranges: list[tuple[int, str]]
    # what a backend that supports the call does with it beyond the usual
    notes: dict[str, list[str]]
    # the calls of heads with one pattern, where heads have several
    groups: tuple[CallReport, ...] = ()

    @property
    def backend(self) -> str | None:
        """The backend that runs the call: the first without a reason against it.

        Groups of heads have one backend each.
        """
        if self.groups:
            return ", ".join(dict.fromkeys(group.backend or "none" for group in self.groups))
        return next((name for name, reasons in self.reasons_against.items() if not reasons), None)

    @property
    def backends_text(self) -> str:
        """The backends that run the call, by length where no length is given."""
        if self.groups:
            texts: list[str] = []
            for group in self.groups:
                heads = describe_heads(group.signature.score_heads)
                pattern = group.signature.pattern.text
                texts.append(f"{heads} ({pattern}): {group.backends_text}")
            return "; ".join(texts)
        text = self.backend or "no backend supports it"
        if self.size is None and len(self.length_ranges) > 1:
            text = "; ".join(
                f"{name} from {least:,} keys on" if least else name
                for least, name in self.length_ranges
            )
        return text

    @property
    def ranges_data(self) -> list[dict[str, Any]]:
        """`length_ranges` as plain values."""
        return [{"keys": least, "runs": name} for least, name in self.length_ranges]

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values."""
        call = self.signature
        return {
            "tokens": self.tokens,
            "device": call.device,
            "dtype": _dtype_name(call),
            "grad": call.grad_enabled,
            "training": call.training,
            "mask": call.has_caller_mask,
            "state": call.has_recurrent_state,
            "paged": call.has_paged_cache,
            "packed": call.is_packed,
            "want": sorted(call.probed_tensors),
            "form": self.form,
            "batch": None if self.size is None else self.size.batch,
            "keys": None if self.size is None else self.size.keys,
            "kernels": kernel_problem() or "available",
            "machine": this_machine()._asdict(),
            "crossovers": current_points().data,
            "runs": self.backend,
            "from": self.ranges_data,
            "groups": [
                {
                    "heads": list(group.signature.score_heads),
                    "pattern": group.signature.pattern.text,
                    "runs": group.backend,
                    "from": group.ranges_data,
                }
                for group in self.groups
            ],
            "backends": [
                {"name": name, "refuses": reasons, "notes": self.notes[name]}
                for name, reasons in self.reasons_against.items()
            ],
        }


@dataclass(frozen=True, repr=False)
class BackendReport(NotebookResult):
    """The answer of `why`: the call in question, and the other kind of call (one query, or several)
    in short.
    """

    spec: AttentionSpec
    call: CallReport
    other_call: CallReport

    @property
    def backend(self) -> str | None:
        """The backend that runs the call in question, if any."""
        return self.call.backend

    @property
    def reasons_against(self) -> dict[str, list[str]]:
        """The reasons against every backend for the call in question, in order of preference."""
        return self.call.reasons_against

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
        other = self.other_call
        return self.call.data | {
            "otherwise": {"tokens": other.tokens, "form": other.form, "runs": other.backend}
        }

    def json(self) -> str:
        """The report as one JSON document."""
        return json.dumps(self.data, indent=2)

    @property
    def report_items(self) -> Sequence[Table]:
        """The answer of every backend."""
        rows: list[tuple[str, str]] = []
        for name, reasons in self.reasons_against.items():
            notes = [_answer(self.call, name), *self.call.notes[name]]
            rows.append((name, f"no: {'; '.join(reasons)}" if reasons else "; ".join(notes)))
        return [Table(_title(self.call), ("backend", "answer"), rows)]

    def __str__(self) -> str:
        width = max(map(len, self.reasons_against))
        lines = [
            *wrap(_title(self.call)),
            "",
            f"  {pad('backend', width)}  answer",
        ]
        (answers,) = self.report_items
        for row in answers.rows:
            name, text = map(str, row)
            indent = " " * (width + 4)
            lines += wrap(text, indent=f"  {name.ljust(width)}  ", hanging=indent)
        lines += ["", *_summary(self.call)]
        if self.call.signature.is_packed:
            lines += wrap(PACKED_NOTE)
        lines += _summary(self.other_call)
        if self.call.signature.device == "cpu":
            notes = [*([NO_KERNELS_NOTE] if kernel_problem() else []), *machine_notes()]
            for note in notes:
                lines += ["", *wrap(note)]
        return "\n".join(lines)


def why(
    spec: AttentionSpec,
    *tensors: object,
    want: Iterable[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    tokens: str | int | CallSize = "many",
    when: Iterable[str] = (),
) -> BackendReport:
    """Report which backend runs a call of this spec, and why the others do not; runs nothing and
    needs no device.

    `want` names the tensors that a probe reads. `tokens` is "many" or "one" query per row, how many
    tokens a row has, or a `CallSize`. With a size, the answer includes which backend was measured
    to be faster; a backend named by the layer runs at any size. `when` is any of "grad",
    "training", "mask" (the caller passes one), "paged" (a paged KV cache) and "packed" (rows hold
    several sequences). One query per row means decoding from a cache.

    >>> import headwise as hw
    >>> reasons = why(hw.design(model=512, heads=8, pattern="causal"), want=["weights"])
    >>> reasons.backend, reasons.reasons_against["sdpa"]
    ('dense', ['cannot show weights'])
    """
    if tensors:
        raise ValueError("why takes a spec alone; layer.why(x) explains a call with tensors")
    if not isinstance(spec, AttentionSpec):
        raise ValueError(
            f"why takes an attention spec, not {type(spec).__name__}; give layer.spec or "
            "hw.design(...)"
        )
    want = _as_words(want)
    when = _as_words(when)
    _check_known("want", want, PROBE_POINTS)
    _check_known("when", when, STATES)
    _check_known("dtype", [dtype], DTYPES)
    kind, size = _parse_tokens(tokens)
    call = CallSignature(
        spec,
        spec.core,
        device=_device_type(device),
        dtype=DTYPES[dtype],
        grad_enabled="grad" in when,
        has_paged_cache="paged" in when,
        has_caller_mask="mask" in when,
        training="training" in when,
        probed_tensors=frozenset(want),
        is_packed="packed" in when,
    )
    return BackendReport(
        spec,
        _call_report(call, kind, size),
        _call_report(call, "one" if kind == "many" else "many", None),
    )


def explain_call(
    dispatch: CoreDispatch | PackedDispatch | HeadGroupDispatch,
    call: CallSignature,
    inputs: CoreInputs,
) -> BackendReport:
    """Report on a call with known tensors; `Attention.why` collects the reports."""
    queries = inputs.q.shape[1]
    size = CallSize(inputs.q.shape[0], queries, queries, inputs.mask.keys.count)
    kind = "one" if queries == 1 else "many"
    report = _signature_report(call, kind, size)
    if isinstance(dispatch, CoreDispatch):
        report = replace(report, reasons_against=dispatch.reasons_against(inputs))
    return BackendReport(
        call.spec, report, _call_report(call, "one" if kind == "many" else "many", None)
    )


def _call_report(call: CallSignature, tokens: str, size: CallSize | None) -> CallReport:
    spec = call.spec
    single = tokens == "one"
    call = replace(
        call,
        core=spec.core_of(spec.projection_form(single)) if call.head_group is None else call.core,
        single_query=single,
        has_recurrent_state=single and spec.is_recurrent,
        is_packed=call.is_packed and not single,
    )
    return _signature_report(call, tokens, size)


def _signature_report(call: CallSignature, tokens: str, size: CallSize | None) -> CallReport:
    spec = call.spec
    project = call.spec.projection_form(call.single_query)
    reasons = backends.unsupported_reasons_by_backend(call)
    if size is None:
        slower = {name: never_preferred_reasons(name, call) for name in reasons}
    else:
        slower = slower_reasons_by_backend(call, size)
    reasons = {name: own_reasons or slower[name] for name, own_reasons in reasons.items()}
    notes = {
        name: [] if own_reasons else backends.backend_notes(name, call)
        for name, own_reasons in reasons.items()
    }
    parts = backends.split_by_pattern(call) if call.head_group is None else ()
    groups = tuple(
        _call_report(part, tokens, size) for part in parts if part.head_group is not None
    )
    form = "" if project == spec.project else repr(project)
    return CallReport(
        tokens, call, size, form, reasons, backends.backends_by_length(call), notes, groups
    )


def _title(report: CallReport) -> str:
    call = report.signature
    states = {
        "training": call.training,
        "with gradient": call.grad_enabled,
        "with a mask of the caller": call.has_caller_mask,
        "with a paged KV cache": call.has_paged_cache,
        "packed rows": call.is_packed,
    }
    words = [CALL_KINDS[report.tokens], f"{_dtype_name(call)} on {call.device}"]
    words += [state for state, holds in states.items() if holds]
    words += [f"reading {', '.join(sorted(call.probed_tensors))}"] if call.probed_tensors else []
    if report.size is not None:
        words += [f"{report.size.keys:,} keys"]
        words += [f"batch {report.size.batch:,}"] if report.size.batch > 1 else []
    return ", ".join(words)


def _answer(report: CallReport, name: str) -> str:
    """Which calls a supporting backend runs: all, only some lengths, or none."""
    if report.groups:
        return "supports this call; one call per pattern is preferred"
    if report.size is not None or len(report.length_ranges) < 2:
        if name == report.backend:
            return "runs this call"
        return f"supports this call; {report.backend} is preferred"
    starts = [least for least, _ in report.length_ranges]
    ranges = zip(report.length_ranges, [*starts[1:], None], strict=True)
    lengths = [_length_range(least, end) for (least, runs), end in ranges if runs == name]
    if lengths:
        return f"runs calls of {' and '.join(lengths)} keys"
    return "supports this call; never preferred"


def _length_range(least: int, end: int | None) -> str:
    """Numbers of keys from `least` to `end` without it, as text."""
    if end is None:
        return f"{least:,} or more"
    return f"{least:,} to {end - 1:,}" if least else f"up to {end - 1:,}"


def _summary(report: CallReport) -> list[str]:
    """The kind of call, and the backends that run it by length."""
    width = max(map(len, CALL_KINDS.values()))
    text = report.backends_text
    text += f", as {report.form}" if report.form and report.backend else ""
    start = f"{pad(CALL_KINDS[report.tokens], width)}  "
    return wrap(text, indent=start, hanging=" " * text_width(start))


def _dtype_name(call: CallSignature) -> str:
    return str(call.dtype).removeprefix("torch.")


def _as_words(words: Iterable[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def _check_known(name: str, words: Sequence[str], names: Iterable[str]) -> None:
    for word in words:
        if word not in names:
            raise ValueError(f"{name}={word!r} is unknown; {suggest(str(word), names)}")


def _parse_tokens(tokens: str | int | CallSize) -> tuple[str, CallSize | None]:
    """Return the kind of call, and its size if given."""
    if isinstance(tokens, CallSize):
        return "one" if tokens.queries == 1 else "many", tokens
    if str(tokens).isascii() and str(tokens).isdigit() and int(tokens) > 0:
        count = int(tokens)
        return ("one", None) if count == 1 else ("many", CallSize(1, count, count, count))
    if tokens not in CALL_KINDS:
        raise ValueError(
            f"tokens={tokens!r} is unknown; use one of many, one, or a number of tokens"
        )
    return str(tokens), None


def _device_type(name: str) -> str:
    try:
        return torch.device(name).type
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown; use one such as cpu, cuda or mps") from None
