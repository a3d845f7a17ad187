"""Why a spec runs where it runs: every backend in order of preference, with its reasons to refuse."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import backends
from .backends import Job
from .errors import nearest
from .probe import PLACES
from .spec import AttentionSpec

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
CALLS = {"many": "several queries per row", "one": "one query per row"}


@dataclass(frozen=True)
class Call:
    """One kind of call: the form the project runs in, and what each backend says to it."""

    tokens: str
    job: Job
    form: str
    refusals: dict[str, list[str]]
    stages: list[tuple[int, str]]  # from how many keys on which backend runs it
    notes: dict[str, list[str]]  # what backends that take it do with it beyond what they do with every call

    @property
    def runs(self) -> str | None:
        """The backend that runs it: the first without a refusal."""
        return next((name for name, reasons in self.refusals.items() if not reasons), None)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        job = self.job
        told = {"tokens": self.tokens, "device": job.device, "dtype": str(job.dtype).removeprefix("torch.")}
        told |= {
            "grad": job.grad,
            "training": job.training,
            "mask": job.masked,
            "state": job.stated,
            "paged": job.paged,
        }
        told |= {"want": sorted(job.wants), "form": self.form, "keys": job.keys, "runs": self.runs}
        told |= {"from": [{"keys": least, "runs": name} for least, name in self.stages]}
        return told | {
            "backends": [
                {"name": name, "refuses": said, "notes": self.notes[name]} for name, said in self.refusals.items()
            ]
        }


@dataclass(frozen=True)
class Reasons:
    """What `why` found: `asked` is the kind of call in question, `other` the same with one query or with several."""

    spec: AttentionSpec
    asked: Call
    other: Call

    @property
    def runs(self) -> str | None:
        """The backend that runs the call in question, if any."""
        return self.asked.runs

    @property
    def refusals(self) -> dict[str, list[str]]:
        """The reasons of every backend for the call in question, in order of preference."""
        return self.asked.refusals

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values, ready for JSON."""
        return self.asked.data | {
            "otherwise": {"tokens": self.other.tokens, "form": self.other.form, "runs": self.other.runs}
        }

    def json(self) -> str:
        """One JSON document."""
        return json.dumps(self.data, indent=2)

    def __str__(self) -> str:
        job = self.asked.job
        said = [CALLS[self.asked.tokens], str(job.dtype).removeprefix("torch."), f"on {job.device}"]
        states = {"training": job.training, "with gradient": job.grad, "with a mask of its own": job.masked}
        states |= {"of past tokens in pages": job.paged}
        said += [state for state, holds in states.items() if holds]
        said += [f"showing {', '.join(sorted(job.wants))}"] if job.wants else []
        said += [f"of {job.keys:,} keys"] if job.keys is not None else []
        name = max(map(len, self.refusals))
        lines = [*textwrap.wrap(", ".join(said), WIDTH), ""]
        for backend, reasons in self.refusals.items():
            takes = ["runs it" if backend == self.runs else "could run it", *self.asked.notes[backend]]
            lines += _row(backend, name, "; ".join(reasons or takes))
        lines += ["", *_ends(self.asked)]
        return "\n".join([*lines, *_ends(self.other)])


def why(
    spec: AttentionSpec,
    *,
    want: Iterable[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    tokens: str | int = "many",
    when: Iterable[str] = (),
) -> Reasons:
    """Which backend would run this spec, and why each other one refuses; nothing is run, no device is needed.

    `want` names what a probe asks to see, `tokens` is "many" or "one" query per row, or how many: then a backend also
    says where it was measured to be slower than another, and a layer that asks for it by name runs it all the same.
    `when` is any of "grad", "training", "mask" (a mask of the caller's own) and "paged" (past tokens lie in pages, as
    an engine keeps them). One query per row means decoding from a cache.

    >>> import headwise as hw
    >>> reasons = why(hw.design(model=512, heads=8, pattern="causal"), want=["weights"])
    >>> reasons.runs, reasons.refusals["sdpa"]
    ('dense', ['it cannot show weights'])
    """
    want, when = _each(want), _each(when)
    _known("want", want, PLACES)
    _known("when", when, STATES)
    _known("dtype", [dtype], DTYPES)
    tokens, keys = _counted(tokens)
    job = Job(
        spec,
        spec.core,
        device=_device(device),
        dtype=DTYPES[dtype],
        grad="grad" in when,
        paged="paged" in when,
        masked="mask" in when,
        training="training" in when,
        wants=frozenset(want),
        keys=keys,
    )
    return Reasons(spec, _call(job, tokens), _call(job, "one" if tokens == "many" else "many"))


def _call(job: Job, tokens: str) -> Call:
    spec, one = job.spec, tokens == "one"
    project = spec.form(one)
    job = replace(job, core=spec.core_of(project), one=one, stated=one and spec.stateful)
    job = replace(job, keys=None) if one else job  # a single query is not chosen by them
    refusals = backends.why(job)
    notes = {name: [] if reasons else backends.notes(name, job) for name, reasons in refusals.items()}
    form = "" if project == spec.project else repr(project)
    return Call(tokens, job, form, refusals, backends.stages(job), notes)


def _each(words: Iterable[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def _known(name: str, words: Sequence[str], known: Iterable[str]) -> None:
    for word in words:
        if word not in known:
            raise ValueError(f"{name}={word!r} is unknown; {nearest(str(word), known)}")


def _counted(tokens: str | int) -> tuple[str, int | None]:
    """The kind of call, and how many tokens a row has where that is said."""
    if str(tokens).isascii() and str(tokens).isdigit() and int(tokens) > 0:
        return ("one", None) if int(tokens) == 1 else ("many", int(tokens))
    if tokens not in CALLS:
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


def _ends(call: Call) -> list[str]:
    wide = max(map(len, CALLS.values()))
    ran = call.runs or "nothing can run it"
    if call.job.keys is None and len(call.stages) > 1:
        ran = "; ".join(f"{name} from {least:,} keys on" if least else name for least, name in call.stages)
    ran += f", as {call.form}" if call.form and call.runs else ""
    start = f"{CALLS[call.tokens].ljust(wide)}  "
    return textwrap.wrap(ran, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
