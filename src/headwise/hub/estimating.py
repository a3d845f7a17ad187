"""What a capture will take, before it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..site import Site
from .keeping import Capture
from .routes.base import Found


class Size(NamedTuple):
    """One run: texts side by side, tokens of each stream, and new ones that are said step by step."""

    batch: int
    tokens: Mapping[str, int]
    steps: int = 0


def needed(those: Sequence[Found], how: Capture, streams: Mapping[str, tuple[str, str]], size: Size) -> int:
    """The bytes that a run of this size is expected to take: queries, keys and what else is asked, and masks as bits.

    Additions to scores are expected to follow the distance of tokens, as learned and fixed ones do.
    """
    total, patterns = 0, dict[tuple[str, int, int], int]()
    for one in those:
        asks, told = streams[one.site.name]
        new = {name: 0 if name == "source" else size.steps for name in (asks, told)}
        queries, keys = size.tokens[asks] + new[asks], size.tokens[told] + new[told]
        if one.route.gives(one.module) == "weights":
            total += size.batch * one.site.heads * queries * keys * how.width
        else:
            total += size.batch * how.width * _numbers(one.site, how, queries, keys)
            patterns[one.site.pattern, queries, keys] = _grid(one.site, queries, keys, size.batch)
        if "z" in how.also:
            total += size.batch * how.width * queries * one.site.heads * _width(one.site)
    return total + sum(patterns.values())


def _numbers(site: Site, how: Capture, queries: int, keys: int) -> int:
    """How many numbers queries and keys of one text are, and values if they are kept."""
    if site.spec is None:
        heads, groups, dim = site.q, site.kv, site.dim
    else:
        core = site.spec.core_of(site.spec.form(one=False))
        heads, groups, dim = len(core.keys), max(core.keys) + 1, core.dim
    return queries * heads * dim + keys * groups * (dim + (_width(site) if "v" in how.also else 0))


def _grid(site: Site, queries: int, keys: int, batch: int) -> int:
    """A mask as bits, and a band of numbers for each head."""
    return batch * queries * -(-keys // 8) + 4 * site.q * (queries + keys)


def _width(site: Site) -> int:
    return site.spec.heads.vdim if site.spec is not None else site.dim
