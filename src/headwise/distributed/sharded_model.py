"""The way from a batch to what a model says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data import Batch
from ..errors import SpecError
from ..model_spec import ModelSpec
from ..models import Transformer, build
from .collectives import Buckets, Wire
from .context_parallel import check_rows, part_of
from .head_partition import portions
from .launch import Launch
from .parallel_attention import Ranks, set_peers
from .parallelism import Share, Spread
from .ranks import WORK, World


class Path(nn.Module):
    """A model from what it reads to what its first head says, in one call: tensors that are put together for a call
    are there inside and let go behind it.

    `hidden` is how it comes to its states, compiled or not.
    """

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        self.net, self.hidden = net, net.hidden

    def forward(self, batch: Batch, index: Tensor | None = None) -> Tensor:
        """[B, T, outputs] or [B, outputs]; [1, n, outputs] of the n states that `index` names among all rows'."""
        h = self.hidden(batch.x, tokens=batch.tokens, source=batch.source, source_tokens=batch.source_tokens)
        if index is not None:
            h = h.flatten(0, 1).index_select(0, index)[None]
        return self.net.read(h, tokens=batch.tokens)


# SECTION: What one rank holds of a model, and how it becomes one with what the others hold.


class Lying(Protocol):
    """How one tensor lies over ranks, of which each holds a part."""

    @property
    def ways(self) -> tuple[str, ...]:
        """Over which ways of the spread."""
        ...

    def part(self, whole: Tensor) -> Tensor:
        """What this rank holds of the whole."""
        ...

    def whole(self, part: Tensor) -> Tensor:
        """All parts put together; every rank must ask."""
        ...

    def square(self, part: Tensor) -> Tensor:
        """The sum of its squares, each number shared by as many ranks of these ways as hold it."""
        ...


def _nothing() -> None:
    """Gradients are where they are wanted."""


@dataclass(eq=False)
class Holding:
    """A model as far as a rank holds it.

    `own` are its learned tensors by the names of the description, whole, or a part where `lying` says how; the
    optimiser sees nothing else. Calls go by `path`; `fetch` brings gradients to `own`.
    """

    path: Path
    world: World
    own: Mapping[str, nn.Parameter]
    summed: Buckets
    described: ModelSpec
    lying: Mapping[str, Lying] = field(default_factory=dict[str, "Lying"])
    fetch: Callable[[], None] = _nothing
    context: Wire | None = None

    @property
    def net(self) -> Transformer:
        """The model itself."""
        return self.path.net

    def share(self, batch: Batch) -> Share:
        """What this rank learns from of a batch that all of them have: some of the rows, and of these some tokens."""
        rows = self.world.share(batch, "data", "shards")
        return rows if self.context is None else rows._replace(batch=part_of(rows.batch, self.context))

    # --- gradients ---

    def arm(self) -> None:
        """The next way back is the last one of this step."""
        self.summed.arm()

    def finish(self) -> None:
        """Bring the gradients of all ranks together, each where it is held."""
        self.summed.finish()
        self.fetch()

    def norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        if not self.lying:
            return nn.utils.get_total_norm([p.grad for p in self.own.values() if p.grad is not None])
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for name, parameter in self.own.items():
            if parameter.grad is not None:
                grad, lying = parameter.grad.double(), self.lying.get(name)
                total += (lying.square(grad) if lying else grad.square().sum()) / self._copies(name)
        dist.all_reduce(total)
        exact = torch.promote_types(torch.float32, next(iter(self.own.values())).dtype)
        return total.sqrt().to(exact)

    def clip(self, most: float, norm: Tensor) -> None:
        """Shorten a gradient of this norm to at most so much."""
        nn.utils.clip_grads_with_norm_(self.own.values(), most, norm)

    def _copies(self, name: str) -> int:
        """How many ranks hold the same numbers of a tensor."""
        parts = 1
        for way in self.lying[name].ways if name in self.lying else ():
            parts *= getattr(self.world.spread, way)
        return self.world.size // parts

    # --- whole tensors ---

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, whole, by its name; every rank must ask for all."""
        for name, tensor in self.net.state_dict().items():
            yield name, self.whole(name, self.own[name].detach() if name in self.own else tensor)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """What is held of something with the shape of a tensor, put together; a single number is the same for all."""
        return self.lying[name].whole(part) if name in self.lying and part.dim() else part

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of such a thing."""
        return self.lying[name].part(whole) if name in self.lying and whole.dim() else whole

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take every tensor of the model from whole ones."""
        rest = {name: tensor for name, tensor in tensors.items() if name not in self.lying}
        self.net.load_state_dict(rest, strict=not self.lying)
        constants = dict(self.net.named_buffers())
        with torch.no_grad():
            for name in self.lying:
                held = self.own[name] if name in self.own else constants[name]
                held.copy_(self.part(name, tensors[name]))

    def gathered(self) -> Transformer:
        """The whole model as it is now, on the leader; every rank must ask, and the others have what they had."""
        if not self.lying:
            return self.net
        tensors = {name: tensor.cpu() for name, tensor in self.tensors() if self.world.leads}
        return self.assembled(tensors) if self.world.leads else self.net

    def assembled(self, tensors: Mapping[str, Tensor]) -> Transformer:
        """A model that is whole on this rank, with these weights: the one in hand if nobody else has to do with it."""
        if not self.lying and self.context is None:
            self.net.load_state_dict(tensors)
            return self.net
        with torch.device("meta"):
            net = build(self.described, dropout=self.net.dropout)
        net.load_state_dict(tensors, assign=True)
        net.usage = self.net.usage
        return net.to(self.world.device)


def alone(net: Transformer, device: torch.device | str = "cpu") -> Holding:
    """A whole model that no other rank has to do with."""
    return Holding(Path(net), World(Launch(), Spread(), device), _learned(net), Buckets((), None), net.described)


def hold(net: Transformer, world: World) -> Holding:
    """What this rank is to hold of a model that all ranks have whole; the rest of it is let go."""
    check_divides(net.described, world.spread)
    wires = {way: Wire(world.group(way)) for way in ("context", "tensor") if getattr(world.spread, way) > 1}
    if "tensor" in wires:
        from .tensor_parallel import Divided

        divided = Divided(net.described, wires["tensor"])
        holding = divided.holding(_held(divided.portion(net), world))
    else:
        holding = _held(net, world)
    if wires:
        set_peers(holding.net, Ranks(wires.get("tensor"), wires.get("context")))
    return replace(holding, context=wires.get("context"))


def check_divides(described: ModelSpec, spread: Spread) -> None:
    """Refuse a model that cannot be divided so, before anything is built."""
    if min(spread.data, spread.context, spread.shards) > 1:
        raise SpecError(f"{spread}: FSDP2 shares slices with ranks of one more way; leave out data= or context=")
    if spread.context > 1:
        check_rows(described)
    if spread.tensor > 1:
        portions(described, spread.tensor)


def _held(net: Transformer, world: World) -> Holding:
    """With whom work is shared is not asked here."""
    if world.spread.shards > 1:
        from .fsdp import sharded

        return sharded(net, world)
    learned = _learned(net)
    return Holding(Path(net), world, learned, Buckets(learned.values(), working(world)), net.described)


def working(world: World) -> dist.ProcessGroup | None:
    """Those that work on something else each, so that gradients are summed over them; None for one alone."""
    return world.group(*WORK) if world.workers > 1 else None


def _learned(net: Transformer) -> dict[str, nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}
