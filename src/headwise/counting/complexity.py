"""Attention beside the layers that it took the place of: work, what waits for what, and paths, counted."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..backends.linear import CHUNK
from ..errors import SpecError
from ..presets import design
from ..spec import AttentionSpec
from . import params
from .along import FARTHEST, asked_flops
from .breakeven import spans
from .calls import Load
from .costs import WIDTH, short
from .symbols import Symbol, formula

# What is often said otherwise.
NOTES = (
    "What stays constant as rows grow is how much of self-attention is serial, and how far it is from token to token; "
    "not its work: 4 n^2 d for scores and values, the larger share beyond n = 2 d, and 8 n d^2 for four projections, "
    "which a table of orders leaves out.",
    "Nor do orders tell which costs less: a GRU of 12 n d^2 is dearer than self-attention up to n = d, a plain "
    "recurrence never.",
    "A convolution is computed at all positions at once, as attention is; range costs it depth, not time.",
    "A recurrent layer reads any distance in form; what limits it is how often its gradient is multiplied.",
)
HEAD = ("", "parameters", "FLOP", "serial", "path", "   order", "dearer")


@dataclass(frozen=True)
class Sizes:
    """A layer's surroundings: n tokens of width d; h heads, a kernel of k tokens, a window of r."""

    tokens: int
    model: int
    heads: int = 8
    kernel: int = 3
    window: int = 64

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("model", 1), ("heads", 1), ("kernel", 2), ("window", 2)):
            size = getattr(self, name)
            if type(size) is not int or not least <= size <= FARTHEST:
                raise SpecError(f"{name}={size!r} compares nothing; give a whole number from {least} to {FARTHEST}")


class Layer(NamedTuple):
    """One layer: learned numbers, FLOPs and how they come about, and what Table 1 of 1706.03762 tells of it.

    `serial` operations must be done one after another, however many processors there are. `path` is how often such a
    layer is applied, in time or in depth, until the last token knows of the first. `dearer` is the length from which
    self-attention asks for more FLOPs, or None where it never does.
    """

    name: str
    parameters: int
    flops: int
    formula: str
    order: str
    serial: int
    path: int
    dearer: int | None


@dataclass(frozen=True)
class Complexity:
    """Layers of one width over rows of one length."""

    sizes: Sizes
    layers: tuple[Layer, ...]

    @staticmethod
    def of(sizes: Sizes) -> Complexity:
        """Every layer of these sizes.

        >>> for layer in Complexity.of(Sizes(tokens=1000, model=64, window=10)).layers[:4]:
        ...     print(layer.name, layer.formula, layer.serial, layer.path, layer.dearer)
        self-attention 8 n d^2 + 4 n^2 d 1 1 None
        in a window 8 n d^2 + 4 d pairs[window(10)] 1 111 2
        linear 8 n d^2 + sums over tokens 8 1 131
        recurrent 4 n d^2 1000 1000 1
        """
        known: dict[int, int] = {}

        def attention(tokens: int) -> int:
            if tokens not in known:
                known[tokens] = KINDS["self-attention"].flops(sizes, Symbol.of(tokens, "n"))
            return known[tokens]

        return Complexity(sizes, tuple(kind.layer(name, sizes, attention) for name, kind in KINDS.items()))

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"sizes": asdict(self.sizes), "layers": [layer._asdict() for layer in self.layers], "notes": list(NOTES)}

    def __str__(self) -> str:
        told = "One layer of width d = {model:,}, n = {tokens:,} tokens, k = {kernel:,}, r = {window:,}, h = {heads:,}"
        lines = [*textwrap.wrap(told.format(**asdict(self.sizes)), WIDTH), "", _row(*HEAD)]
        for layer in self.layers:
            cells = (short(size) for size in (layer.parameters, layer.flops, layer.serial, layer.path))
            since = "never" if layer.dearer is None else f"n={layer.dearer:,}"
            lines.append(_row(layer.name, *cells, f"   {layer.order}", "" if layer is self.layers[0] else since))
        ends = (
            "Serial: operations one after another. Path: layers, or moments, from the first token to the last. Dearer: "
            "the length from which self-attention is."
        )
        return "\n".join([*lines, "", *(line for note in (ends, *NOTES) for line in textwrap.wrap(note, WIDTH))])


def _row(name: str, *cells: str) -> str:
    wide = (19, 10, 10, 8, 8, 16, 9)
    signs = ("<", ">", ">", ">", ">", "<", ">")
    return "".join(f"{cell:{sign}{n}}" for cell, sign, n in zip((name, *cells), signs, wide, strict=True)).rstrip()


