"""Chooses the backend that computes the core of a call, and runs it. The choice is made only here;
a backend may use another's function for its blocks.

1. By kind, before any tensor is computed: `make_dispatch` keeps the backends that support the
   `CallSignature` (spec, dtype, device, gradients, probes), in order of preference up to `dense`,
   and refuses the call if none does.
2. By size and mask, once queries and keys exist: `CoreDispatch.select` skips backends that cannot
   run this mask (`mask_conflicts`) or were measured to be slower for this size
   (`slower_reasons`). The first that remains runs.

A backend that the caller names runs at any size, or the call is refused. `check_mask` refuses it
before a cache stores the tokens.

Packed rows with known lengths are cut into sequences here. These run in groups of similar length,
and each group gets a backend.

If heads have different patterns, `head_group_dispatch` makes a separate call of each group of
heads with one pattern.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import ModuleType

from torch import Tensor

from ...kernels.capabilities import UP_TO_CROSSOVERS, Crossovers, crossover_size, current_points
from ...util.errors import NoBackend, suggest
from ..interfaces.core_types import CallSize
from ..masking.patterns import PerHead, count_pairs_by_head
from ..masking.sequence_info import AttentionMask, mask_shape
from . import (
    bf16_matmul,
    block_sparse,
    chunked_attention,
    dense,
    flash_cpu,
    flex,
    linear_attention,
    paged_decode,
    ragged_decode,
    routed_heads,
    sdpa,
    varlen,
)
from .core_interface import CallSignature, CoreInputs, no_mask_conflicts
from .query_blocks import QUERY_BLOCK_SIZE

# In order of preference; see `preference_order` for the two that some calls try last.
BACKENDS: dict[str, ModuleType] = {
    "paged": paged_decode,
    "ragged": ragged_decode,
    "routed": routed_heads,
    "block_sparse": block_sparse,
    "bf16_matmul": bf16_matmul,
    "flash_cpu": flash_cpu,
    "sdpa": sdpa,
    "linear": linear_attention,
    "flex": flex,
    "chunked": chunked_attention,
    "dense": dense,
}

SLOWER_THAN_DENSE_IF_SHORT = ("sdpa", "bf16_matmul", "flash_cpu", "block_sparse")
# Crossover points that are numbers of keys.
POINTS_IN_KEYS = (
    "block_sparse",
    "routed",
    "flash_cpu",
    "flash_cpu_full",
    "bf16_matmul",
    "bf16_matmul_gradients",
)
# those that support heads with different patterns in one call
MASK_PER_HEAD_BACKENDS = ("chunked", "dense")
# tensors of all pairs that a probe can show
SHOWN_PAIRS = frozenset({"scores", "weights", "lse"})
LENGTHS_TOGETHER = 32
MAX_KEPT_SIZES = 1024
LONGEST = CallSize(1, 2**62, 2**62, 2**62)  # a size beyond every finite crossover point
# keys up to which the pairs of a pattern are counted to know the shape of its mask
MAX_COUNTED_KEYS = 2**14
# tokens of a packed sequence up to which plain operations take less time on a CPU
MAX_DENSE_LENGTH = 32


@dataclass(frozen=True)
class CoreDispatch:
    """The names of the backends that support one kind of call, the preferred first.

    It holds names and not modules, so that a layer which keeps one can be copied and pickled.
    """

    signature: CallSignature
    backend_names: tuple[str, ...]
    is_named_by_caller: bool = False
    # the backends that are not slower, by batch, queries, keys and shape of the mask, with the
    # crossover points that decided it
    _by_size: dict[tuple[int, int, int, str], tuple[Crossovers, tuple[str, ...]]] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    def attend(self, inputs: CoreInputs) -> Tensor:
        """Per-head outputs o_BTRV, computed by the backend that `select` names."""
        mask = inputs.mask
        if mask.queries.pads_right:
            inputs = self._without_padding(inputs)
        name = self.select(inputs.mask, *inputs.q.shape[:2])
        outputs: Tensor = BACKENDS[name].attend(self.signature, inputs)
        if inputs.mask is not mask:
            return outputs.masked_fill(~mask.queries.is_real[..., None, None], 0.0)
        return outputs

    def _without_padding(self, inputs: CoreInputs) -> CoreInputs:
        """The inputs with zeros as padding and a mask that knows none, if that changes only the
        outputs of queries that are padding.
        """
        mask = inputs.mask
        if not mask.hides_only_padded_queries or self.signature.probed_tensors & SHOWN_PAIRS:
            return inputs
        is_padding = ~mask.queries.is_real[..., None, None]
        q, k, v = (x.masked_fill(is_padding, 0.0) for x in (inputs.q, inputs.k, inputs.v))
        return inputs._replace(q=q, k=k, v=v, mask=mask.without_padding())

    @property
    def may_refuse(self) -> bool:
        """True if every backend of this call has masks that it cannot run."""
        return all(
            BACKENDS[name].mask_conflicts is not no_mask_conflicts for name in self.backend_names
        )

    def select(self, mask: AttentionMask, batch: int, queries: int) -> str:
        """The name of the backend that runs a call with this mask; raise NoBackend if none can."""
        keys = mask.keys.count
        if not (batch and queries and keys) and not dense.unsupported_reasons(self.signature):
            return "dense"  # nothing is computed, and the kernels need not know such calls
        is_step = self.signature.single_query
        if self.is_named_by_caller:
            names = self.backend_names
        elif self.signature.is_compiling:
            names = self._names_at(LONGEST, "any")
        else:
            # Decode steps are keyed without the mask, and a step has another length each time:
            # 32 lengths share what both ends choose.
            shape = "" if is_step else mask.shape
            key = (batch, queries, keys // LENGTHS_TOGETHER if is_step else keys, shape)
            points = current_points()
            cached = self._by_size.get(key)
            if cached is not None and cached[0] is points:
                names = cached[1]
            else:
                names = self._names_at(CallSize(batch, queries, 0, keys), shape)
                if self._holds_for(key, names):
                    if len(self._by_size) >= MAX_KEPT_SIZES:
                        self._by_size.clear()
                    self._by_size[key] = points, names
        conflicts: dict[str, list[str]] = {}
        for name in names:
            find_conflicts = BACKENDS[name].mask_conflicts
            if find_conflicts is no_mask_conflicts:
                return name
            conflicts[name] = find_conflicts(self.signature, mask)
            if not conflicts[name]:
                return name
        raise NoBackend(_refusal(conflicts, self.is_named_by_caller))

    def _names_at(self, size: CallSize, shape: str) -> tuple[str, ...]:
        """The backends that are not slower than another at this size, up to the first that runs
        every mask.
        """
        names: list[str] = []
        for name in self.backend_names:
            if not BACKENDS[name].slower_reasons(self.signature, size, shape):
                names.append(name)
                if BACKENDS[name].mask_conflicts is no_mask_conflicts:
                    break
        return tuple(names)

    def _holds_for(self, key: tuple[int, int, int, str], names: tuple[str, ...]) -> bool:
        """True if these backends are those of every length that has this key."""
        batch, queries, keys, shape = key
        if not self.signature.single_query:
            return True
        ends = max(1, keys * LENGTHS_TOGETHER), (keys + 1) * LENGTHS_TOGETHER - 1
        return all(self._names_at(CallSize(batch, queries, 0, end), shape) == names for end in ends)

    def reasons_against(self, inputs: CoreInputs) -> dict[str, list[str]]:
        """Why each backend does not run these tensors; no reasons for the one that does, and for
        those behind it.
        """
        mask = self._without_padding(inputs).mask
        batch, queries = inputs.q.shape[:2]
        selected = self.select(mask, batch, queries)
        names = preference_order(self.signature)
        reason = f"the layer names {selected}" if self.is_named_by_caller else ""
        if not (batch and queries and mask.keys.count):
            reason = "there is nothing to compute"
        if reason:
            return {name: [] if name == selected else [reason] for name in names}
        size = CallSize(batch, queries, 0, mask.keys.count)
        return {
            name: unsupported_reasons(name, self.signature)
            or BACKENDS[name].slower_reasons(self.signature, size, mask.shape)
            or ([] if name == selected else BACKENDS[name].mask_conflicts(self.signature, mask))
            for name in names
        }

    def select_for_size(self, size: CallSize) -> str:
        """The name of the backend for a call of this size, considering only the size."""
        if self.is_named_by_caller:
            return self.backend_names[0]
        if self.signature.is_compiling:
            # A compiled graph serves every length: a choice by length would recompile it for each.
            names = self._names_at(LONGEST, "any")
        else:
            names = self._names_at(size, contiguous_mask_shape(self.signature, size))
        return names[0] if names else self.backend_names[-1]


@dataclass(frozen=True)
class PackedDispatch:
    """Runs every sequence of packed rows on its own, in groups of similar length.

    `groups` selects a backend for each group. A backend that the caller names runs every group;
    otherwise `dense` runs groups of short sequences.
    """

    groups: CoreDispatch

    def attend(self, inputs: CoreInputs) -> Tensor:
        """Per-head outputs o_BTRV."""
        plan = varlen.group_plan(inputs.mask)
        outputs = list[Tensor]()
        for group in varlen.group_inputs(plan, inputs):
            backend = BACKENDS[self._select_for_group(group)]
            outputs.append(backend.attend(self.groups.signature, group))
        return plan.queries.scatter_groups(outputs).unflatten(0, inputs.q.shape[:2])

    def _select_for_group(self, group: CoreInputs) -> str:
        name = self.groups.select(group.mask, *group.q.shape[:2])
        longest = max(group.mask.queries.count, group.mask.keys.count)
        short = longest <= MAX_DENSE_LENGTH and self.groups.signature.device == "cpu"
        if short and name in SLOWER_THAN_DENSE_IF_SHORT and not self.groups.is_named_by_caller:
            return "dense"
        return name


def make_dispatch(call: CallSignature, backend_name: str | None = None) -> CoreDispatch:
    """Return the backends that support a call, or the named one; raise if there is none."""
    check_backend_name(backend_name)
    refusals = {}
    supported = []
    for name in [backend_name] if backend_name else preference_order(call):
        reasons = unsupported_reasons(name, call)
        if reasons:
            refusals[name] = reasons
        else:
            supported.append(name)
            if name == "dense" or (name == "linear" and call.has_recurrent_state):
                break  # it runs any tensors at any size, so those behind it are never reached
    if not supported:
        raise NoBackend(_refusal(refusals, backend_name is not None))
    return CoreDispatch(call, tuple(supported), backend_name is not None)


def choose_backend(call: CallSignature, size: CallSize | None = None) -> ModuleType:
    """Return the backend of a call; without a size, the preferred one."""
    dispatch = make_dispatch(call)
    return BACKENDS[dispatch.backend_names[0] if size is None else dispatch.select_for_size(size)]


def check_backend_name(name: str | None) -> None:
    """Raise NoBackend for an unknown backend name."""
    if name is not None and name not in BACKENDS:
        raise NoBackend(f"there is no backend {name!r}; {suggest(str(name), BACKENDS)}")


def preference_order(call: CallSignature) -> list[str]:
    """Return all backend names, preferred first."""
    last: list[str] = []  # even behind `dense`
    if not bf16_matmul.is_preferred(call):
        last.append("bf16_matmul")
    if call.device == "cpu":  # it compiles for seconds, and then computes every score
        last.append("flex")
    names = [name for name in BACKENDS if name not in last] + last
    if flex.is_preferred(call):
        names.remove("flex")
        names.insert(names.index("block_sparse"), "flex")
    return names


def unsupported_reasons_by_backend(call: CallSignature) -> dict[str, list[str]]:
    """The reasons of every backend not to support a call, in order of preference; an empty list
    means that it does.
    """
    return {name: unsupported_reasons(name, call) for name in preference_order(call)}


def unsupported_reasons(name: str, call: CallSignature) -> list[str]:
    """The reasons of one backend not to support a call; an empty list means that it does."""
    if isinstance(call.pattern, PerHead) and name not in MASK_PER_HEAD_BACKENDS:
        return ["runs heads with one pattern, and these have several"]
    return list(dict.fromkeys(BACKENDS[name].unsupported_reasons(call)))


def slower_reasons_by_backend(call: CallSignature, size: CallSize) -> dict[str, list[str]]:
    """Why another backend is preferred for a call of this size, for every backend."""
    shape = contiguous_mask_shape(call, size)
    return {name: backend.slower_reasons(call, size, shape) for name, backend in BACKENDS.items()}


def never_preferred_reasons(name: str, call: CallSignature) -> list[str]:
    """Why a backend is not preferred at any size on this machine; empty if it
    is from some size on.
    """
    size = replace(LONGEST, queries=1) if call.single_query else LONGEST
    return BACKENDS[name].slower_reasons(call, size, "any")


def backends_by_length(call: CallSignature) -> list[tuple[int, str]]:
    """Return pairs (least number of tokens, backend) for a call of one row as it grows longer."""
    try:
        dispatch = make_dispatch(call)
    except NoBackend:
        return []
    ranges: list[tuple[int, str]] = []
    for length in _deciding_lengths(call):
        queries = 1 if call.single_query else length
        name = dispatch.select_for_size(CallSize(1, queries, queries, length))
        if not ranges or ranges[-1][1] != name:
            ranges.append((0 if not ranges else length, name))
    return ranges


def backend_notes(name: str, call: CallSignature) -> list[str]:
    """Properties of this backend that concern this call only."""
    return chunked_attention.notes(call) if BACKENDS[name] is chunked_attention else []


def reads_cache_in_place(backend_name: str, call: CallSignature) -> bool:
    """True if a backend reads a cache in its storage format.

    Other backends receive full-precision tensors.
    """
    return backend_name == "paged" or (
        backend_name == "ragged" and ragged_decode.reads_quantized_cache(call)
    )


def recomputed_flops(
    backend: ModuleType, call: CallSignature, size: CallSize, core_flops: int
) -> int:
    """How many of the core's FLOPs a backend executes once more in the backward pass, on scores
    that it did not keep.

    Fused kernels keep none (2205.14135), and `chunked` keeps none of a call that it cut into
    blocks.
    """
    if backend in (dense, linear_attention) or (
        backend is chunked_attention and size.queries <= QUERY_BLOCK_SIZE
    ):
        return 0
    if backend is bf16_matmul and bf16_matmul.saves_weights_for_backward(size.keys):
        return 0
    scores = call.core.score_dim * len(call.core.key_head_of_query)
    values = call.core.vdim * len(call.core.value_head_of_row)
    return core_flops * scores // (scores + values)


def contiguous_mask_shape(call: CallSignature, size: CallSize) -> str:
    """The `AttentionMask.shape` if queries are the last keys, or come from another sequence."""
    pattern = call.pattern
    if size.keys > MAX_COUNTED_KEYS:
        first, last = pattern.retention
        return (
            "triangle" if last is not None and first + last >= size.keys == size.queries else "any"
        )
    start = max(size.keys - size.queries, 0) if call.spec.source is None else 0
    queries = range(start, start + size.queries)
    keys = range(size.keys)
    return mask_shape(pattern, queries, keys, count_pairs_by_head(pattern, queries, keys)[0])


def _deciding_lengths(call: CallSignature) -> list[int]:
    first, last = call.pattern.retention
    sizes = [crossover_size(point) + (point in UP_TO_CROSSOVERS) for point in POINTS_IN_KEYS]
    per_token = ragged_decode.bytes_per_token(call)
    if per_token:
        sizes.append(ragged_decode.min_bytes(call) / per_token)
    lengths = {1, *(math.ceil(size) for size in sizes if 0 < size < math.inf)}
    return sorted(lengths | {first + last + 1} if last is not None else lengths)


def _refusal(reasons_by_backend: dict[str, list[str]], is_named: bool) -> str:
    listed = "; ".join(
        f"{name}: {', '.join(reasons)}" for name, reasons in reasons_by_backend.items()
    )
    if is_named:
        return f"the requested backend does not support this call: {listed}"
    return f"no backend supports this call: {listed}"
