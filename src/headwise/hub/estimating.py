"""What a capture will take, before it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..site import Site
from .keeping import Capture
from .routes.base import SiteModule


class CaptureSize(NamedTuple):
    """One run: texts side by side, tokens of each stream, and new ones that are said step by step."""

    batch_size: int
    num_tokens: Mapping[str, int]
    max_new_tokens: int = 0


def estimate_bytes(sites: Sequence[SiteModule], capture: Capture, streams: Mapping[str, tuple[str, str]], size: CaptureSize) -> int:
    """The bytes that a run of this size is expected to take: queries, keys and what else is asked, and masks as bits.

    Additions to scores are expected to follow the distance of tokens, as learned and fixed ones do.
    """
    total, patterns = 0, dict[tuple[str, int, int], int]()
    for one in sites:
        asks, told = streams[one.site.name]
        new = {name: 0 if name == "source" else size.max_new_tokens for name in (asks, told)}
        queries, keys = size.num_tokens[asks] + new[asks], size.num_tokens[told] + new[told]
        if one.adapter.visible_tensors(one.module) == "weights":
            total += size.batch_size * one.site.heads * queries * keys * capture.bytes_per_number
        else:
            total += size.batch_size * capture.bytes_per_number * _numbers_per_text(one.site, capture, queries, keys)
            patterns[one.site.pattern, queries, keys] = _mask_bytes(one.site, queries, keys, size.batch_size)
        if "z" in capture.extra:
            total += size.batch_size * capture.bytes_per_number * queries * one.site.heads * _head_width(one.site)
    return total + sum(patterns.values())


def _numbers_per_text(site: Site, how: Capture, queries: int, keys: int) -> int:
    """How many numbers queries and keys of one text are, and values if they are kept."""
    if site.spec is None:
        heads, groups, dim = site.q, site.kv, site.dim
    else:
        core = site.spec.core_of(site.spec.projection_form(one=False))
        heads, groups, dim = len(core.keys), max(core.keys) + 1, core.dim
    return queries * heads * dim + keys * groups * (dim + (_head_width(site) if "v" in how.extra else 0))


def _mask_bytes(site: Site, queries: int, keys: int, batch: int) -> int:
    """A mask as bits, and a band of numbers for each head."""
    return batch * queries * -(-keys // 8) + 4 * site.q * (queries + keys)


def _head_width(site: Site) -> int:
    return site.spec.heads.vdim if site.spec is not None else site.dim
