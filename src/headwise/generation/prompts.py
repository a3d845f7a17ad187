"""What a model is asked to go on from: ids or text, one or several, as the ids that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import SequenceTooLong, SpecError
from ..masking.sequence_info import SequenceInfo
from ..models.model_cache import EncoderOutput
from ..models.transformer import Transformer
from .decoding_state import check_prompt_length, max_positions, pad_left, require_language_model
from .text_output import load_tokenizers

PROMPT_HELP = "give text, ids such as [3, 1, 4], or a list of either"


class PromptBatch(NamedTuple):
    """The ids of each prompt; whether they were "text" or "ids", and were given "alone" or "together"."""

    rows: list[list[int]]
    kind: str
    form: str


class DecoderInput(NamedTuple):
    """What generation begins with: ids [rows, tokens], where they stand, and what was read before."""

    ids: Tensor
    tokens: SequenceInfo | None
    memory: EncoderOutput | None


def parse_prompts(net: Transformer, prompts: Any, window: int | None = None) -> PromptBatch:
    """What was given as prompts, as ids; of each only the last `window`, if that is said.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}))
    >>> parse_prompts(net, [3, 1, 4], window=2)
    PromptBatch(rows=[[1, 4]], kind='ids', form='alone')
    >>> parse_prompts(net, [[3, 1, 4], [1]])
    PromptBatch(rows=[[3, 1, 4], [1]], kind='ids', form='together')
    """
    require_language_model(net.spec)
    if isinstance(prompts, str):
        return PromptBatch([encode_text(net, prompts, window)], "text", "alone")
    told = _to_lists(prompts)
    if not told:
        raise ValueError(f"the prompt is empty; {PROMPT_HELP}, with at least one token")
    if all(isinstance(one, str) for one in told):
        return PromptBatch([encode_text(net, one, window) for one in told], "text", "together")
    form = "alone" if not any(isinstance(one, list) for one in told) else "together"
    rows = [_check_id_row(row, net, window) for row in ([told] if form == "alone" else told)]
    return PromptBatch(rows, "ids", form)


def encode_text(net: Transformer, text: str, window: int | None = None, specials: str | None = None) -> list[int]:
    """The ids of a text, with those that stand before and behind it; `specials` as in Usage, whatever that says."""
    reading, _ = load_tokenizers(net)
    usage, ids = net.usage, reading.ids(text, specials)
    around = len(usage.before) + len(usage.behind)
    if window is not None and around >= window:
        raise ValueError(f"window={window} leaves no room beside the {around} ids around a text; give more")
    if window is not None and len(ids) + around > window:
        ids = ids[around - window :]
    return _check_prompt([*usage.before, *ids, *usage.behind], net)


def encode_prompt(net: Transformer, text: str, *, max_new_tokens: int, window: int | None = None) -> list[int]:
    """The ids of a text, if `count` new ones can be said of it."""
    row = encode_text(net, text, window)
    if net.spec.kind != "encoder-decoder":
        check_prompt_length(net.spec, len(row), max_new_tokens, window)
    return row


def prepare_decoder_input(net: Transformer, rows: Sequence[Sequence[int]], device: torch.device) -> DecoderInput:
    """What the last stack goes on from: these rows, or, where it writes what another has read, the usual beginning."""
    ids, tokens = pad_left(rows, device)
    if net.spec.kind != "encoder-decoder":
        return DecoderInput(ids, tokens, None)
    first = get_decoder_start_ids(net)
    memory = net.encode(ids, sequence=tokens)
    return DecoderInput(torch.tensor([first] * len(rows), device=device), None, memory)


def get_decoder_start_ids(net: Transformer) -> tuple[int, ...]:
    """What an answer begins with where a second stack writes it."""
    if not net.usage.begin:
        fact = f"{net.spec.name} does not say what an answer begins with"
        raise SpecError(f"{fact}; say it, as in net.usage = Usage(begin=(1,), end=(2,))")
    return net.usage.begin


def _check_id_row(row: Any, net: Transformer, window: int | None) -> list[int]:
    if not isinstance(row, list):
        raise ValueError(f"{row!r} stands among prompts of ids; {PROMPT_HELP}")
    if wrong := [one for one in row if not isinstance(one, int) or isinstance(one, bool)]:
        raise ValueError(f"{wrong[0]!r} in a prompt is no id; {PROMPT_HELP}")
    return _check_prompt(row[-window:] if window else row, net)


def _check_prompt(row: list[int], net: Transformer) -> list[int]:
    """A prompt that the first stack can read."""
    first = net.spec.stacks[0]
    known = first.embedding.tokens if first.embedding else 0
    if not row:
        raise ValueError("the prompt is empty; give at least one token")
    if wrong := [one for one in row if not 0 <= one < known]:
        raise ValueError(f"the prompt holds the id {wrong[0]}, but {first.name} knows {known}; give 0..{known - 1}")
    most = max_positions(first)
    if most is not None and len(row) > most:
        fact = f"a prompt of {len(row)} tokens is {len(row) - most} longer than the {most} positions"
        raise SequenceTooLong(f"{fact} of {net.spec.name}; shorten it, or read its end alone with window={most}")
    return row


def _to_lists(said: Any) -> list[Any]:
    """Tensors and sequences as lists, two deep."""
    if isinstance(said, Tensor):
        if said.is_floating_point() or said.is_complex() or said.dtype == torch.bool or said.dim() not in (1, 2):
            raise ValueError(f"the prompt is {said.dtype} {list(said.shape)}; give whole numbers, a row or several")
        return said.tolist()
    if not isinstance(said, Sequence):
        raise ValueError(f"the prompt is of type {type(said).__name__}; {PROMPT_HELP}")
    return [_to_lists(one) if isinstance(one, (Tensor, list, tuple, range)) else one for one in said]