@dataclass(frozen=True)
class _Kind:
    """A kind of layer: its order, serial, path, learned numbers, and FLOPs of so many tokens."""

    order: str
    serial: Callable[[Sizes], int]
    path: Callable[[Sizes], int]
    parameters: Callable[[Sizes], int]
    flops: Callable[[Sizes, Symbol], int]

    def layer(self, name: str, sizes: Sizes, attention: Callable[[int], int]) -> Layer:
        flops = self.flops(sizes, Symbol.of(sizes.tokens, "n"))
        counts = self.parameters(sizes), int(flops), formula(flops), self.order, self.serial(sizes), self.path(sizes)
        dearer = spans(lambda n: attention(n) > self.flops(sizes, Symbol.of(n, "n")), FARTHEST)
        return Layer(name, *counts, dearer[-1].first if dearer and dearer[-1].last is None else None)


def attentions(sizes: Sizes) -> dict[str, AttentionSpec]:
    """The layers of the table that a spec describes.

    >>> attentions(Sizes(tokens=9, model=64, window=5))["in a window"].pattern
    Window(keys=5)
    """
    return {
        "self-attention": design(model=sizes.model, heads=sizes.heads),
        "in a window": design(model=sizes.model, heads=sizes.heads, pattern=f"window({sizes.window})"),
        "linear": design(preset="linear", model=sizes.model, heads=sizes.heads),
    }


def _attention(name: str, order: str, told: str, serial: Callable[[Sizes], int], path: Callable[[Sizes], int]) -> _Kind:
    def flops(sizes: Sizes, n: Symbol) -> int:
        asked = asked_flops(attentions(sizes)[name], Load(context=int(n)))
        return Symbol.of(asked, told.format(r=sizes.window), loose="sum")

    return _Kind(order, serial, path, lambda sizes: params(attentions(sizes)[name]), flops)


def _recurrent(gates: int) -> _Kind:
    """A state of d numbers: each gate multiplies the token and the state, and has two biases, as torch's have."""

    def flops(sizes: Sizes, n: Symbol) -> int:
        return 4 * gates * n * Symbol.of(sizes.model, "d") ** 2

    def parameters(sizes: Sizes) -> int:
        return gates * (2 * sizes.model**2 + 2 * sizes.model)

    return _Kind("n d^2", _each, _each, parameters, flops)


def _convolution(path: Callable[[Sizes], int]) -> _Kind:
    """k matrices, each for the token so many places back, and a bias."""

    def flops(sizes: Sizes, n: Symbol) -> int:
        return 2 * Symbol.of(sizes.kernel, "k") * n * Symbol.of(sizes.model, "d") ** 2

    def parameters(sizes: Sizes) -> int:
        return sizes.kernel * sizes.model**2 + sizes.model

    return _Kind("k n d^2", _one, path, parameters, flops)


def _separable(sizes: Sizes, n: Symbol) -> int:
    d = Symbol.of(sizes.model, "d")
    return 2 * Symbol.of(sizes.kernel, "k") * n * d + 2 * n * d**2


def _one(sizes: Sizes) -> int:
    return 1


def _each(sizes: Sizes) -> int:
    return sizes.tokens


def _chunks(sizes: Sizes) -> int:
    """Each chunk of tokens waits for the state of those before it."""
    return -(-sizes.tokens // CHUNK)


def _reaching(back: int, tokens: int) -> int:
    """Layers that each reach so far back, until the last token knows of the first."""
    return max(-(-(tokens - 1) // back), 1)


def _dilated(sizes: Sizes) -> int:
    """Layers whose gaps grow by a factor of k: together k^layers tokens, the own included."""
    layers, reached = 1, sizes.kernel
    while reached < sizes.tokens:
        layers, reached = layers + 1, reached * sizes.kernel
    return layers


def _contiguous(sizes: Sizes) -> int:
    return _reaching(sizes.kernel - 1, sizes.tokens)


KINDS = {
    "self-attention": _attention("self-attention", "n^2 d", "8 n d^2 + 4 n^2 d", _one, _one),
    "in a window": _attention(
        "in a window", "r n d", "8 n d^2 + 4 d pairs[window({r})]", _one,
        lambda sizes: _reaching(sizes.window - 1, sizes.tokens),
    ),
    "linear": _attention("linear", "n d^2 / h", "8 n d^2 + sums over tokens", _chunks, _one),
    "recurrent": _recurrent(1),
    "GRU": _recurrent(3),
    "LSTM": _recurrent(4),
    "convolution": _convolution(_contiguous),
    "dilated convolution": _convolution(_dilated),
    "separable conv.": _Kind(
        "k n d + n d^2", _one, _contiguous,
        lambda sizes: sizes.model * (sizes.kernel + 1) + sizes.model * (sizes.model + 1), _separable,
    ),
}  # fmt: skip
