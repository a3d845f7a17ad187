"""FLOPs that checkpoints cost: what the way back computes anew; and gradients under a fused kernel.

torch's checkpoint stops as soon as everything that is needed is there again. So the last product of a region is not
run twice, unless something behind it is kept: what a norm reads, or the mask of a dropout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..blueprint import Block, Dense, Experts, Model
from ..errors import SpecError, nearest
from ..seams import Modifier, ValueStep
from ..spec import AttentionSpec
from ..terms import Phase, Work
from . import bills
from .bills import Bill, Term
from .keeping import CHECKPOINTS
from .nets import PLAIN, Way, loaded

if TYPE_CHECKING:
    from .pricing import Load

INSIDE = (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES)
SCORES, VALUES = "core (scores)", "core (values)"


def recomputed(spec: AttentionSpec, work: Work, checkpoint: str) -> Bill:
    """FLOPs of one layer that are done again on the way back: "block" all but the last product, "core" the scores.

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.Work(1, 5, 5, 5)
    >>> [term.name for term in recomputed(spec, work, "block").terms]
    ['project.q', 'project.k', 'project.v', 'core (scores)', 'core (values)']
    >>> recomputed(spec, work, "core").total  # 2 s t d
    400
    """
    _known(checkpoint)
    if checkpoint == "none":
        return Bill(())
    forth = bills.forward(spec, work).terms
    if checkpoint == "core":
        if steps := [name for name, _ in spec.steps(ValueStep)]:
            raise SpecError(f"{steps[0]} reads behind the values, half of it last; use checkpoint='block' or 'none'")
        return Bill(tuple(term for term in forth if _inside(spec, term)))
    return Bill(tuple(term for term in forth if not term.name.startswith("output.")))


def recomputed_by(described: AttentionSpec | Model, load: Load, way: Way = PLAIN) -> Bill:
    """FLOPs of a layer or a whole model that are done again, every pair of tokens, as torch counts them.

    Embeddings, the last norm and heads never are.

    >>> import headwise as hw
    >>> gpt = hw.families.read({"model_type": "gpt2", "n_layer": 3})
    >>> block = 24 * 2 * 10 * 768**2 + 4 * 2 * 10**2 * 768  # 24 b s h^2 + 4 b s^2 h
    >>> recomputed_by(gpt, hw.Load(2, 10), Way(checkpoint="block")).total == 3 * (block - 8 * 2 * 10 * 768**2)
    True
    """
    if isinstance(described, AttentionSpec):
        return recomputed(described, _work(load, (described.source and way.source) or load.context), way.checkpoint)
    found: dict[str, tuple[str, int]] = {}
    for stack in described.stacks:
        told = loaded(described, stack, load, way)
        for block, times in Counter(stack.layers).items():
            for name, formula, flops in _block(block, stack.model, told, way):
                where, (text, value) = f"{stack.name}.*.{name}", found.get(f"{stack.name}.*.{name}", ("", 0))
                found[where] = " + ".join(filter(None, [text, f"{times} ({formula})"])), value + times * flops
    return Bill(tuple(Term(name, *told) for name, told in found.items()))


def fused_backward(spec: AttentionSpec, work: Work) -> Bill:
    """FLOPs behind gradients when a fused kernel reads the values: it forms the scores once more, 5 products on 4.

    2 b q s t (3 dim + 2 vdim) of the core (flash attention, 2205.14135), where plain operations have 4 (dim + vdim):

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.Work(1, 5, 5, 5)
    >>> fused_backward(spec, work).total - bills.backward(spec, work).total == 2 * 2 * 5 * 5 * 4
    True
    """
    times = {SCORES: 3, VALUES: 2}
    rest = [term for term in bills.backward(spec, work).terms if term.name not in times]
    core = [term for term in bills.forward(spec, work).terms if term.name in times]
    return Bill((*rest, *(Term(t.name, f"{times[t.name]} ({t.formula})", times[t.name] * t.value) for t in core)))


def _known(checkpoint: str) -> None:
    if checkpoint not in CHECKPOINTS:
        raise SpecError(f"checkpoint={checkpoint!r} is unknown; {nearest(checkpoint, CHECKPOINTS)}")


def _inside(spec: AttentionSpec, term: Term) -> bool:
    """Whether a product is made between queries, keys and values and what is read of them, and is not the last.

    Of a similarity, products with constants are features, made of queries and keys before they meet.
    """
    if term.name == SCORES:
        return True
    if term.name == "similarity (with constants)":
        return False
    inside = {name for name, step in spec.steps(Modifier) if step.phase in INSIDE} | {"similarity", "normaliser"}
    owner, _, param = term.name.replace(" ", ".").partition(".")
    met = spec.params().get(f"{owner}.{param}")
    return owner in inside and (met is None or met.applied == "query")


def _block(described: Block, model: int, load: Load, way: Way) -> Iterator[Term]:
    """What one block does again, each branch under its name."""
    branches = [*described.specs, *(["feed"] if described.feed else [])]
    for name in branches if way.checkpoint != "none" else ():
        whole = name != branches[-1] or bool(way.dropout) or described.placement in ("post", "after", "sandwich")
        for term in _branch(name, described, model, (load, way), whole):
            yield term._replace(name=f"{name}.{term.name}")


def _branch(name: str, described: Block, model: int, how: tuple[Load, Way], whole: bool) -> Iterable[Term]:
    """All products of a branch, or all but the last one."""
    load, way = how
    if name == "feed":
        if way.checkpoint == "core" or described.feed is None:
            return ()
        products = list(feed_products(described.feed, model, load.batch * load.context))
        last = isinstance(described.feed, Dense) or described.feed.shared
        return products if whole or not last else products[:-1]
    spec = described.specs[name]
    work = _work(load, (way.source if name == "cross" else None) or load.context)
    if way.checkpoint == "block" and whole:
        return bills.forward(spec, work).terms
    return recomputed(spec, work, way.checkpoint).terms


def _work(load: Load, keys: int) -> Work:
    return Work(load.batch, load.context, keys, keys)


def feed_products(feed: Dense | Experts, model: int, count: int) -> Iterator[Term]:
    """FLOPs of a feed-forward on so many tokens, product by product, the last one last.

    >>> [term.value for term in feed_products(Dense(32), 8, 10)]  # 2 tokens d f each
    [5120, 5120]
    """
    if isinstance(feed, Experts):
        yield Term("router", f"2 {count} {feed.count} {model}", 2 * count * feed.count * model)
        yield from (t._replace(name=f"each.{t.name}") for t in feed_products(feed.each, model, count * feed.active))
        if feed.shared:
            yield from (t._replace(name=f"shared.{t.name}") for t in feed_products(feed.shared, model, count))
        return
    for name in sorted(feed.maps, key="down".__eq__):
        yield Term(name, f"2 {count} {feed.hidden} {model}", 2 * count * feed.hidden * model)
