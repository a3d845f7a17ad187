"""Greedy decoding of a batch of id tensors."""

from __future__ import annotations

from torch import Tensor

from ..masking.sequence_info import SequenceInfo
from ..models.model_cache import EncoderOutput
from ..models.transformer import Transformer
from . import DecodingState, eval_mode, require_language_model, run_decode_steps, sample_tokens
from .text_output import Completion


def greedy_decode(
    net: Transformer,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    sequence: SequenceInfo | None = None,
    end_id: int | None = None,
    encoder_output: EncoderOutput | None = None,
) -> list[list[int]]:
    """Return up to `max_new_tokens` most likely ids after each row of a prompt [B, P]; a row stops before `end_id`.

    If rows differ in length, pad them and give sequence=SequenceInfo.from_batch(prompt, lengths=..., pad="left").
    `encoder_output` is what `net.encode(source)` returned. Past tokens are cached.

    >>> import torch, headwise as hw
    >>> described = hw.families.read_model_spec(
    ...     {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ... )
    >>> net = hw.build(described, seed=0)
    >>> first, second = greedy_decode(net, torch.tensor([[3, 1], [4, 1]]), max_new_tokens=5)
    >>> len(first), first == greedy_decode(net, torch.tensor([[3, 1]]), max_new_tokens=5)[0]
    (5, True)
    """
    _check_greedy_inputs(net, prompt, max_new_tokens, sequence)
    answers = [Completion(() if end_id is None else (end_id,)) for _ in range(len(prompt))]
    with eval_mode(net):
        course = DecodingState(
            net, prompt, max_new_tokens=max_new_tokens, sequence=sequence, encoder_output=encoder_output
        )
        for _ in run_decode_steps(course, sample_tokens, answers, max_new_tokens):
            pass
    return [answer.ids for answer in answers]


def _check_greedy_inputs(net: Transformer, prompt: Tensor, count: int, tokens: SequenceInfo | None) -> None:
    require_language_model(net.spec)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"max_new_tokens={count!r} is not a token count; give an integer of at least 1")
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or not prompt.numel():
        shape = list(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(f"prompt is {shape}; give ids [rows, tokens] with at least one token in each row")
    if tokens is not None and not bool(tokens.is_real.any(1).all()):
        raise ValueError("a row of the prompt is all padding; give at least one token in each row")
