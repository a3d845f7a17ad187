"""Attentions of anybody's: a module that knows how many heads it has, and the projection of what they say.

What enters that projection is what heads say, side by side. While somebody watches, the projection's class looks at its
input first. Weights are overheard while the attention runs, and told only where what they read of values is that input,
number by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...site import Ability
from ..watching import Core, Reading, Stand, Watcher, changed, watchers
from . import forwards
from .banded import banded, is_banded
from .base import Found, Route
from .hearing import Ear, Heard
from .places import HEADS, Sizes, number, site

# What authors call the projection behind the heads, the usual names first; a dot leads to a neighbour's child.
NAMES = (
    "out_proj", "o_proj", "c_proj", "dense", "out_lin", "wo", "o", "proj", "to_out", "fc_out", "linear_out", "out",
    "to_out.0", "output", "^output.dense", "^attention_output.dense", "^output.out_proj", "^output",
)  # fmt: skip
COMPARES = ("softmax", "scaled_dot_product_attention")
BLIND = Ability(False, "its code names no softmax, so that nothing says its weights")
OTHERWISE = "what enters its projection is not what its weights read of values"


class Own(NamedTuple):
    """What somebody says of an attention: how many heads it has, and what its output projection is called."""

    heads: int
    out: str


_DECLARED: WeakKeyDictionary[nn.Module, Own] = WeakKeyDictionary()
_HEADS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of a projection
_LAST: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()  # the projection of an attention


def declare(module: nn.Module, *, heads: int, out: str) -> None:
    """Say that a module is an attention of so many heads, whose output projection is its child `out`.

    >>> import headwise as hw
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
    >>> net = nn.Sequential(Mine())
    >>> hw.declare(net[0], heads=3, out="last")
    >>> [(site.name, site.q, site.dim) for site in hw.sites(net)]
    [('model.0.attention', 3, 2)]
    """
    children = dict(module.named_modules())
    if out not in children or not width(children[out]):
        raise ValueError(f"{type(module).__name__} has no projection {out!r}; name a child that is an nn.Linear")
    if not isinstance(heads, int) or heads < 1 or width(children[out]) % heads:
        raise ValueError(f"{width(children[out])} numbers do not divide among {heads} heads; give another number")
    _DECLARED[module] = Own(heads, out)


def declared(module: nn.Module) -> bool:
    """Whether somebody said of this module that it is an attention."""
    return module in _DECLARED


class Projection(Route):
    """Modules that were declared, or that are called attention and whose projection is found by its name."""

    def find(self, model: nn.Module) -> Iterator[Found]:
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            own = _DECLARED.get(module) or _guessed(path, module, modules)
            if own is None:
                continue
            last = modules[_path(path, own.out)]
            _HEADS[last], _LAST[module] = own.heads, last
            forwards.give(last, _saying)
            forwards.give(module, _attending)
            sizes = Sizes(own.heads, own.heads, width(last) // own.heads)
            see = forwards.reached(module) if _compares(module) else BLIND
            yield Found(site(path, module, sizes, see=see, silence=forwards.reached(last)), last, self)

    def stands(self) -> list[Stand]:
        return [*forwards.stands(_saying), *forwards.stands(_attending)]


def _guessed(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> Own | None:
    """What the names in a module say it is; its projection is a child, or stands beside it as BERT has it."""
    if "Attention" not in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
        return None
    heads = number(module, HEADS)
    if not heads:
        return None
    around = modules.get(path.rpartition(".")[0])
    for out in NAMES:
        if out.startswith("^") and "Attention" not in type(around).__name__:
            continue  # what stands beside it may be a feed-forward's
        last = modules.get(_path(path, out))
        if last is not None and width(last) and width(last) % heads == 0:
            return Own(heads, out)
    return None


def _path(path: str, out: str) -> str:
    parent = path.rpartition(".")[0] if out.startswith("^") else path
    return f"{parent}.{out.removeprefix('^')}".removeprefix(".")


def width(module: nn.Module) -> int:
    """How many numbers a projection reads; 0 of what is none."""
    said = getattr(module, "in_features", None)  # of nn.Linear, and of what takes its place
    if isinstance(said, int):
        return said
    inner = getattr(module, "base_layer", None)  # of what wraps it
    if isinstance(inner, nn.Module):
        return width(inner)
    weight = getattr(module, "weight", None)
    # transformers keeps GPT-2's maps the other way round
    return weight.shape[0] if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) else 0


def _compares(module: nn.Module) -> bool:
    """Whether the code of a module, or of one within it, names what makes weights."""
    codes = [
        getattr(one, "__code__", None)
        for part in module.modules()
        for kind in type(part).__mro__
        if kind.__module__.partition(".")[0] != "torch"
        for one in vars(kind).values()
    ]
    named = any(name in COMPARES for code in codes if code is not None for name in code.co_names)
    return named or any(type(part).__name__.lower() in COMPARES for part in module.modules())


class Listening:
    """What is overheard of one attention while it runs: the comparison whose heads say what is told in the end."""

    def __init__(self, last: nn.Module) -> None:
        self.last, self.heard = last, list[Heard]()
        self.seers = [watcher for watcher in watchers(last) if watcher.wants_core]
        self.done = False

    def told(self, heard: Heard) -> None:
        """Something was compared."""
        self.heard.append(heard)

    def tell(self, z_BTHV: Tensor) -> None:
        """Heads said this: tell who wants to see by which weights, once."""
        if self.done:
            return
        self.done = True
        core = next((heard.core for heard in reversed(self.heard) if heard.core and _is(heard.z_BTHV, z_BTHV)), None)
        if core is None:
            core = Unsaid(next((heard.why for heard in self.heard if heard.why), OTHERWISE))
        _tell(self.seers, core)


_LISTENING: ContextVar[Listening | None] = ContextVar("listening", default=None)


class Unsaid:
    """What an attention worked with, where it was not understood: whatever is asked is refused with the reason."""

    told = stands = None

    def __init__(self, why: str) -> None:
        self.why = why

    def rows(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Refused."""
        return self.every(queries)

    def every(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Refused."""
        raise ValueError(f"its weights are not known: {self.why}")

    def allowed(self, queries: slice = slice(None)) -> Tensor:
        """Refused."""
        return self.every(queries)

    def reading(self, head: int) -> Reading:
        """Refused."""
        raise ValueError(f"its weights are not known: {self.why}")


def _tell(those: list[Watcher], core: Core) -> None:
    for watcher in those:
        watcher.core(core)


def _is(z_BTHV: Tensor | None, other: Tensor) -> bool:
    return z_BTHV is not None and z_BTHV.shape == other.shape and torch.equal(z_BTHV.to(other.dtype), other)


def _attending(module: nn.Module, run: forwards.Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of an attention; somebody may want to see what it compares."""
    last = _LAST[module]
    listening = Listening(last)
    if not listening.seers:
        return run(*args, **kwargs)
    if is_banded(module):
        result, core = banded(module, run, args, kwargs)
        _tell(listening.seers, core)
        return result
    token = _LISTENING.set(listening)
    try:
        with Ear(listening.told, _HEADS[last]):
            result = run(*args, **kwargs)
    finally:
        _LISTENING.reset(token)
    z = result[0] if isinstance(result, tuple) else result
    if isinstance(z, Tensor) and z.shape[-1] == width(last):  # its projection stands beside it
        listening.tell(_by_head(z, last))
    return result


def _saying(last: nn.Module, run: forwards.Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a projection: what enters it is what heads say."""
    those = watchers(last)
    if not those:
        return run(*args, **kwargs)
    z_BTHV = _by_head(args[0], last)
    listening = _LISTENING.get()
    if listening is not None and listening.last is last:
        listening.tell(z_BTHV)
    return run(changed(those, z_BTHV).reshape(args[0].shape), *args[1:], **kwargs)


def _by_head(z: Tensor, last: nn.Module) -> Tensor:
    """[B, T, heads, width] of what enters a projection, whose tokens may lie on two axes, or rows on none."""
    return z.reshape(z.shape[0] if z.dim() > 2 else 1, -1, _HEADS[last], z.shape[-1] // _HEADS[last])
