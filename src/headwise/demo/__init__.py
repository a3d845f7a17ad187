"""`headwise demo`: the heads of a trained translator; with --train, a translator that is trained
and compressed.

The bundled sample: `sample_tour` runs the steps, and `sample_report` draws heads as SVG and writes
the HTML file.

With --train: this module makes the pages about one layer, and `soft_lookup` introduces attention as
kernel regression. `translator` trains a small encoder-decoder model, shows which of its heads align
words, then prunes and converts it. `before_after` compares the results and writes all pages to one
HTML file.
"""

from __future__ import annotations

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
from ..translation.terminal_text import pad, rule, wrap
from . import soft_lookup

if TYPE_CHECKING:
    from ..training import Recipe
    from .translator import TrainingDemo

# Everything that a spec leaves out has a default.
SPEC_TOML = """\
model = 512
pattern = "window(5) | first(2)"
heads = {q = 8, kv = 2, dim = 64}
modifiers = [{part = "Rotary"}, {part = "HeadGate"}]"""
TOKENS = 16


class CacheProof(NamedTuple):
    """Largest difference between decoding token by token with a KV cache and
    one full forward pass.
    """

    dtype: str
    tokens: int
    slots: int
    largest: float
    of: float


def demo_spec() -> AttentionSpec:
    """Return the spec of the demo."""
    return from_toml(SPEC_TOML)


def num_cache_slots(spec: AttentionSpec) -> int:
    """Return the number of tokens that the pattern keeps in the cache."""
    first, last = spec.pattern.retention
    assert last is not None, "the demo needs a pattern with a bounded cache"
    return first + last


def check_cached_decode(dtype: torch.dtype, tokens: int = 40) -> CacheProof:
    """Compare decoding token by token with one full forward pass.

    >>> check_cached_decode(torch.float64, tokens=9).largest < 1e-12
    True
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = Attention(demo_spec()).to(dtype).eval()
        x_BTD = torch.randn(2, tokens, layer.spec.model, dtype=dtype)
        cache = layer.cache(batch=2, capacity=tokens)
        steps = [layer(x_BTD[:, t : t + 1], cache=cache) for t in range(tokens)]
        full = layer(x_BTD)
    largest = (torch.cat(steps, 1) - full).abs().max().item()
    return CacheProof(
        str(dtype).removeprefix("torch."),
        tokens,
        num_cache_slots(layer.spec),
        largest,
        full.abs().max().item(),
    )


def format_spec() -> str:
    """Format the spec as TOML and as Python."""
    return "\n".join([SPEC_TOML, "", *wrap(repr(demo_spec()), hanging="    ")])


def format_costs() -> str:
    """Format the parameters, FLOPs and cache size of the spec, each with its formula."""
    spec, tokens = demo_spec(), TOKENS
    shapes, core, heads = spec.shapes(), spec.core, spec.heads
    work = costs.self_attention_work(spec, batch=1, queries=tokens)
    lines = [
        f"{name:<18}{param.layout!s:<18}{' x '.join(map(str, shapes[name])):<12}"
        + ("" if param.trainable else f"  {'constant'}")
        for name, param in spec.params().items()
    ]
    dims = (
        f"({len(core.key_head_of_query)} x {core.dim} + {len(core.value_head_of_row)} x "
        f"{core.vdim})"
    )
    entry = " + ".join(
        f"{name} {' x '.join(map(str, shape))}" for name, shape in spec.kv_entry_shapes().items()
    )
    numbers, slots = costs.cached_numbers_per_token(spec), num_cache_slots(spec)
    rows = [
        ("parameters", costs.count_parameters(spec), "sum of the above without constants"),
        ("flops, core", core.flops(work.pairs), f"2 x {work.pairs} pairs x {dims}"),
        (
            "flops, required",
            costs.required_flops(spec, work),
            f"core + 2 x parameters x {tokens} tokens",
        ),
        ("flops, counted", costs.counted_flops(spec, work), f"with all {tokens} x {tokens} pairs"),
        ("cache", 4 * numbers, f"bytes a token, float32: 4 x ({entry})"),
        (
            "cache, at most",
            4 * numbers * slots,
            f"bytes per sequence: the pattern keeps {slots} tokens",
        ),
        (
            "cache, as MHA",
            8 * heads.q * heads.dim,
            "bytes per token, if every head had keys and values",
        ),
    ]
    return "\n".join(
        [
            *(line.rstrip() for line in lines),
            "",
            *(f"{pad(name, 16)}{number:>12,}  {text}" for name, number, text in rows),
        ]
    )


def format_cache_checks() -> str:
    """Format the comparison of cached decoding and one full pass, in two precisions."""
    rows = [
        f"{check.dtype:<9}"
        + f"{check.largest:.1e} of {check.of:.2f}   {check.tokens} tokens in {check.slots} slots"
        for check in (check_cached_decode(torch.float32), check_cached_decode(torch.float64))
    ]
    title = wrap(
        "Decoding token by token with a KV cache, compared with one full forward pass: largest "
        "difference of the "
        "outputs."
    )
    return "\n".join([*title, "", *rows])


def list_pages(
    training_demo: TrainingDemo | None = None,
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the title of every page and the function that makes it; without `training_demo` nothing
    is trained.
    """
    yield "Soft look-up", soft_lookup.format_lookup
    yield "One layer as a spec", format_spec
    yield "What it costs", format_costs
    yield "Its attention mask", lambda: patterns.draw_pattern(demo_spec().pattern, TOKENS, TOKENS)
    yield "Its tensor operations", lambda: str(walk(demo_spec(), batch=5, tokens=10))
    yield "Which backend runs it", lambda: str(why(demo_spec()))
    yield "Cached decoding is exact", format_cache_checks
    if training_demo is not None:
        yield from training_demo.pages()


