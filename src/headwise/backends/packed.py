"""Texts that lie one behind the other in a row, each by itself.

Plain attention of short texts on a CPU is one kernel, which reads tokens where they lie. Anything else runs in groups
of about one length, each a batch of its own for any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.orders import transformed
from ..kernels.texts import COMPILER, texts
from ..parts.softmax import Softmax
from ..pattern import Causal, Full
from ..probe import Probe
from ..seams import ScoreStep
from ..tokens import Sight, Tokens
from . import banded, dense, halves, sdpa, tiled
from .bound import Bound
from .job import Inputs, Job

SLACK = 0.25  # of the pairs that are read, as many more may be formed so that texts of two lengths share a call
SPARE = 4096  # pairs that are formed in less time than another call takes
SHOWN = frozenset({"q", "k", "v", "heads"})  # what can be seen of texts that run apart
SHORT = 32  # tokens of a text, up to which plain operations take less time on a CPU than a fused call for each head
LONGEST = 256  # tokens of a text, up to which the kernel takes less time than fused calls for groups
WHOLE = (torch.float32, torch.float64)  # what it computes in; what is coarser is widened
HELD = 4  # plans of one set of tokens: of a text that reads itself, and a source, each for the kernel and in groups
Ints = NDArray[np.int64]
Places = tuple[Tensor, Tensor, Tensor | None, int]


class Slots(NamedTuple):
    """Where tokens of rows go when texts are put into groups: `of[slot]` is the token there, `to[n]` the slot of the
    n-th live token, `live` which these are unless it is every one, of `count`. What a slot too many holds is the first
    token of its text, which nobody reads there."""

    of: Tensor
    to: Tensor
    live: Tensor | None
    count: int
    shapes: tuple[tuple[int, int], ...]  # of each group: texts, tokens

    def taken(self, x: Tensor) -> list[Tensor]:
        """x [B, T, ...] as [texts, tokens, ...] of each group."""
        slots = cast(Tensor, _Take.apply(x.flatten(0, 1), *self[:4]))
        parts = slots.split([texts * tokens for texts, tokens in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def put(self, groups: Sequence[Tensor]) -> Tensor:
        """Tokens [B x T, ...] again; zeros where there is none."""
        return cast(Tensor, _Put.apply(torch.cat([group.flatten(0, 1) for group in groups]), *self[:4]))


class _Take(torch.autograd.Function):
    """Every slot takes its token; backwards a token has the gradient of its own slot alone, for no other is read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *places: *Places) -> Tensor:
        ctx.places = places
        return x.index_select(0, places[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return cast(Tensor, _Put.apply(grads[0], *ctx.places)), None, None, None, None


class _Put(torch.autograd.Function):
    """Every live token takes its slot; backwards a slot that is none's has no gradient."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, *places: *Places) -> Tensor:
        _, to, live, count = places
        ctx.places, ctx.slots = places, slots.shape
        found = slots.index_select(0, to)
        return found if live is None else found.new_zeros(count, *found.shape[1:]).index_copy_(0, live, found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, to, live, _ = ctx.places
        grad = grads[0] if live is None else grads[0].index_select(0, live)
        return grad.new_zeros(ctx.slots).index_copy_(0, to, grad), None, None, None, None


class Plan(NamedTuple):
    """The groups of one call: who asks and who is told in each, and where tokens go."""

    groups: tuple[tuple[Tokens, Tokens], ...]
    queries: Slots
    keys: Slots


def apart(at: Tokens, told: Tokens | None, rows: int) -> bool:
    """Whether the texts of such a call are known apart: of queries, and of the keys they read, in each of the rows."""
    known = [tokens.lengths for tokens in (at, told) if tokens is not None]
    return (
        told is not None
        and not transformed()
        and all(one is not None and len(one) == rows and sum(map(sum, one)) for one in known)
    )


def longest(tokens: Tokens) -> int:
    """The tokens of the longest text."""
    return max((length for row in tokens.lengths or () for length in row), default=0)


class Where(NamedTuple):
    """For the kernel: the first query of each text, how many there are, its first key, how many; the most of them."""

    table: Tensor
    longest: int


class Runner(NamedTuple):
    """What runs a call whose texts are apart: the kernel, unless one of them is longer than `whole`; else groups, by a
    backend's function or, up to a length that is `short`, plain operations.

    A function and not its module: a layer that holds one can be copied.
    """

    run: Callable[..., Tensor]
    short: int
    whole: int

    @staticmethod
    def of(backend: ModuleType, job: Job, only: str | None) -> Runner:
        """With the backend alone where the caller insists on it, or another than a fused one was chosen."""
        fused = only is None and job.device == "cpu" and backend in (sdpa, halves, tiled, banded)
        whole = LONGEST if fused and backend is not banded and _is_plain(job) else -1
        return Runner(backend.attend, SHORT if fused else 0, whole)

    def attend(self, job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
        """Per-head outputs o_BTHV."""
        if self.whole >= 0 and (where := placed(sight)).longest <= self.whole:
            return _whole(sight, inputs, where)
        plan, o = planned(sight), list[Tensor]()
        for (asks, told), own in zip(plan.groups, _apart(plan, inputs, bound), strict=True):
            run = dense.attend if max(asks.count, told.count) <= self.short else self.run
            o.append(run(job, Sight(asks, told, sight.pattern), own, bound, None))
        return plan.queries.put(o).unflatten(0, inputs.q.shape[:2])


def _is_plain(job: Job) -> bool:
    """Whether the kernel says all that the fused call would: nothing is added to scores, and key heads are read by
    equally many neighbours."""
    spec = job.spec
    adds = any(isinstance(part, ScoreStep) for _, part in spec.parts())
    known = job.groups > 0 and isinstance(spec.normaliser, Softmax) and spec.pattern in (Full(), Causal())
    return COMPILER and known and not adds


def _whole(sight: Sight, inputs: Inputs, where: Where) -> Tensor:
    """All texts in one call of the kernel."""
    exact = inputs.q.dtype if inputs.q.dtype in WHOLE else torch.float32
    qkv = [t.flatten(0, 1).to(exact) for t in inputs[:3]]
    o = texts(qkv, *where, sight.pattern == Causal(), inputs.asked.scale)
    return o.to(inputs.v.dtype).unflatten(0, inputs.q.shape[:2])


def _apart(plan: Plan, inputs: Inputs, bound: Bound) -> Iterator[Inputs]:
    """What each group is handed: beside q, k and v only what some part will ask for."""
    q, k, v, asked, entry, state, gates = inputs
    asks = bool(bound.scores or bound.weights)
    own = [plan.queries.taken(q), plan.keys.taken(k), plan.keys.taken(v)]
    before = own[0] if asked.q_BTHK is q or not asks else plan.queries.taken(asked.q_BTHK)
    x = plan.queries.taken(asked.x_BTD) if asks else before
    kept = {name: plan.keys.taken(held) for name, held in entry.items()} if asks else {}
    opened = [plan.queries.taken(gate.detach()) if gate.dim() > 3 else [gate] * len(plan.groups) for gate in gates]
    for n, (at, _) in enumerate(plan.groups):
        told = asked._replace(x_BTD=x[n], q_BTHK=before[n], at=at)
        beside = {name: held[n] for name, held in kept.items()}
        yield Inputs(own[0][n], own[1][n], own[2][n], told, beside, state, [gate[n] for gate in opened])


def planned(sight: Sight) -> Plan:
    """The plan of a call in groups, made once for all layers that are told the same tokens."""
    ahead = sight.pattern.opening != 0
    return _once(sight, f"groups, {ahead}", lambda: _planned(sight.queries, sight.keys, ahead))


def placed(sight: Sight) -> Where:
    """The plan of a call of the kernel, made once as well."""
    return _once(sight, "where", lambda: _placed(sight.queries, sight.keys))


def _once(sight: Sight, kind: str, make: Callable[[], Any]) -> Any:
    at, told = sight.queries, sight.keys
    other = None if told is at else told  # of itself none: no cycle
    for source, known, plan in at.plans:
        if source is other and known == kind:
            return plan
    plan = make()
    at.plans[:] = [(other, kind, plan), *at.plans[: HELD - 1]]
    return plan


def _placed(at: Tokens, told: Tokens) -> Where:
    (asks, first), (keys, begin) = _texts(at), _texts(told, at)
    own = np.stack([first, asks, begin, keys], 1)[asks > 0]
    return Where(torch.from_numpy(own), int(own[:, 1::2].max(initial=0)))


def _planned(at: Tokens, told: Tokens, ahead: bool) -> Plan:
    asks, keys = _texts(at), _texts(told, at)
    chosen = [np.array(group) for group in grouped(asks[0].tolist(), keys[0].tolist())]
    device, itself, groups = at.position.device, told is at, list[tuple[Tokens, Tokens]]()
    for own in chosen:
        queries = Tokens.run(0, int(asks[0][own].max()), device)
        lengths = keys[0][own]
        longest = max(1, int(lengths.max()))
        # A key too many stands behind all that are real, where who never looks ahead does not see it.
        if (lengths == longest).all() or (itself and not ahead):
            groups.append((queries, queries if itself else Tokens.run(0, longest, device)))
        else:
            place = torch.arange(longest)[None]
            live = place < torch.from_numpy(lengths)[:, None]
            groups.append((queries, Tokens(place.expand(live.shape), live.long() - 1, checked=True).to(device)))
    slots = _slots(asks, chosen, at)
    return Plan(tuple(groups), slots, slots if itself else _slots(keys, chosen, told))


def _texts(tokens: Tokens, like: Tokens | None = None) -> tuple[Ints, Ints]:
    """The length of every text, and which token of all rows it begins with; as many in each row as another has."""
    assert tokens.lengths is not None
    wanted = tokens.lengths if like is None or like.lengths is None else like.lengths
    lengths, begins = list[int](), list[int]()
    for n, (row, other) in enumerate(zip(tokens.lengths, wanted, strict=True)):
        row = (*row, *[0] * len(other))[: len(other)]
        lengths += row
        begins += [n * tokens.count + before for before in accumulate(row, initial=0)][: len(row)]
    return np.array(lengths, np.int64), np.array(begins, np.int64)


def grouped(asks: Sequence[int], keys: Sequence[int]) -> Iterator[list[int]]:
    """Texts that share a call, as long as little is formed that nobody reads: the longest first, none without queries.

    >>> list(grouped([900, 100, 899, 0], [900, 100, 899, 5]))
    [[0, 2], [1]]
    """
    own, wide, deep, read = list[int](), 0, 0, 0
    for n in sorted(range(len(asks)), key=lambda n: (-asks[n], -keys[n])):
        if not asks[n]:
            continue
        wider, more = max(wide, asks[n]), read + asks[n] * keys[n]
        deeper = max(deep, keys[n], 1)
        if own and (len(own) + 1) * wider * deeper - more > max(SPARE, SLACK * more):
            yield own
            own, wider, deeper, more = [], asks[n], max(keys[n], 1), asks[n] * keys[n]
        own, wide, deep, read = [*own, n], wider, deeper, more
    if own:
        yield own


def _slots(texts: tuple[Ints, Ints], chosen: Sequence[Ints], tokens: Tokens) -> Slots:
    lengths, begins = texts
    of, live, slots, shapes, at = list[Ints](), list[Ints](), list[Ints](), list[tuple[int, int]](), 0
    total = len(tokens.position) * tokens.count
    for own in chosen:
        longest = max(1, int(lengths[own].max()))
        first, place = begins[own][:, None], np.arange(longest)[None]
        real = place < lengths[own][:, None]
        those = np.where(real, first + place, np.minimum(first, total - 1))
        of.append(those.ravel())
        live.append(those[real])
        slots.append(at + np.flatnonzero(real))
        shapes.append((len(own), longest))
        at += those.size
    which = np.concatenate(live)
    order = np.argsort(which)
    every = None if len(which) == total else torch.from_numpy(which[order]).to(tokens.position.device)
    there, back = (torch.from_numpy(np.concatenate(one)) for one in (of, slots))
    device = tokens.position.device
    return Slots(there.to(device), back[torch.from_numpy(order)].to(device), every, total, tuple(shapes))
