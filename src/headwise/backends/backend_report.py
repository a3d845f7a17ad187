"""Why a spec runs where it runs: every backend in order of preference, with its reasons to refuse."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import backends
from ..errors import suggest
from ..interfaces.probe import PROBE_POINTS
from ..spec.attention_spec import AttentionSpec
from . import CallSignature

WIDTH = 80
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
STATES = ("grad", "training", "mask", "paged")
CALL_KINDS = {"many": "several queries per row", "one": "one query per row"}


@dataclass(frozen=True)
class CallReport:
    """One kind of call: the form the project runs in, and what each backend says to it."""

    tokens: str
    call: CallSignature
    form: str
    unsupported: dict[str, list[str]]
    length_ranges: list[tuple[int, str]]  # from how many keys on which backend runs it
    notes: dict[str, list[str]]  # what backends that take it do with it beyond what they do with every call

    @property
    def backend(self) -> str | None:
        """The backend that runs it: the first without a refusal."""
        return next((name for name, reasons in self.unsupported.items() if not reasons), None)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        call = self.call
        told = {"tokens": self.tokens, "device": call.device, "dtype": str(call.dtype).removeprefix("torch.")}
        told |= {
            "grad": call.needs_grad,
            "training": call.training,
            "mask": call.has_caller_mask,
            "state": call.has_recurrent_state,
            "paged": call.has_paged_cache,
        }
        told |= {"want": sorted(call.probed_tensors), "form": self.form, "keys": call.num_keys, "runs": self.backend}
        told |= {"from": [{"keys": least, "runs": name} for least, name in self.length_ranges]}
        return told | {
            "backends": [
                {"name": name, "refuses": said, "notes": self.notes[name]} for name, said in self.unsupported.items()
            ]
        }


@dataclass(frozen=True)
class BackendReport:
    """What `why` found: `asked` is the kind of call in question, `other` the same with one query or with several."""

    spec: AttentionSpec
    call: CallReport
    other_call: CallReport

    @property
    def backend(self) -> str | None:
        """The backend that runs the call in question, if any."""
        return self.call.backend

    @property
    def unsupported(self) -> dict[str, list[str]]:
        """The reasons of every backend for the call in question, in order of preference."""
        return self.call.unsupported

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values, ready for JSON."""
        return self.call.data | {
            "otherwise": {
                "tokens": self.other_call.tokens,
                "form": self.other_call.form,
                "runs": self.other_call.backend,
            }
        }

    def json(self) -> str:
        """One JSON document."""
        return json.dumps(self.data, indent=2)

    def __str__(self) -> str:
        call = self.call.call
        said = [CALL_KINDS[self.call.tokens], str(call.dtype).removeprefix("torch."), f"on {call.device}"]
        states = {
            "training": call.training,
            "with gradient": call.needs_grad,
            "with a mask of its own": call.has_caller_mask,
        }
        states |= {"of past tokens in pages": call.has_paged_cache}
        said += [state for state, holds in states.items() if holds]
        said += [f"showing {', '.join(sorted(call.probed_tensors))}"] if call.probed_tensors else []
        said += [f"of {call.num_keys:,} keys"] if call.num_keys is not None else []
        name = max(map(len, self.unsupported))
        lines = [*textwrap.wrap(", ".join(said), WIDTH), ""]
        for backend, reasons in self.unsupported.items():
            takes = ["runs it" if backend == self.backend else "could run it", *self.call.notes[backend]]
            lines += _row(backend, name, "; ".join(reasons or takes))
        lines += ["", *_ends(self.call)]
        return "\n".join([*lines, *_ends(self.other_call)])


def why(
    spec: AttentionSpec,
    *,
    want: Iterable[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    tokens: str | int = "many",
    when: Iterable[str] = (),
) -> BackendReport:
    """Which backend would run this spec, and why each other one refuses; nothing is run, no device is needed.

    `want` names what a probe asks to see, `tokens` is "many" or "one" query per row, or how many: then a backend also
    says where it was measured to be slower than another, and a layer that asks for it by name runs it all the same.
    `when` is any of "grad", "training", "mask" (a mask of the caller's own) and "paged" (past tokens lie in pages, as
    an engine keeps them). One query per row means decoding from a cache.

    >>> import headwise as hw
    >>> reasons = why(hw.design(model=512, heads=8, pattern="causal"), want=["weights"])
    >>> reasons.backend, reasons.unsupported["sdpa"]
    ('dense', ['it cannot show weights'])
    """
    want, when = _each(want), _each(when)
    _known("want", want, PROBE_POINTS)
    _known("when", when, STATES)
    _known("dtype", [dtype], DTYPES)
    tokens, keys = _call_kind(tokens)
    call = CallSignature(
        spec,
        spec.core,
        device=_device(device),
        dtype=DTYPES[dtype],
        needs_grad="grad" in when,
        has_paged_cache="paged" in when,
        has_caller_mask="mask" in when,
        training="training" in when,
        probed_tensors=frozenset(want),
        num_keys=keys,
    )
    return BackendReport(spec, _call(call, tokens), _call(call, "one" if tokens == "many" else "many"))


def _call(call: CallSignature, tokens: str) -> CallReport:
    spec, one = call.spec, tokens == "one"
    project = spec.projection_form(one)
    call = replace(call, core=spec.core_of(project), single_query=one, has_recurrent_state=one and spec.is_recurrent)
    call = replace(call, num_keys=None) if one else call  # a single query is not chosen by them
    refusals = backends.unsupported_reasons_by_backend(call)
    notes = {name: [] if reasons else backends.backend_notes(name, call) for name, reasons in refusals.items()}
    form = "" if project == spec.project else repr(project)
    return CallReport(tokens, call, form, refusals, backends.backends_by_length(call), notes)


def _each(words: Iterable[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def _known(name: str, words: Sequence[str], known: Iterable[str]) -> None:
    for word in words:
        if word not in known:
            raise ValueError(f"{name}={word!r} is unknown; {suggest(str(word), known)}")


def _call_kind(tokens: str | int) -> tuple[str, int | None]:
    """The kind of call, and how many tokens a row has where that is said."""
    if str(tokens).isascii() and str(tokens).isdigit() and int(tokens) > 0:
        return ("one", None) if int(tokens) == 1 else ("many", int(tokens))
    if tokens not in CALL_KINDS:
        raise ValueError(f"tokens={tokens!r} is unknown; use one of many, one, or a number of tokens")
    return str(tokens), None


def _device(name: str) -> str:
    try:
        return torch.device(name).type
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown; use one such as cpu, cuda or mps") from None


def _row(backend: str, wide: int, said: str) -> list[str]:
    indent = " " * (wide + 4)
    return textwrap.wrap(said, WIDTH, initial_indent=f"  {backend.ljust(wide)}  ", subsequent_indent=indent)


def _ends(call: CallReport) -> list[str]:
    wide = max(map(len, CALL_KINDS.values()))
    ran = call.backend or "nothing can run it"
    if call.call.num_keys is None and len(call.length_ranges) > 1:
        ran = "; ".join(f"{name} from {least:,} keys on" if least else name for least, name in call.length_ranges)
    ran += f", as {call.form}" if call.form and call.backend else ""
    start = f"{CALL_KINDS[call.tokens].ljust(wide)}  "
    return textwrap.wrap(ran, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
