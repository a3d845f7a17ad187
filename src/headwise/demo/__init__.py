"""`headwise demo`: one spec and all that follows from it, then a translator that learns, and is made smaller."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import costs
from ..backends.backend_report import why
from ..masking import patterns
from ..nn.attention import Attention
from ..nn.op_trace import walk
from ..presets import from_toml
from ..spec.attention_spec import AttentionSpec
from . import soft_lookup

if TYPE_CHECKING:
    from ..training import Recipe
    from .translator_compression import TrainingDemo

# Every layer is described like this; what it does not say is the usual choice.
SPEC_TOML = """\
model = 512
pattern = "window(5) | first(2)"
heads = {q = 8, kv = 2, dim = 64}
modifiers = [{part = "Rotary"}, {part = "HeadGate"}]"""
TOKENS = 16
TERMINAL_WIDTH = 80


class CacheProof(NamedTuple):
    """The largest difference between a layer run token by token from a cache, and in one pass."""

    dtype: str
    tokens: int
    slots: int
    largest: float
    of: float


def demo_spec() -> AttentionSpec:
    """The spec of the demo."""
    return from_toml(SPEC_TOML)


def num_cache_slots(one: AttentionSpec) -> int:
    """The tokens that its pattern still reads."""
    first, last = one.pattern.retention
    assert last is not None, "the demo shows a pattern that forgets"
    return first + last


def check_cached_decode(dtype: torch.dtype, tokens: int = 40) -> CacheProof:
    """Decode one by one, run all at once, compare.

    >>> check_cached_decode(torch.float64, tokens=9).largest < 1e-12
    True
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = Attention(demo_spec()).to(dtype).eval()
        x_BTD = torch.randn(2, tokens, layer.spec.model, dtype=dtype)
        cache = layer.cache(batch=2, capacity=tokens)
        steps = [layer(x_BTD[:, t : t + 1], cache=cache) for t in range(tokens)]
        whole = layer(x_BTD)
    largest = (torch.cat(steps, 1) - whole).abs().max().item()
    return CacheProof(
        str(dtype).removeprefix("torch."), tokens, num_cache_slots(layer.spec), largest, whole.abs().max().item()
    )


def format_spec() -> str:
    """The spec as text, and as the Python that makes the same."""
    return "\n".join([SPEC_TOML, "", *textwrap.wrap(repr(demo_spec()), TERMINAL_WIDTH, subsequent_indent="    ")])


def format_costs() -> str:
    """What the spec costs, each number with the product it comes from."""
    one, tokens = demo_spec(), TOKENS
    shapes, core, heads = one.shapes(), one.core, one.heads
    work = costs.self_attention_work(one, batch=1, queries=tokens)
    lines = [
        f"{name:<18}{param.layout!s:<18}{' x '.join(map(str, shapes[name])):<12}"
        + ("" if param.trainable else "  constant")
        for name, param in one.params().items()
    ]
    inner = f"({len(core.key_head_of_query)} x {core.dim} + {len(core.value_head_of_row)} x {core.vdim})"
    entry = " + ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in one.kv_entry_shapes().items())
    numbers, kept = costs.cached_numbers_per_token(one), num_cache_slots(one)
    core_flops = core.flops(work.pairs)
    return "\n".join(
        [
            *(line.rstrip() for line in lines),
            "",
            f"parameters      {costs.count_parameters(one):>12,}  all of the above but constants",
            f"flops, core     {core_flops:>12,}  2 x {work.pairs} pairs x {inner}",
            f"flops, asked    {costs.required_flops(one, work):>12,}  the core, and 2 x parameters x {tokens} tokens",
            f"flops, counted  {costs.counted_flops(one, work):>12,}  as if all {tokens} x {tokens} pairs were allowed",
            f"cache           {4 * numbers:>12,}  bytes a token, float32: 4 x ({entry})",
            f"cache, at most  {4 * numbers * kept:>12,}  bytes a row: the pattern keeps {kept} tokens",
            f"as plain heads  {8 * heads.q * heads.dim:>12,}  bytes a token, had each head keys of its own",
        ]
    )


def format_cache_checks() -> str:
    """The proof in two precisions, said in words."""
    rows = [
        f"{found.dtype:<9}{found.largest:.1e} of {found.of:.2f}   {found.tokens} tokens in {found.slots} slots"
        for found in (check_cached_decode(torch.float32), check_cached_decode(torch.float64))
    ]
    head = ["Token by token from a cache, and all at once: the largest difference between", "the two outputs.", ""]
    return "\n".join([*head, *rows])


def list_pages(training_demo: TrainingDemo | None = None) -> Iterator[tuple[str, Callable[[], str]]]:
    """The pages in order: a title, and what makes the page in its turn; without a `story` nothing is trained."""
    yield "Soft look-up", soft_lookup.format_lookup
    yield "One layer, described", format_spec
    yield "What it costs", format_costs
    yield "Who may read whom", lambda: patterns.draw_pattern(demo_spec().pattern, TOKENS, TOKENS)
    yield "Every step it takes", lambda: str(walk(demo_spec(), batch=5, tokens=10))
    yield "What runs it", lambda: str(why(demo_spec()))
    yield "A proof in passing", format_cache_checks
    if training_demo is not None:
        yield from training_demo.pages()


def _make_training_demo(out: Path | None, recipe: Recipe | None) -> TrainingDemo | None:
    """What is trained in the folder `out`, if there is one."""
    from .translator_compression import TrainingDemo

    return None if out is None else TrainingDemo(out, recipe)


def recipe_with_steps(steps: int) -> Recipe:
    """The translator's recipe with another number of steps."""
    from .translator import RECIPE

    return replace(RECIPE, steps=steps)


def run_demo(
    show: Callable[[str], None],
    title: Callable[[str], None],
    out: Path | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Show every page as soon as it is made; the translator is trained in the folder `out`, with a report of it all."""
    story, shown = _make_training_demo(out, recipe), list[tuple[str, str]]()
    for number, (name, make) in enumerate(list_pages(story), 1):
        title(f"{f'── {number}  {name} ':─<{TERMINAL_WIDTH}}")
        shown.append((name, make()))
        show(shown[-1][1] + "\n")
    if story is not None:
        show(f"All of it on one page: {story.report(shown)}")


def demo_data(out: Path | None = None, recipe: Recipe | None = None) -> dict[str, Any]:
    """All numbers of the demo as plain values."""
    one = demo_spec()
    work = costs.self_attention_work(one, batch=1, queries=TOKENS)
    story = _make_training_demo(out, recipe)
    return ({} if story is None else story.data) | {
        "lookup": [asdict(found) for found in soft_lookup.look_up_by_all_methods()],
        "spec": SPEC_TOML,
        "counts": {
            "parameters": costs.count_parameters(one),
            "flops_asked": costs.required_flops(one, work),
            "flops_counted": costs.counted_flops(one, work),
            "cache_bytes_per_token": 4 * costs.cached_numbers_per_token(one),
        },
        "walk": walk(one).to_dict,
        "why": why(one).data,
        "proof": [check_cached_decode(dtype)._asdict() for dtype in (torch.float32, torch.float64)],
    }
