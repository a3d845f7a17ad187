"""Convert prompts (text or ids, one or several) to the ids that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...util.errors import SequenceTooLong, SpecError, pluralise
from ..transformer import Transformer
from .decoding_state import check_prompt_length, max_positions, require_language_model
from .text_output import load_tokenizers

PROMPT_HELP = "give text, ids such as [3, 1, 4], or a list of either"


class PromptBatch(NamedTuple):
    """The ids of each prompt; `kind` is "text" or "ids"; `form` is "alone" for one prompt,
    "together" for a list.
    """

    rows: list[list[int]]
    kind: str
    form: str


def parse_prompts(net: Transformer, prompts: Any) -> PromptBatch:
    """Return the prompts as ids.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     )
    ... )
    >>> parse_prompts(net, [[3, 1, 4], [1]])
    PromptBatch(rows=[[3, 1, 4], [1]], kind='ids', form='together')
    """
    require_language_model(net.spec)
    if isinstance(prompts, str):
        return PromptBatch([encode_text(net, prompts)], "text", "alone")
    items = _to_lists(prompts)
    if not items:
        raise ValueError(f"the prompt is empty; {PROMPT_HELP}, with at least one token")
    if all(isinstance(item, str) for item in items):
        return PromptBatch([encode_text(net, item) for item in items], "text", "together")
    form = "alone" if not any(isinstance(item, list) for item in items) else "together"
    rows = [_check_id_row(row, net) for row in ([items] if form == "alone" else items)]
    return PromptBatch(rows, "ids", form)


def encode_text(net: Transformer, text: str, specials: str | None = None) -> list[int]:
    """Return the ids of a text, surrounded by `usage.before` and `usage.behind`.

    `specials` overrides that of the model's `ProcessorSpec`.
    """
    tokenizer, _ = load_tokenizers(net)
    usage = net.usage
    ids = tokenizer.ids(text, specials)
    return _check_prompt([*usage.before, *ids, *usage.behind], net)


def encode_prompt(net: Transformer, text: str, max_new_tokens: int) -> list[int]:
    """Return the ids of a text; raise if `max_new_tokens` more do not fit into the model's
    positions.
    """
    row = encode_text(net, text)
    if net.spec.kind != "encoder-decoder":
        check_prompt_length(net.spec, len(row), max_new_tokens)
    return row


def get_decoder_start_ids(net: Transformer) -> tuple[int, ...]:
    """Return the ids that start the output of an encoder-decoder."""
    if not net.usage.begin:
        fact = f"{net.spec.name} has no decoder start ids"
        raise SpecError(f"{fact}; set net.usage = hw.ProcessorSpec(begin=(1,), end=(2,))")
    return net.usage.begin


def _check_id_row(row: Any, net: Transformer) -> list[int]:
    if not isinstance(row, list):
        raise ValueError(f"{row!r} is not a list of ids; {PROMPT_HELP}")
    wrong = [item for item in row if not isinstance(item, int) or isinstance(item, bool)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} in a prompt is not an id; {PROMPT_HELP}")
    return _check_prompt(row, net)


def _check_prompt(row: list[int], net: Transformer) -> list[int]:
    """Raise if the first stack cannot read the prompt."""
    first = net.spec.stacks[0]
    vocab_size = first.embedding.tokens if first.embedding else 0
    if not row:
        raise ValueError("the prompt is empty; give at least one token")
    wrong = [token_id for token_id in row if not 0 <= token_id < vocab_size]
    if wrong:
        raise ValueError(
            f"the prompt holds the id {wrong[0]}, but {first.name} knows {vocab_size}; give "
            f"0..{vocab_size - 1}"
        )
    limit = max_positions(first)
    if limit is not None and len(row) > limit:
        fact = (
            f"a prompt of {pluralise(len(row), 'token')} is {len(row) - limit} longer than the "
            f"{limit} positions"
        )
        raise SequenceTooLong(f"{fact} of {net.spec.name}; shorten it")
    return row


def _to_lists(prompts: Any) -> list[Any]:
    """Convert tensors and sequences to lists, at most two levels deep."""
    if isinstance(prompts, Tensor):
        if (
            prompts.is_floating_point()
            or prompts.is_complex()
            or prompts.dtype == torch.bool
            or prompts.dim() not in (1, 2)
        ):
            raise ValueError(
                f"the prompt is {prompts.dtype} {list(prompts.shape)}; give integer ids, [tokens] "
                "or [rows, tokens]"
            )
        return prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise ValueError(f"the prompt is of type {type(prompts).__name__}; {PROMPT_HELP}")
    return [
        _to_lists(item) if isinstance(item, (Tensor, list, tuple, range)) else item
        for item in prompts
    ]
