"""How much is asked, the calls that it comes to, and their totals as backends and torch's counter have them."""

from __future__ import annotations

from dataclasses import dataclass

from ..blueprint import Model
from ..errors import SpecError
from ..spec import AttentionSpec
from .devices import Device, bytes_of
from .reading import Call, On, Reader
from .scopes import check_placed, fixed, longest
from .whole import Described, Piece

LARGEST = 2**62  # tokens, rows: beyond it nobody can mean what they say


@dataclass(frozen=True)
class Load:
    """How much is asked: rows, tokens of each, precision, and the machine.

    `source` is how many tokens cross-attention reads, for a model as many as `context` unless said; `generate` how many
    tokens are written behind a prompt of `context`.
    """

    batch: int = 1
    context: int = 2048
    dtype: str = "bf16"
    device: str = "h200"
    source: int | None = None
    generate: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("source", 1), ("generate", 0)):
            size = getattr(self, name)
            if not (name == "source" and size is None) and (type(size) is not int or not least <= size <= LARGEST):
                raise SpecError(f"{name}={size!r} is no load; give a whole number from {least} to {LARGEST}")
        bytes_of(self.dtype)
        Device.named(self.device)

    @property
    def held(self) -> int:
        """Tokens of a row that are remembered at the end: the last one written is read by nobody."""
        return self.context + max(self.generate - 1, 0)


Calls = dict[str, tuple[list[Piece], Call]]


def calls_of(described: Described, every: list[Piece], load: Load, name: str) -> Calls:
    """Every call that is priced, with the pieces that run in it."""
    whole, late = _whole(described, load), [piece for piece in every if not piece.early]
    calls = {"prefill": (every, whole)}
    readers = [piece for piece in late if isinstance(piece, Reader)]
    decodes = all(piece.decodes for piece in readers) and (isinstance(described, AttentionSpec) or not _seen(described))
    if decodes:
        calls["decode"] = (late, whole._replace(tokens=1, past=load.context - 1, way="steps"))
    if load.generate and not decodes:
        raise SpecError(f"{name or 'this'} reads ahead and cannot write token by token; price it without generate")
    if load.generate:
        steps = whole._replace(tokens=load.generate - 1, past=load.context, way="steps")
        calls |= {"prompt": (every, whole._replace(way="prompt")), "steps": (late, steps)}
    return calls


def _whole(described: Described, load: Load) -> Call:
    """All tokens at once: those of the load, or of an image."""
    most, source = longest(described), load.source or load.context
    if isinstance(described, AttentionSpec):
        check_placed(described)
        if described.source is not None and load.source is None:
            told = f"source={described.source} is the width of a sequence of a length that no load says"
            raise SpecError(f"{told}; give its tokens, as in Load(source=512) or --source 512")
        images: list[int | None] = [None, None]
    else:
        images = [None, *fixed(described)][-2:]
        source = min(source, most.source or source) if load.source is None else source
    if most.own is not None and load.held > most.own:
        fewer = max(most.own - load.held + load.context, 1)
        raise SpecError(f"{load.held} tokens are more than the {most.own} that have positions; give context={fewer}")
    if most.source is not None and source > most.source:
        fact = f"{source} tokens of the source are more than the {most.source} that have positions"
        raise SpecError(f"{fact}; give source={most.source}")
    return Call(load.batch, images[1] or load.context, source=images[0] or source)


def _seen(model: Model) -> bool:
    """Whether it looks at images alone."""
    return fixed(model)[-1] is not None


def spent(calls: Calls, on: On) -> dict[str, int]:
    """What backends execute in each call."""
    every, whole = calls["prefill"]
    ahead = {phase: sum(p.times * p.spent(call, on) for p in some) for phase, (some, call) in calls.items()}
    return {"prefill": ahead.pop("prefill"), "backward": sum(p.times * p.spent_back(whole, on) for p in every), **ahead}


def counted(calls: Calls) -> dict[str, int | None]:
    """What torch's counter sees in each call; None where it cannot."""
    found: dict[str, int | None] = {}
    for phase, (some, call) in calls.items():
        seen = [(piece.times, piece.counted(call)) for piece in some]
        blind = any(each is None for _, each in seen)
        ways = {"prefill": (1, 1), "backward": (1, 2)} if phase == "prefill" else {phase: (1, 1)}
        for way, factors in ways.items():
            total = sum(n * sum(factors[one.factors - 1] * one.flops for one in each or ()) for n, each in seen)
            found[way] = None if blind else total
    return found