def _make_training_demo(out: Path | None, recipe: Recipe | None) -> TrainingDemo | None:
    """Return the training demo in the folder `out`, or None without a folder."""
    from .translator import TrainingDemo

    return None if out is None else TrainingDemo(out, recipe)


def recipe_with_steps(steps: int) -> Recipe:
    """Return the translator's recipe with another number of steps."""
    from .translator import RECIPE

    return replace(RECIPE, steps=steps)


def run_demo(
    show: Callable[[str], None],
    title: Callable[[str], None],
    out: Path | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Show every page as soon as it is computed; with `out`, train the translator there and write a
    report.
    """
    training_demo, pages = _make_training_demo(out, recipe), list[tuple[str, str]]()
    for number, (name, make) in enumerate(list_pages(training_demo), 1):
        title(rule(f"── {number}  {name} "))
        pages.append((name, make()))
        show(pages[-1][1] + "\n")
    if training_demo is not None:
        show(f"Report with all pages: {training_demo.report(pages)}")


def demo_data(out: Path | None = None, recipe: Recipe | None = None) -> dict[str, Any]:
    """Return all numbers of the demo as plain values."""
    spec = demo_spec()
    work = costs.self_attention_work(spec, batch=1, queries=TOKENS)
    training_demo = _make_training_demo(out, recipe)
    return ({} if training_demo is None else training_demo.data) | {
        "lookup": [asdict(answer) for answer in soft_lookup.look_up_by_all_methods()],
        "spec": SPEC_TOML,
        "counts": {
            "parameters": costs.count_parameters(spec),
            "flops_asked": costs.required_flops(spec, work),
            "flops_counted": costs.counted_flops(spec, work),
            "cache_bytes_per_token": 4 * costs.cached_numbers_per_token(spec),
        },
        "walk": walk(spec).to_dict,
        "why": why(spec).data,
        "proof": [check_cached_decode(dtype)._asdict() for dtype in (torch.float32, torch.float64)],
    }
