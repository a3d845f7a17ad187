"""`headwise demo`: one spec and all that follows from it, then a translator that learns, and is made smaller."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import counting, pattern
from ..module import Attention
from ..presets import from_toml
from ..reasons import why
from ..spec import AttentionSpec
from ..steps import walk
from . import lookup

if TYPE_CHECKING:
    from ..training import Recipe
    from .story import Story

# Every layer is described like this; what it does not say is the usual choice.
TEXT = """\
model = 512
pattern = "window(5) | first(2)"
heads = {q = 8, kv = 2, dim = 64}
modifiers = [{part = "Rotary"}, {part = "HeadGate"}]"""
TOKENS = 16
WIDTH = 80


class Proof(NamedTuple):
    """The largest difference between a layer run token by token from a cache, and in one pass."""

    dtype: str
    tokens: int
    slots: int
    largest: float
    of: float


def spec() -> AttentionSpec:
    """The spec of the demo."""
    return from_toml(TEXT)


def slots(one: AttentionSpec) -> int:
    """The tokens that its pattern still reads."""
    first, last = one.pattern.memory
    assert last is not None, "the demo shows a pattern that forgets"
    return first + last


def proof(dtype: torch.dtype, tokens: int = 40) -> Proof:
    """Decode one by one, run all at once, compare.

    >>> proof(torch.float64, tokens=9).largest < 1e-12
    True
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = Attention(spec()).to(dtype).eval()
        x_BTD = torch.randn(2, tokens, layer.spec.model, dtype=dtype)
        cache = layer.cache(batch=2, capacity=tokens)
        steps = [layer(x_BTD[:, t : t + 1], cache=cache) for t in range(tokens)]
        whole = layer(x_BTD)
    largest = (torch.cat(steps, 1) - whole).abs().max().item()
    return Proof(str(dtype).removeprefix("torch."), tokens, slots(layer.spec), largest, whole.abs().max().item())


def described() -> str:
    """The spec as text, and as the Python that makes the same."""
    return "\n".join([TEXT, "", *textwrap.wrap(repr(spec()), WIDTH, subsequent_indent="    ")])


def counts() -> str:
    """What the spec costs, each number with the product it comes from."""
    one, tokens = spec(), TOKENS
    shapes, core, heads = one.shapes(), one.core, one.heads
    work = counting.work_of(one, batch=1, queries=tokens)
    lines = [
        f"{name:<18}{param.layout!s:<18}{' x '.join(map(str, shapes[name])):<12}"
        + ("" if param.learned else "  constant")
        for name, param in one.params().items()
    ]
    inner = f"({len(core.keys)} x {core.dim} + {len(core.values)} x {core.vdim})"
    entry = " + ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in one.entry().items())
    numbers, kept = counting.cache_numbers(one), slots(one)
    core_flops = core.flops(work.pairs)
    return "\n".join(
        [
            *(line.rstrip() for line in lines),
            "",
            f"parameters      {counting.params(one):>12,}  all of the above but constants",
            f"flops, core     {core_flops:>12,}  2 x {work.pairs} pairs x {inner}",
            f"flops, asked    {counting.asked(one, work):>12,}  the core, and 2 x parameters x {tokens} tokens",
            f"flops, counted  {counting.counted(one, work):>12,}  as if all {tokens} x {tokens} pairs were allowed",
            f"cache           {4 * numbers:>12,}  bytes a token, float32: 4 x ({entry})",
            f"cache, at most  {4 * numbers * kept:>12,}  bytes a row: the pattern keeps {kept} tokens",
            f"as plain heads  {8 * heads.q * heads.dim:>12,}  bytes a token, had each head keys of its own",
        ]
    )


def proofs() -> str:
    """The proof in two precisions, said in words."""
    rows = [
        f"{found.dtype:<9}{found.largest:.1e} of {found.of:.2f}   {found.tokens} tokens in {found.slots} slots"
        for found in (proof(torch.float32), proof(torch.float64))
    ]
    head = ["Token by token from a cache, and all at once: the largest difference between", "the two outputs.", ""]
    return "\n".join([*head, *rows])


def pages(story: Story | None = None) -> Iterator[tuple[str, Callable[[], str]]]:
    """The pages in order: a title, and what makes the page in its turn; without a `story` nothing is trained."""
    yield "Soft look-up", lookup.page
    yield "One layer, described", described
    yield "What it costs", counts
    yield "Who may read whom", lambda: pattern.draw(spec().pattern, TOKENS, TOKENS)
    yield "Every step it takes", lambda: str(walk(spec(), batch=5, tokens=10))
    yield "What runs it", lambda: str(why(spec()))
    yield "A proof in passing", proofs
    if story is not None:
        yield from story.pages()


def _story(out: Path | None, recipe: Recipe | None) -> Story | None:
    """What is trained in the folder `out`, if there is one."""
    from .story import Story

    return None if out is None else Story(out, recipe)


def shorter(steps: int) -> Recipe:
    """The translator's recipe with another number of steps."""
    from .translator import RECIPE

    return replace(RECIPE, steps=steps)


def run(
    show: Callable[[str], None],
    title: Callable[[str], None],
    out: Path | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Show every page as soon as it is made; the translator is trained in the folder `out`, with a report of it all."""
    story, shown = _story(out, recipe), list[tuple[str, str]]()
    for number, (name, make) in enumerate(pages(story), 1):
        title(f"{f'── {number}  {name} ':─<{WIDTH}}")
        shown.append((name, make()))
        show(shown[-1][1] + "\n")
    if story is not None:
        show(f"All of it on one page: {story.report(shown)}")


def data(out: Path | None = None, recipe: Recipe | None = None) -> dict[str, Any]:
    """All numbers of the demo as plain values."""
    one = spec()
    work = counting.work_of(one, batch=1, queries=TOKENS)
    story = _story(out, recipe)
    return ({} if story is None else story.data) | {
        "lookup": [asdict(found) for found in lookup.answers()],
        "spec": TEXT,
        "counts": {
            "parameters": counting.params(one),
            "flops_asked": counting.asked(one, work),
            "flops_counted": counting.counted(one, work),
            "cache_bytes_per_token": 4 * counting.cache_numbers(one),
        },
        "walk": walk(one).data,
        "why": why(one).data,
        "proof": [proof(dtype)._asdict() for dtype in (torch.float32, torch.float64)],
    }
