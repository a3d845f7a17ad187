"""Bytes that an attention layer keeps for the way back, by how it is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..backends import halves, linear, sdpa
from ..backends.blocks import QUERY_BLOCK_SIZE
from ..backends.job import CallSignature
from ..errors import NoBackend, SpecError, suggest
from ..spec import AttentionSpec
from . import textbook
from .bills import CostBreakdown
from .devices import dtype_bytes
from .imagined import TORCH_DTYPES, SavedTensorRun, CallSizes, record_meta_run
from .shapes import SymbolicAxes, BytesByStep, sum_bytes_by_step, infer_formulas
from .symbols import SymbolicInt
from .watching import SavedTensor

if TYPE_CHECKING:
    from .pricing import Workload

# What runs the core, and on which kind of device; the published ones are formulas and run nothing.
BACKEND_PROFILES = {
    "dense": ("dense", "cpu"),
    "composed": ("dense", "cpu"),
    "halves": ("halves", "cpu"),
    "sdpa": ("sdpa", "cpu"),
    "flash-cuda": ("sdpa", "cuda"),
}
CHECKPOINT_MODES = ("none", "block", "core")
SHORT_LENGTH, LONGER_LENGTH = 7, 11  # rows of the two runs
MAX_LENGTH = 2**22  # tokens of a run: what is longer follows from a shorter one of the same kind


def layer_activation_memory(
    spec: AttentionSpec, workload: Workload, profile: str = "", *, source: int | None = None, checkpoint: str = "none"
) -> CostBreakdown:
    """Bytes that one layer keeps from its forward pass in training for the way back, by the step that keeps them.

    profile="dense": every score in plain operations; "composed": the same in blocks of queries, whose scores are formed
    once more on the way back; "halves": whole products; "sdpa": torch's fused call on the CPU; "flash-cuda": the same
    on CUDA, derived from what its kernels keep and not measured; "paper-2022" (2205.05198) and "zhihu-624740065" as
    textbook. Without one, `usual` says which. `source` is how many tokens another sequence has, if not as many.

    >>> import headwise as hw
    >>> told = layer_activation_memory(hw.design(model=512, heads=8, bias="qkvo"), hw.Workload(2, 1000), "sdpa")
    >>> for term in told.terms:
    ...     print(*term)
    input 2 b s model 2048000
    keys 2 b s q dim 2048000
    queries 2 b s q dim 2048000
    values 2 b s q dim 2048000
    logsumexp 4 b s q 64000
    read 2 b s q dim 2048000
    """
    return CostBreakdown.from_items(iter(layer_activation_terms(spec, workload, (profile or default_profile(spec, workload), checkpoint), source).items()))


def layer_activation_terms(spec: AttentionSpec, workload: Workload, how: tuple[str, str], source: int | None = None) -> BytesByStep:
    """The same as numbers that know their formulas, by step; `how` is profile and checkpoint."""
    profile, checkpoint = how
    _check_profile(profile, checkpoint)
    if profile in textbook.FORMULA_PROFILES:
        return dict(textbook.formula_layer_bytes(spec, workload, how))
    axes = symbolic_axes(spec, workload, source)
    if profile == "composed" and checkpoint == "none" and workload.context > QUERY_BLOCK_SIZE:
        how = (profile, "core")
    if checkpoint == "block":
        rows, each = axes.load.batch, dtype_bytes(workload.dtype)
        held = {"input": each * rows * axes.load.tokens * SymbolicInt.of(spec.model, "model")}
        wide = spec.source and SymbolicInt.of(spec.source, "source")
        return held | ({"source": each * rows * axes.load.source * wide} if wide else {})
    return _infer_terms(spec, workload, axes, how)


def default_profile(spec: AttentionSpec, workload: Workload) -> str:
    """How a layer runs in training on the device of a load: fused where the spec can, else in blocks of queries.

    Sums over tokens, where a spec has them, are not among the profiles; such a one stands as dense.

    >>> import headwise as hw
    >>> [default_profile(hw.design(preset=name), hw.Workload()) for name in ("gqa", "dcmha", "linear")]
    ['flash-cuda', 'composed', 'dense']
    """
    if fused_unsupported_reason(spec):
        return "composed" if linear.unsupported_reasons(_training_options(spec)) else "dense"
    if workload.device == "cpu" and workload.dtype == "bf16" and not halves.unsupported_reasons(_training_options(spec)):
        return "halves"
    return "sdpa" if workload.device in ("cpu", "m2-max") else "flash-cuda"


def fused_unsupported_reason(spec: AttentionSpec) -> list[str]:
    """Why the fused call cannot run a spec in training."""
    return sdpa.unsupported_reasons(_training_options(spec))


def _training_options(spec: AttentionSpec) -> CallSignature:
    return CallSignature(spec, spec.core_of(spec.projection_form(one=False)), needs_grad=True, training=True)


def is_fused_on_cpu(spec: AttentionSpec, dtype: str) -> bool:
    """Whether the fused call of the CPU really is one kernel: not where keys and values differ in width, say.

    >>> import headwise as hw
    >>> [is_fused_on_cpu(hw.design(preset=name), "fp32") for name in ("gqa", "mla")]
    [True, False]
    """
    return record_saved_tensors(spec, CallSizes(SHORT_LENGTH, SHORT_LENGTH, SHORT_LENGTH), "sdpa", dtype, "cpu").is_fused


def _check_profile(profile: str, checkpoint: str) -> None:
    if profile not in (known := [*BACKEND_PROFILES, *textbook.FORMULA_PROFILES]):
        raise SpecError(f"there is no profile {profile!r}; {suggest(profile, known)}")
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}")
    if checkpoint == "core" and profile in ("sdpa", "flash-cuda"):
        raise SpecError(f"profile {profile} keeps no scores to be computed anew; use checkpoint='none' or 'block'")


def symbolic_axes(spec: AttentionSpec, load: Workload, source: int | None) -> SymbolicAxes:
    """The sizes of a load by the letters and axes of a spec."""
    if source is not None and (spec.source is None or type(source) is not int or source < 1):
        told = "this spec reads no source" if spec.source is None else "give a whole number of at least 1"
        raise SpecError(f"source={source!r} is no length of a source; {told}")
    return SymbolicAxes(spec, CallSizes(load.batch, load.context, source or load.context))


def _infer_terms(spec: AttentionSpec, load: Workload, axes: SymbolicAxes, how: tuple[str, str]) -> BytesByStep:
    backend, device = BACKEND_PROFILES[how[0]]

    def kept(sizes: CallSizes) -> Sequence[SavedTensor]:
        told = record_saved_tensors(spec, sizes, backend, load.dtype, device)
        return told.outside_core if how[1] == "core" else told.saved

    wanted = CallSizes(*map(int, axes.load))
    here = CallSizes(min(wanted.batch, SHORT_LENGTH), min(wanted.tokens, MAX_LENGTH), min(wanted.source, MAX_LENGTH))
    first = kept(here)
    for other in _probe_sizes(here, spec.source is None):
        try:
            found = infer_formulas(first, kept(other), axes, (here, other))
        except (ValueError, RuntimeError):  # a layer may know no position beyond, or nothing of no tokens
            continue
        if found is not None:
            return found
    if here[1:] != wanted[1:]:
        raise SpecError(f"context={load.context} is another kind of call than any that can be tried; use {MAX_LENGTH}")
    return sum_bytes_by_step(kept(wanted))


def _probe_sizes(here: CallSizes, alone: bool) -> Iterator[CallSizes]:
    """Sizes of the same kind of call, near enough that no pattern has an edge between."""
    for more in (1, -1):
        tokens = here.tokens + more
        yield CallSizes(LONGER_LENGTH, tokens, tokens if alone else here.source + 2 * more)


def record_saved_tensors(spec: AttentionSpec, sizes: CallSizes, backend: str, dtype: str, device: str) -> SavedTensorRun:
    """One run; what cannot run is refused in a line."""
    if dtype not in TORCH_DTYPES:
        raise SpecError(f"dtype={dtype!r} is nothing that layers train in; {suggest(dtype, TORCH_DTYPES)}")
    try:
        return record_meta_run(spec, sizes, backend, dtype, device)
    except NoBackend as error:
        raise SpecError(f"{error}; use profile='dense'") from None
    except RuntimeError as error:
        if "overflow" not in str(error) and "too large" not in str(error):
            raise
        raise SpecError(f"a layer of model={spec.model} is wider than any tensor can be; use less") from None
