"""Names of layers and heads: one grammar for commands, calls and traces, and one way to print them.

A head is L0H3, 0.3, 0:3 or SITE:HEAD; L is any layer, E the encoder, D the self-attention of the
decoder, X the cross-attention, and layer -1 the last. Several heads of a layer are 0:1,3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from ..util.errors import suggest

SHORT_LAYER = re.compile(r"([LEDX]?)(-?\d+)")
SHORT_HEADS = re.compile(r"([LEDX]?-?\d+)(?: ?H|[.:])(\d+(?:,\d+)*)")
SITE_HEADS = re.compile(r"(.*[^:\d.-].*):(\d+(?:,\d+)*)")
HEAD_EXAMPLES = "L3H2 (E, D or X for encoder, decoder and cross-attention), 3.2 or SITE:HEAD"


class Layer(Protocol):
    """A site of a model, or a layer of a trace."""

    @property
    def name(self) -> str: ...
    @property
    def stack(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def layer(self) -> int: ...


LayerT = TypeVar("LayerT", bound=Layer)


def parse_heads(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the layer and the numbers in the name of one or several heads of a layer.

    >>> parse_heads("L0H3"), parse_heads("-1:1,3"), parse_heads("decoder.1.cross:3")
    (('L0', (3,)), ('-1', (1, 3)), ('decoder.1.cross', (3,)))
    """
    match = SHORT_HEADS.fullmatch(str(name)) or SITE_HEADS.fullmatch(str(name))
    if match is None:
        raise ValueError(f"{name!r} is not a head; write {HEAD_EXAMPLES}")
    return match[1], tuple(map(int, match[2].split(",")))


def find_layer(which: str | int, layers: Iterable[LayerT], owner: str) -> LayerT:
    """Return the layer of this name or number of a model or a trace, which errors call `owner`.

    >>> from types import SimpleNamespace as Site
    >>> cross = Site(name="decoder.1.cross", stack="decoder", kind="cross", layer=1)
    >>> find_layer("X1", [cross], "the model").name, find_layer(-1, [cross], "the model").name
    ('decoder.1.cross', 'decoder.1.cross')
    """
    layers = list(layers)
    for layer in layers:
        if layer.name == which:
            return layer
    match = SHORT_LAYER.fullmatch(str(which))
    if match is None:
        remedy = suggest(str(which), [layer.name for layer in layers])
        raise ValueError(f"{owner} has no site {which!r}; {remedy}")
    of_kind = [layer for layer in layers if match[1] in ("", "L", _letter(layer.stack, layer.kind))]
    numbers = sorted({layer.layer for layer in of_kind})
    number = int(match[2])
    if -len(numbers) <= number < 0:
        number = numbers[number]
    matches = [layer for layer in of_kind if layer.layer == number]
    if not matches:
        remedy = f"its layers are {numbers[0]}..{numbers[-1]}" if numbers else "use another letter"
        raise ValueError(f"{owner} has no layer {which}; {remedy}")
    if len(matches) > 1:
        names = ", ".join(layer.name for layer in matches)
        raise ValueError(f"{owner} has several sites at layer {which}: {names}; give its name")
    return matches[0]


def locate_head(name: str, layers: Iterable[Any], owner: str = "the model") -> tuple[str, int]:
    """Return the site and the number of the one head that a name means."""
    place, heads = parse_heads(name)
    if len(heads) != 1:
        raise ValueError(f"{name!r} is {len(heads)} heads; give one, such as {place}:{heads[0]}")
    layer = find_layer(place, layers, owner)
    check_head(layer.name, heads[0], getattr(layer, "heads", 0))
    return layer.name, heads[0]


def check_head(site: str, head: int, num_heads: int) -> None:
    """Raise unless a site has this head; `num_heads` is 0 if it is unknown."""
    if head < 0 or 0 < num_heads <= head:
        raise ValueError(f"{site} has no head {head}; give heads in 0..{max(num_heads - 1, 0)}")


def print_head(site: str, head: int, sites: Sequence[str]) -> str:
    """Return the short name of a head of a model with these sites; SITE:HEAD if it has none.

    >>> print_head("decoder.0.attention", 3, ["decoder.0.attention", "decoder.1.attention"])
    'L0H3'
    >>> print_head("decoder.0.cross", 3, ["decoder.0.attention", "decoder.0.cross"])
    'X0H3'
    """
    places = [name.rsplit(".", 2) for name in sites]
    if all(len(place) == 3 and place[1].isdecimal() for place in places):
        is_single = len({(stack, kind) for stack, _, kind in places}) == 1
        names = [f"{'L' if is_single else _letter(one[0], one[2])}{one[1]}" for one in places]
        name = names[sites.index(site)]
        if names.count(name) == 1:
            return f"{name}H{head}"
    return f"{site}:{head}"


def _letter(stack: str, kind: str) -> str:
    return "X" if kind == "cross" else "E" if stack == "encoder" else "D"
