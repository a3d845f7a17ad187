"""Bytes that an attention layer keeps for the way back, by how it is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..backends import halves, linear, sdpa
from ..backends.blocks import BLOCK
from ..backends.job import Job
from ..errors import NoBackend, SpecError, nearest
from ..spec import AttentionSpec
from . import textbook
from .bills import Bill
from .devices import bytes_of
from .imagined import DTYPES, Run, Sizes, run
from .shapes import Axes, Kept, plain, terms
from .symbols import Symbol
from .watching import Saved

if TYPE_CHECKING:
    from .pricing import Load

# What runs the core, and on which kind of device; the published ones are formulas and run nothing.
PROFILES = {
    "dense": ("dense", "cpu"),
    "composed": ("dense", "cpu"),
    "halves": ("halves", "cpu"),
    "sdpa": ("sdpa", "cpu"),
    "flash-cuda": ("sdpa", "cuda"),
}
CHECKPOINTS = ("none", "block", "core")
FEW, MORE = 7, 11  # rows of the two runs
LONGEST = 2**22  # tokens of a run: what is longer follows from a shorter one of the same kind


def activations(
    spec: AttentionSpec, load: Load, profile: str = "", *, source: int | None = None, checkpoint: str = "none"
) -> Bill:
    """Bytes that one layer keeps from its forward pass in training for the way back, by the step that keeps them.

    profile="dense": every score in plain operations; "composed": the same in blocks of queries, whose scores are formed
    once more on the way back; "halves": whole products; "sdpa": torch's fused call on the CPU; "flash-cuda": the same
    on CUDA, derived from what its kernels keep and not measured; "paper-2022" (2205.05198) and "zhihu-624740065" as
    textbook. Without one, `usual` says which. `source` is how many tokens another sequence has, if not as many.

    >>> import headwise as hw
    >>> told = activations(hw.design(model=512, heads=8, bias="qkvo"), hw.Load(2, 1000), "sdpa")
    >>> for term in told.terms:
    ...     print(*term)
    input 2 b s model 2048000
    keys 2 b s q dim 2048000
    queries 2 b s q dim 2048000
    values 2 b s q dim 2048000
    logsumexp 4 b s q 64000
    read 2 b s q dim 2048000
    """
    return Bill.of(iter(layer(spec, load, (profile or usual(spec, load), checkpoint), source).items()))


def layer(spec: AttentionSpec, load: Load, how: tuple[str, str], source: int | None = None) -> Kept:
    """The same as numbers that know their formulas, by step; `how` is profile and checkpoint."""
    profile, checkpoint = how
    _check(profile, checkpoint)
    if profile in textbook.PROFILES:
        return dict(textbook.layer(spec, load, how))
    axes = axes_of(spec, load, source)
    if profile == "composed" and checkpoint == "none" and load.context > BLOCK:
        how = (profile, "core")
    if checkpoint == "block":
        rows, each = axes.load.batch, bytes_of(load.dtype)
        held = {"input": each * rows * axes.load.tokens * Symbol.of(spec.model, "model")}
        wide = spec.source and Symbol.of(spec.source, "source")
        return held | ({"source": each * rows * axes.load.source * wide} if wide else {})
    return _terms(spec, load, axes, how)


def usual(spec: AttentionSpec, load: Load) -> str:
    """How a layer runs in training on the device of a load: fused where the spec can, else in blocks of queries.

    Sums over tokens, where a spec has them, are not among the profiles; such a one stands as dense.

    >>> import headwise as hw
    >>> [usual(hw.design(preset=name), hw.Load()) for name in ("gqa", "dcmha", "linear")]
    ['flash-cuda', 'composed', 'dense']
    """
    if refused(spec):
        return "composed" if linear.refuses(_training(spec)) else "dense"
    if load.device == "cpu" and load.dtype == "bf16" and not halves.refuses(_training(spec)):
        return "halves"
    return "sdpa" if load.device in ("cpu", "m2-max") else "flash-cuda"


def refused(spec: AttentionSpec) -> list[str]:
    """Why the fused call cannot run a spec in training."""
    return sdpa.refuses(_training(spec))


def _training(spec: AttentionSpec) -> Job:
    return Job(spec, spec.core_of(spec.form(one=False)), grad=True, training=True)


def fuses(spec: AttentionSpec, dtype: str) -> bool:
    """Whether the fused call of the CPU really is one kernel: not where keys and values differ in width, say.

    >>> import headwise as hw
    >>> [fuses(hw.design(preset=name), "fp32") for name in ("gqa", "mla")]
    [True, False]
    """
    return ran(spec, Sizes(FEW, FEW, FEW), "sdpa", dtype, "cpu").fused


def _check(profile: str, checkpoint: str) -> None:
    if profile not in (known := [*PROFILES, *textbook.PROFILES]):
        raise SpecError(f"there is no profile {profile!r}; {nearest(profile, known)}")
    if checkpoint not in CHECKPOINTS:
        raise SpecError(f"checkpoint={checkpoint!r} is unknown; {nearest(checkpoint, CHECKPOINTS)}")
    if checkpoint == "core" and profile in ("sdpa", "flash-cuda"):
        raise SpecError(f"profile {profile} keeps no scores to be computed anew; use checkpoint='none' or 'block'")


def axes_of(spec: AttentionSpec, load: Load, source: int | None) -> Axes:
    """The sizes of a load by the letters and axes of a spec."""
    if source is not None and (spec.source is None or type(source) is not int or source < 1):
        told = "this spec reads no source" if spec.source is None else "give a whole number of at least 1"
        raise SpecError(f"source={source!r} is no length of a source; {told}")
    return Axes(spec, Sizes(load.batch, load.context, source or load.context))


def _terms(spec: AttentionSpec, load: Load, axes: Axes, how: tuple[str, str]) -> Kept:
    backend, device = PROFILES[how[0]]

    def kept(sizes: Sizes) -> Sequence[Saved]:
        told = ran(spec, sizes, backend, load.dtype, device)
        return told.outside if how[1] == "core" else told.kept

    wanted = Sizes(*map(int, axes.load))
    here = Sizes(min(wanted.batch, FEW), min(wanted.tokens, LONGEST), min(wanted.source, LONGEST))
    first = kept(here)
    for other in _others(here, spec.source is None):
        try:
            found = terms(first, kept(other), axes, (here, other))
        except (ValueError, RuntimeError):  # a layer may know no position beyond, or nothing of no tokens
            continue
        if found is not None:
            return found
    if here[1:] != wanted[1:]:
        raise SpecError(f"context={load.context} is another kind of call than any that can be tried; use {LONGEST}")
    return plain(kept(wanted))


def _others(here: Sizes, alone: bool) -> Iterator[Sizes]:
    """Sizes of the same kind of call, near enough that no pattern has an edge between."""
    for more in (1, -1):
        tokens = here.tokens + more
        yield Sizes(MORE, tokens, tokens if alone else here.source + 2 * more)


def ran(spec: AttentionSpec, sizes: Sizes, backend: str, dtype: str, device: str) -> Run:
    """One run; what cannot run is refused in a line."""
    if dtype not in DTYPES:
        raise SpecError(f"dtype={dtype!r} is nothing that layers train in; {nearest(dtype, DTYPES)}")
    try:
        return run(spec, sizes, backend, dtype, device)
    except NoBackend as error:
        raise SpecError(f"{error}; use profile='dense'") from None
    except RuntimeError as error:
        if "overflow" not in str(error) and "too large" not in str(error):
            raise
        raise SpecError(f"a layer of model={spec.model} is wider than any tensor can be; use less") from None
