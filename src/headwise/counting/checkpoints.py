"""FLOPs that checkpoints cost: what the way back computes anew; and gradients under a fused kernel.

torch's checkpoint stops as soon as everything that is needed is there again. So the last product of a region is not
run twice, unless something behind it is kept: what a norm reads, or the mask of a dropout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..blueprint import BlockSpec, FeedForwardSpec, ExpertsSpec, ModelSpec
from ..errors import SpecError, suggest
from ..seams import Modifier, ValueStep
from ..spec import AttentionSpec
from ..terms import Phase, CallSize
from . import bills
from .bills import CostBreakdown, CostTerm
from .keeping import CHECKPOINT_MODES
from .nets import DEFAULT_SETTINGS, ActivationSettings, stack_workload

if TYPE_CHECKING:
    from .pricing import Workload

CORE_PHASES = (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES)
SCORE_TERM, VALUE_TERM = "core (scores)", "core (values)"


def layer_recompute_flops(spec: AttentionSpec, work: CallSize, checkpoint: str) -> CostBreakdown:
    """FLOPs of one layer that are done again on the way back: "block" all but the last product, "core" the scores.

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.CallSize(1, 5, 5, 5)
    >>> [term.name for term in layer_recompute_flops(spec, work, "block").terms]
    ['project.q', 'project.k', 'project.v', 'core (scores)', 'core (values)']
    >>> layer_recompute_flops(spec, work, "core").total  # 2 s t d
    400
    """
    _check_checkpoint_mode(checkpoint)
    if checkpoint == "none":
        return CostBreakdown(())
    forth = bills.forward_flops(spec, work).terms
    if checkpoint == "core":
        if steps := [name for name, _ in spec.parts_of(ValueStep)]:
            raise SpecError(f"{steps[0]} reads behind the values, half of it last; use checkpoint='block' or 'none'")
        return CostBreakdown(tuple(term for term in forth if _is_recomputed_in_core(spec, term)))
    return CostBreakdown(tuple(term for term in forth if not term.name.startswith("output.")))


def recompute_flops(spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS) -> CostBreakdown:
    """FLOPs of a layer or a whole model that are done again, every pair of tokens, as torch counts them.

    Embeddings, the last norm and heads never are.

    >>> import headwise as hw
    >>> gpt = hw.families.read({"model_type": "gpt2", "n_layer": 3})
    >>> block = 24 * 2 * 10 * 768**2 + 4 * 2 * 10**2 * 768  # 24 b s h^2 + 4 b s^2 h
    >>> recompute_flops(gpt, hw.Workload(2, 10), ActivationSettings(checkpoint="block")).total == 3 * (block - 8 * 2 * 10 * 768**2)
    True
    """
    if isinstance(spec_or_model, AttentionSpec):
        return layer_recompute_flops(spec_or_model, _full_work(workload, (spec_or_model.source and settings.source) or workload.context), settings.checkpoint)
    found: dict[str, tuple[str, int]] = {}
    for stack in spec_or_model.stacks:
        told = stack_workload(spec_or_model, stack, workload, settings)
        for block, times in Counter(stack.layers).items():
            for name, formula, flops in _block_recompute_items(block, stack.model, told, settings):
                where, (text, value) = f"{stack.name}.*.{name}", found.get(f"{stack.name}.*.{name}", ("", 0))
                found[where] = " + ".join(filter(None, [text, f"{times} ({formula})"])), value + times * flops
    return CostBreakdown(tuple(CostTerm(name, *told) for name, told in found.items()))


def fused_backward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """FLOPs behind gradients when a fused kernel reads the values: it forms the scores once more, 5 products on 4.

    2 b q s t (3 dim + 2 vdim) of the core (flash attention, 2205.14135), where plain operations have 4 (dim + vdim):

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.CallSize(1, 5, 5, 5)
    >>> fused_backward_flops(spec, work).total - bills.backward(spec, work).total == 2 * 2 * 5 * 5 * 4
    True
    """
    times = {SCORE_TERM: 3, VALUE_TERM: 2}
    rest = [term for term in bills.backward_flops(spec, work).terms if term.name not in times]
    core = [term for term in bills.forward_flops(spec, work).terms if term.name in times]
    return CostBreakdown((*rest, *(CostTerm(t.name, f"{times[t.name]} ({t.formula})", times[t.name] * t.value) for t in core)))


def _check_checkpoint_mode(checkpoint: str) -> None:
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}")


def _is_recomputed_in_core(spec: AttentionSpec, term: CostTerm) -> bool:
    """Whether a product is made between queries, keys and values and what is read of them, and is not the last.

    Of a similarity, products with constants are features, made of queries and keys before they meet.
    """
    if term.name == SCORE_TERM:
        return True
    if term.name == "similarity (with constants)":
        return False
    inside = {name for name, step in spec.parts_of(Modifier) if step.phase in CORE_PHASES} | {"similarity", "normaliser"}
    owner, _, param = term.name.replace(" ", ".").partition(".")
    met = spec.params().get(f"{owner}.{param}")
    return owner in inside and (met is None or met.applied == "query")


def _block_recompute_items(described: BlockSpec, model: int, load: Workload, way: ActivationSettings) -> Iterator[CostTerm]:
    """What one block does again, each branch under its name."""
    branches = [*described.attention_specs, *(["feed"] if described.feed else [])]
    for name in branches if way.checkpoint != "none" else ():
        whole = name != branches[-1] or bool(way.dropout) or described.placement in ("post", "after", "sandwich")
        for term in _branch_recompute_items(name, described, model, (load, way), whole):
            yield term._replace(name=f"{name}.{term.name}")


def _branch_recompute_items(name: str, described: BlockSpec, model: int, how: tuple[Workload, ActivationSettings], whole: bool) -> Iterable[CostTerm]:
    """All products of a branch, or all but the last one."""
    load, way = how
    if name == "feed":
        if way.checkpoint == "core" or described.feed is None:
            return ()
        products = list(feed_forward_products(described.feed, model, load.batch * load.context))
        last = isinstance(described.feed, FeedForwardSpec) or described.feed.shared
        return products if whole or not last else products[:-1]
    spec = described.attention_specs[name]
    work = _full_work(load, (way.source if name == "cross" else None) or load.context)
    if way.checkpoint == "block" and whole:
        return bills.forward_flops(spec, work).terms
    return layer_recompute_flops(spec, work, way.checkpoint).terms


def _full_work(load: Workload, keys: int) -> CallSize:
    return CallSize(load.batch, load.context, keys, keys)


def feed_forward_products(feed: FeedForwardSpec | ExpertsSpec, model: int, count: int) -> Iterator[CostTerm]:
    """FLOPs of a feed-forward on so many tokens, product by product, the last one last.

    >>> [term.value for term in feed_forward_products(FeedForwardSpec(32), 8, 10)]  # 2 tokens d f each
    [5120, 5120]
    """
    if isinstance(feed, ExpertsSpec):
        yield CostTerm("router", f"2 {count} {feed.count} {model}", 2 * count * feed.count * model)
        yield from (t._replace(name=f"each.{t.name}") for t in feed_forward_products(feed.each, model, count * feed.active))
        if feed.shared:
            yield from (t._replace(name=f"shared.{t.name}") for t in feed_forward_products(feed.shared, model, count))
        return
    for name in sorted(feed.matrix_layouts, key="down".__eq__):
        yield CostTerm(name, f"2 {count} {feed.hidden} {model}", 2 * count * feed.hidden * model)
