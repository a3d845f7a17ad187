"""What a model is asked to go on from: ids or text, one or several, as the ids that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import SequenceTooLong, SpecError
from ..masking.sequence_info import SequenceInfo
from ..models.model_cache import Memory
from ..models.transformer import Transformer
from .decoding_state import check_room, check_says, longest, side_by_side
from .text_output import words_of

ALIKE = "give text, ids such as [3, 1, 4], or a list of either"


class Given(NamedTuple):
    """The ids of each prompt; whether they were "text" or "ids", and were given "alone" or "together"."""

    rows: list[list[int]]
    kind: str
    form: str


class Prompt(NamedTuple):
    """What generation begins with: ids [rows, tokens], where they stand, and what was read before."""

    ids: Tensor
    tokens: SequenceInfo | None
    memory: Memory | None


def taken(net: Transformer, said: Any, window: int | None = None) -> Given:
    """What was given as prompts, as ids; of each only the last `window`, if that is said.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}))
    >>> taken(net, [3, 1, 4], window=2)
    Given(rows=[[1, 4]], kind='ids', form='alone')
    >>> taken(net, [[3, 1, 4], [1]])
    Given(rows=[[3, 1, 4], [1]], kind='ids', form='together')
    """
    check_says(net.described)
    if isinstance(said, str):
        return Given([read(net, said, window)], "text", "alone")
    told = _plain(said)
    if not told:
        raise ValueError(f"the prompt is empty; {ALIKE}, with at least one token")
    if all(isinstance(one, str) for one in told):
        return Given([read(net, one, window) for one in told], "text", "together")
    form = "alone" if not any(isinstance(one, list) for one in told) else "together"
    rows = [_ids(row, net, window) for row in ([told] if form == "alone" else told)]
    return Given(rows, "ids", form)


def read(net: Transformer, text: str, window: int | None = None, specials: str | None = None) -> list[int]:
    """The ids of a text, with those that stand before and behind it; `specials` as in Usage, whatever that says."""
    reading, _ = words_of(net)
    usage, ids = net.usage, reading.ids(text, specials)
    around = len(usage.before) + len(usage.behind)
    if window is not None and around >= window:
        raise ValueError(f"window={window} leaves no room beside the {around} ids around a text; give more")
    if window is not None and len(ids) + around > window:
        ids = ids[around - window :]
    return _checked([*usage.before, *ids, *usage.behind], net)


def row_of(net: Transformer, text: str, *, count: int, window: int | None = None) -> list[int]:
    """The ids of a text, if `count` new ones can be said of it."""
    row = read(net, text, window)
    if net.described.kind != "encoder-decoder":
        check_room(net.described, len(row), count, window)
    return row


def begun(net: Transformer, rows: Sequence[Sequence[int]], device: torch.device) -> Prompt:
    """What the last stack goes on from: these rows, or, where it writes what another has read, the usual beginning."""
    ids, tokens = side_by_side(rows, device)
    if net.described.kind != "encoder-decoder":
        return Prompt(ids, tokens, None)
    first = beginning(net)
    memory = net.encode(ids, tokens=tokens)
    return Prompt(torch.tensor([first] * len(rows), device=device), None, memory)


def beginning(net: Transformer) -> tuple[int, ...]:
    """What an answer begins with where a second stack writes it."""
    if not net.usage.begin:
        fact = f"{net.described.name} does not say what an answer begins with"
        raise SpecError(f"{fact}; say it, as in net.usage = Usage(begin=(1,), end=(2,))")
    return net.usage.begin


def _ids(row: Any, net: Transformer, window: int | None) -> list[int]:
    if not isinstance(row, list):
        raise ValueError(f"{row!r} stands among prompts of ids; {ALIKE}")
    if wrong := [one for one in row if not isinstance(one, int) or isinstance(one, bool)]:
        raise ValueError(f"{wrong[0]!r} in a prompt is no id; {ALIKE}")
    return _checked(row[-window:] if window else row, net)


def _checked(row: list[int], net: Transformer) -> list[int]:
    """A prompt that the first stack can read."""
    first = net.described.stacks[0]
    known = first.embedding.tokens if first.embedding else 0
    if not row:
        raise ValueError("the prompt is empty; give at least one token")
    if wrong := [one for one in row if not 0 <= one < known]:
        raise ValueError(f"the prompt holds the id {wrong[0]}, but {first.name} knows {known}; give 0..{known - 1}")
    most = longest(first)
    if most is not None and len(row) > most:
        fact = f"a prompt of {len(row)} tokens is {len(row) - most} longer than the {most} positions"
        raise SequenceTooLong(f"{fact} of {net.described.name}; shorten it, or read its end alone with window={most}")
    return row


def _plain(said: Any) -> list[Any]:
    """Tensors and sequences as lists, two deep."""
    if isinstance(said, Tensor):
        if said.is_floating_point() or said.is_complex() or said.dtype == torch.bool or said.dim() not in (1, 2):
            raise ValueError(f"the prompt is {said.dtype} {list(said.shape)}; give whole numbers, a row or several")
        return said.tolist()
    if not isinstance(said, Sequence):
        raise ValueError(f"the prompt is of type {type(said).__name__}; {ALIKE}")
    return [_plain(one) if isinstance(one, (Tensor, list, tuple, range)) else one for one in said]
