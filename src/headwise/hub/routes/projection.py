"""Attentions of anybody's: a module that knows how many heads it has, and the projection of what they say.

What enters that projection is what heads say, side by side. While somebody watches, the projection's class looks at its
input first. Weights cannot be seen on this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...site import Ability
from ..watching import Holding, Stand, changed, watchers
from .base import Found, Route
from .places import HEADS, Sizes, number, site

# What authors call the projection behind the heads, the usual names first; a dot leads to a neighbour's child.
NAMES = ("out_proj", "o_proj", "c_proj", "dense", "out_lin", "wo", "o", "proj", "to_out", "fc_out", "linear_out", "out")
BLIND = Ability(False, "it does not say what it compares; the model's own output_attentions shows its weights")


class Own(NamedTuple):
    """What somebody says of an attention: how many heads it has, and what its output projection is called."""

    heads: int
    out: str


_DECLARED: WeakKeyDictionary[nn.Module, Own] = WeakKeyDictionary()
_STANDS: dict[type, Stand] = {}
_HEADS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


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
    [('encoder.0.attention', 3, 2)]
    """
    children = dict(module.named_modules())
    if out not in children or not _width(children[out]):
        raise ValueError(f"{type(module).__name__} has no projection {out!r}; name a child that is an nn.Linear")
    if not isinstance(heads, int) or heads < 1 or _width(children[out]) % heads:
        raise ValueError(f"{_width(children[out])} numbers do not divide among {heads} heads; give another number")
    _DECLARED[module] = Own(heads, out)


class Projection(Route):
    """Modules that were declared, or that are called attention and whose projection is found by its name."""

    def find(self, model: nn.Module) -> Iterator[Found]:
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            own = _DECLARED.get(module) or _guessed(path, module, modules)
            if own is None:
                continue
            last = _at(path, own.out, modules)
            _HEADS[last] = own.heads
            sizes = Sizes(own.heads, own.heads, _width(last) // own.heads)
            yield Found(site(path, module, sizes, see=BLIND), last, self)

    def stands(self) -> list[Holding]:
        return [_STANDS.setdefault(kind, Stand(kind, "forward", _around)) for kind in {type(last) for last in _HEADS}]


def _guessed(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> Own | None:
    """What the names in a module say it is; its projection is a child, or stands beside it as BERT has it."""
    if "Attention" not in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
        return None
    heads = number(module, HEADS)
    if not heads:
        return None
    for out in (*NAMES, "^output.dense", "^attention_output.dense"):
        last = modules.get(_path(path, out))
        if last is not None and _width(last) and _width(last) % heads == 0:
            return Own(heads, out)
    return None


def _path(path: str, out: str) -> str:
    parent = path.rpartition(".")[0] if out.startswith("^") else path
    return f"{parent}.{out.removeprefix('^')}".removeprefix(".")


def _at(path: str, out: str, modules: dict[str, nn.Module]) -> nn.Module:
    return modules[_path(path, out)]


def _width(module: nn.Module) -> int:
    """How many numbers a projection reads; 0 of what is none."""
    if isinstance(module, nn.Linear):
        return module.in_features
    weight = getattr(module, "weight", None)
    # transformers keeps GPT-2's maps the other way round
    return weight.shape[0] if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) else 0


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, x: Tensor, *rest: Any, **more: Any) -> Any:
        those = watchers(self)
        if those:
            by_head = x.unflatten(-1, (_HEADS[self], -1))
            x = changed(those, by_head).flatten(-2)
        return original(self, x, *rest, **more)

    return forward
