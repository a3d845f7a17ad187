"""Edges between the layers of a stack besides the hidden states: keys and values of an earlier
layer, and values of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ...attention.interfaces import Part, QKTransform, RowStep
from ...attention.masking.pattern_base import KeyRetention, head_pattern, largest_retention
from ...attention.spec.attention_spec import AttentionSpec
from ...util.errors import SpecError


class ConnectedLayer(Protocol):
    """The fields of a `BlockSpec` that are read here."""

    @property
    def attention(self) -> AttentionSpec | None: ...
    @property
    def kv_layers_back(self) -> int: ...
    @property
    def value_residual(self) -> str: ...


def kv_owner(layers: Sequence[ConnectedLayer], depth: int) -> int:
    """Return the layer whose keys and values a layer attends to: its own number, or that of an
    earlier layer.
    """
    while layers[depth].kv_layers_back:
        depth -= layers[depth].kv_layers_back
    return depth


def check_edges(stack: str, layers: Sequence[ConnectedLayer]) -> None:
    """Raise SpecError for a layer that reads keys and values, or first values, which do not fit
    it.
    """
    for depth, layer in enumerate(layers):
        reasons: list[str] = []
        if layer.kv_layers_back > depth:
            reasons = [f"there is no layer {depth - layer.kv_layers_back} before it"]
        elif layer.attention is None:  # a removed reader: later layers may read past it
            reasons = ["it has no self-attention"] * bool(layer.value_residual)
        elif layer.value_residual:
            reasons = [*_residual_conflicts(layer.attention, layers, depth)]
        elif layer.kv_layers_back:
            owner = kv_owner(layers, depth - layer.kv_layers_back)
            reasons = [*_reading_conflicts(layer.attention, layers[owner].attention, owner)]
        if reasons:
            edge = "value_residual" if layer.value_residual else "kv_layers_back"
            raise SpecError(f"{stack}: layer {depth} has {edge}, but {reasons[0]}")


def _reading_conflicts(
    reader: AttentionSpec, owner: AttentionSpec | None, depth: int
) -> Iterator[str]:
    if owner is None:
        yield f"layer {depth}, which it reads, has no self-attention"
        return
    yield from _projected_first_conflicts(reader)
    own, read = reader.kv_entry_shapes(), owner.kv_entry_shapes()
    if reader.heads.kv != owner.heads.kv or own != read:
        yield (
            f"it has {reader.heads.kv} key-value heads and attends to {_in_words(own)}, and layer "
            f"{depth} has {owner.heads.kv} and makes {_in_words(read)}; give both the same "
            "key-value heads"
        )
    elif _entry_makers(reader) != _entry_makers(owner):
        yield (
            f"layer {depth} makes other keys and values: by {_entry_makers(owner)}, not by "
            f"{_entry_makers(reader)}"
        )
    elif not _keeps_what_is_read(owner, reader):
        yield (
            f"its pattern {reader.pattern.text} attends to tokens that the cache of layer {depth} "
            f"drops after {owner.pattern.text}; use that pattern, or a narrower one"
        )
    if not _projects_queries(reader):
        yield f"{type(reader.project).__name__} projects no queries, so nothing of it is left"


def _residual_conflicts(
    spec: AttentionSpec, layers: Sequence[ConnectedLayer], depth: int
) -> Iterator[str]:
    first = layers[0].attention
    yield from _projected_first_conflicts(spec)
    if depth == 0:
        yield "it is the first, whose values others add; leave value_residual out of it"
    elif first is None:
        yield "layer 0 has no self-attention whose values could be added"
    elif not spec.project.caches_keys_and_values or not first.project.caches_keys_and_values:
        latent = first if spec.project.caches_keys_and_values else spec
        yield f"{type(latent.project).__name__} makes no values of heads that could be added"
    elif spec.kv_entry_shapes()["v"] != first.kv_entry_shapes()["v"]:
        yield (
            f"its values are {spec.kv_entry_shapes()['v']} and those of layer 0 "
            f"{first.kv_entry_shapes()['v']}; give both the same key-value heads"
        )


def _projected_first_conflicts(spec: AttentionSpec) -> Iterator[str]:
    """Yield why keys and values of a layer cannot be made before it attends."""
    if spec.source is not None:
        yield "a self-attention with source= reads another sequence; leave source out"
    if spec.is_recurrent:
        yield "it keeps a recurrent state in place of keys and values"
    for name, _ in spec.parts_of(RowStep):
        yield f"what {name} keeps of a key depends on the query of the same token"


def _entry_makers(spec: AttentionSpec) -> list[Part]:
    """The parts that keys and values depend on, and a normaliser for which a cache sorts them."""
    parts = [
        part
        for _, part in spec.parts()
        if isinstance(part, QKTransform) or part.kv_entry_layouts(spec)
    ]
    return parts + [spec.normaliser] * spec.normaliser.ordered


def _keeps_what_is_read(owner: AttentionSpec, reader: AttentionSpec) -> bool:
    """True if each key-value head of a cache keeps the tokens that the reader attends to."""
    if owner.pattern.tokens_before_decode != reader.pattern.tokens_before_decode:
        return False
    return all(
        (cache.last is None or (query.last is not None and query.last <= cache.last))
        and (cache.last is None or query.first <= cache.first)
        for cache, query in zip(_retentions(owner), _retentions(reader), strict=True)
    )


def _retentions(spec: AttentionSpec) -> list[KeyRetention]:
    """The tokens that a cache keeps for each key-value head, whose query heads may have several
    patterns.
    """
    queries = range(spec.heads.q)
    return [
        largest_retention(
            *(
                head_pattern(spec.pattern, head).retention
                for head in queries
                if spec.heads.kv_head_of_query[head] == kv
            )
        )
        for kv in range(spec.heads.kv)
    ]


def _projects_queries(spec: AttentionSpec) -> bool:
    of_entries = {key for name, key in spec.list_kv_only_params() if name == "project"}
    return bool(set(spec.project.params(spec)) - of_entries)


def _in_words(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
