"""Formulas that others publish, beside ours: what each says of a model, and why the two are not the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import SpecError, nearest
from ..spec import AttentionSpec
from .devices import bytes_of
from .optimisers import Optimiser
from .pricing import Price


class Sizes(NamedTuple):
    """What published formulas speak of: layers l, width h, heads a of d channels, V tokens, b rows of s, n written
    behind them, N parameters, t tensor-parallel ways."""

    l: int  # noqa: E741 - the letter of every such formula
    h: int
    a: int
    d: int
    V: int
    b: int
    s: int
    n: int
    N: int
    t: int


class Row(NamedTuple):
    """One formula: of what, as it is written, itself, and why ours is another number."""

    quantity: str
    formula: str
    theirs: Callable[[Sizes], int]
    why: str


@dataclass(frozen=True)
class Published:
    """Formulas of one source; `scope` is "block" where they speak of whole blocks, "layer" where of any layer."""

    name: str
    source: str
    rows: tuple[Row, ...]
    scope: str = "block"

    @staticmethod
    def named(name: str) -> Published:
        """The formulas of this name."""
        if name not in PUBLISHED:
            raise SpecError(f"no formulas are known as {name!r}; {nearest(name, PUBLISHED)}")
        return PUBLISHED[name]


class Beside(NamedTuple):
    """One published number and ours; ours is None where nothing here says it."""

    name: str
    beside: str
    quantity: str
    formula: str
    theirs: int
    ours: int | None
    why: str


def beside(price: Price, published: Published, ways: int = 8) -> Iterator[Beside]:
    """Every formula of a source with the same quantity of a price; `ways` are those of tensor parallelism."""
    sizes = _sizes(price, published, ways)
    for row in published.rows:
        theirs, ours = row.theirs(sizes), OURS[row.quantity](price)
        why = "equal" if theirs == ours else row.why
        yield Beside(price.name, published.name, row.quantity, row.formula, theirs, ours, why)


def _sizes(price: Price, published: Published, ways: int) -> Sizes:
    model, load, name = price.described, price.load, published.name
    if type(ways) is not int or ways < 1:
        raise SpecError(f"ways={ways!r} is no number of devices; give 1 or more")
    if isinstance(model, AttentionSpec):
        if published.scope == "block":
            raise SpecError(f"{name} speaks of whole blocks, and {price.name} is one attention; name a model")
        specs, layers, width, tokens = [model], 1, model.model, 0
    else:
        if len(model.stacks) > 1:
            raise SpecError(f"{name} speaks of one stack, and {price.name} has {len(model.stacks)}; name a decoder")
        stack = next(iter(model.stacks))
        specs = [block.specs["attention"] for block in stack.layers if "attention" in block.specs]
        layers, width = len(stack.layers), stack.model
        tokens = stack.embedding.tokens if stack.embedding else 0
    if not specs:
        raise SpecError(f"{name} speaks of heads, and {price.name} has none; name a model with attention")
    heads, core = specs[0].heads, specs[0].core
    written, known = load.generate, price.parameters.total
    return Sizes(layers, width, heads.q, core.dim, tokens, load.batch, price.whole.tokens, written, known, ways)


def _attention(price: Price) -> int:
    """Learned numbers of every attention."""
    alone = isinstance(price.described, AttentionSpec)
    return sum(t.value for t in price.parameters.terms if alone or ".attention." in t.name)


def _training(price: Price) -> int | None:
    ahead, back = price.counted["prefill"], price.counted["backward"]
    return None if ahead is None or back is None else ahead + back


OURS: dict[str, Callable[[Price], int | None]] = {
    "parameters": lambda price: price.parameters.total,
    "parameters of attention": _attention,
    "forward, FLOP": lambda price: price.counted["prefill"],
    "training, FLOP": _training,
    "weights, bytes": lambda price: price.parameters.total * 2,
    "training state, bytes": lambda price: price.parameters.total * Optimiser.named("zero").each,
    "activations, bytes": lambda price: price.activation_bytes,
    "cache, bytes": lambda price: price.kept_bytes * 2 // bytes_of(price.load.dtype),
}

_GPT = "a feed-forward of 4 h, biases and a key head for every head are taken for granted"
_TABLES = f"{_GPT}; positions and the last norm are left out"
_MASKS = "numbers of 2 bytes, dropout with masks of 1, and all scores kept, which a fused core does not keep"
_PASSED = "6 N counts tables that are only looked up, and no scores"


def _up(number: int, ways: int) -> int:
    """Shared among devices, the last of which may have less."""
    return -(-number // ways)


def _forward(m: Sizes) -> int:
    return m.l * (24 * m.b * m.s * m.h**2 + 4 * m.b * m.s**2 * m.h) + 2 * m.b * m.s * m.h * m.V


def _scores(m: Sizes) -> int:
    return 5 * m.a * m.b * m.s**2


def _token(m: Sizes, each: int) -> int:
    """So many bytes of every channel of every token, in all layers."""
    return m.l * each * m.b * m.s * m.h


ZHIHU = Published(
    "zhihu-624740065",
    "zhuanlan.zhihu.com/p/624740065, on the cost of decoders",
    (
        Row("parameters", "l (12 h^2 + 13 h) + V h", lambda m: m.l * (12 * m.h**2 + 13 * m.h) + m.V * m.h, _TABLES),
        Row("forward, FLOP", "l (24 b s h^2 + 4 b s^2 h) + 2 b s h V", _forward, _GPT),
        Row("training, FLOP", "3 of these", lambda m: 3 * _forward(m), _GPT),
        Row("weights, bytes", "2 N", lambda m: 2 * m.N, "16 bits each"),
        Row(
            "training state, bytes",
            "20 N",
            lambda m: 20 * m.N,
            "gradients twice, in 16 and 32 bits; ours are ZeRO's 16",
        ),
        Row("activations, bytes", "l (34 b s h + 5 b s^2 a)", lambda m: _token(m, 34) + m.l * _scores(m), _MASKS),
        Row(
            "cache, bytes",
            "4 b l h (s + n)",
            lambda m: 4 * m.b * m.l * m.h * (m.s + m.n),
            "every head keeps its keys and values, for ever; the last token written is never remembered here",
        ),
    ),
)
SEEDS = Published(
    "seeds",
    "the notes that this project began with: three projections of every head, and one of all",
    (
        Row(
            "parameters of attention",
            "l (3 a h d + h^2)",
            lambda m: m.l * (3 * m.a * m.h * m.d + m.h**2),
            "no biases, as many key heads as heads, and heads that fill the width are taken for granted",
        ),
    ),
    scope="layer",
)
PAPER = Published(
    "paper-2022",
    "Korthikanti and others, 2205.05198: bytes on each of t devices",
    (
        Row(
            "training, FLOP",
            "72 b l s h^2 (1 + s / 6 h + V / 12 h l)",
            lambda m: 3 * _forward(m),
            f"{_GPT}; what is recomputed is left out",
        ),
        *(
            Row("activations, bytes", formula, theirs, _MASKS)
            for formula, theirs in {
                "s b h l (34 + 5 a s / h)": lambda m: _token(m, 34) + m.l * _scores(m),
                "s b h l (10 + 24/t + 5 a s / h t), tensor parallel": lambda m: (
                    _token(m, 10) + _up(_token(m, 24) + m.l * _scores(m), m.t)
                ),
                "s b h l (34 + 5 a s / h) / t, and sequence parallel": lambda m: _up(
                    _token(m, 34) + m.l * _scores(m), m.t
                ),
                "s b h l (10 + 24/t), tensor parallel, cores recomputed": lambda m: (
                    _token(m, 10) + _up(_token(m, 24), m.t)
                ),
                "34 s b h l / t, both, cores recomputed": lambda m: _up(_token(m, 34), m.t),
                "2 s b h l, all recomputed": lambda m: _token(m, 2),
            }.items()
        ),
    ),
)
PALM = Published(
    "palm",
    "2204.02311, appendix B, as in nanoGPT: for each of b s tokens",
    (
        Row(
            "training, FLOP",
            "b s (6 N + 12 l a d s)",
            lambda m: m.b * m.s * (6 * m.N + 12 * m.l * m.a * m.d * m.s),
            "6 N counts biases, norms and tables that are only looked up as if they were multiplied",
        ),
    ),
    scope="layer",
)
SCALING = Published(
    "scaling-book",
    "jax-ml.github.io/scaling-book: rules of thumb for short rows",
    (
        Row("training, FLOP", "6 N b s", lambda m: 6 * m.N * m.b * m.s, _PASSED),
        Row(
            "training, FLOP", "8 N b s, blocks recomputed", lambda m: 8 * m.N * m.b * m.s, f"{_PASSED}; a third forward"
        ),
        Row("activations, bytes", "20 tensors of b s h a layer", lambda m: _token(m, 40), "a count by the thumb"),
        Row("activations, bytes", "7 of them, products kept", lambda m: _token(m, 14), "the rest is recomputed"),
        Row("activations, bytes", "1 of them, blocks recomputed", lambda m: _token(m, 2), "all is recomputed"),
    ),
)
PUBLISHED: dict[str, Published] = {one.name: one for one in (ZHIHU, SEEDS, PAPER, PALM, SCALING)}
