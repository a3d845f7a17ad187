"""State of decoding: rows that grow by one token per step, and the choice of that token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

import torch
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.counter_rng import RandomStream
from ...util.errors import SpecError, pluralise
from ..embeddings_heads import pool_last
from ..model_spec import ModelSpec, StackSpec
from ..transformer import EncoderOutput, Transformer
from .decoding_config import DEFAULT_DECODING, MIN_TEMPERATURE, DecodingConfig
from .text_output import Completion

# --- Choice of the next token ---------------------------------------------------------------------

NEG_INF = float("-inf")
TokenHistory = Sequence[Sequence[int]]  # the ids that each row has read or written so far


def sample_tokens(
    logits: Tensor,
    history: TokenHistory = (),
    *,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    streams: Sequence[RandomStream] = (),
) -> list[int]:
    """Return the next id of each row of logits [rows, vocabulary].

    Below `MIN_TEMPERATURE` it is the most likely one; otherwise each row samples with its own
    stream. `history` holds the ids of each row so far, for the repetition penalty.

    >>> sample_tokens(torch.tensor([[0.0, 2.0, 1.0]]))
    [1]
    >>> sample_tokens(torch.tensor([[0.0, 2.0, 1.0]]), [[1]], config=DecodingConfig(repetition=3.0))
    [2]
    """
    logits = apply_repetition_penalty(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), history, config.repetition
    )
    highest, likeliest = logits.max(-1)
    if bool(highest.isnan().any()):
        raise ValueError(
            "the model produced NaN logits, so its weights are broken; load another checkpoint"
        )
    if temperature < MIN_TEMPERATURE:
        return likeliest.tolist()
    return draw_tokens(filter_logits(logits / temperature, config), streams)


def apply_repetition_penalty(logits: Tensor, history: TokenHistory, penalty: float) -> Tensor:
    """Divide the logits of ids in the history by the penalty, or multiply them where negative
    (1909.05858).

    >>> apply_repetition_penalty(torch.tensor([[2.0, -2.0, 2.0]]), [[0, 1]], 4.0).tolist()
    [[0.5, -8.0, 2.0]]
    """
    if penalty == 1:
        return logits
    in_text = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(history):
        in_text[row, list(ids)] = True
    return torch.where(in_text, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def filter_logits(logits: Tensor, config: DecodingConfig) -> Tensor:
    """Set the logits of excluded tokens to -inf; applies `top_k`, then `top_p`, then `min_p`.

    >>> filter_logits(
    ...     torch.tensor([[0.1, 0.2, 0.7]]).log(), DecodingConfig(top_p=0.8)
    ... ).isfinite().tolist()
    [[False, True, True]]
    """
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        least = logits.topk(config.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, NEG_INF)
    if config.top_p is not None:
        ordered, order = logits.sort(dim=-1)
        excluded = (
            ordered.softmax(-1).cumsum(-1) <= 1 - config.top_p
        )  # in ascending order of probability
        excluded[..., -1] = False
        logits = logits.masked_fill(excluded.scatter(-1, order, excluded), NEG_INF)
    if config.min_p is not None:
        share = logits.softmax(-1)
        logits = logits.masked_fill(share < config.min_p * share.amax(-1, keepdim=True), NEG_INF)
    return logits


def draw_tokens(logits: Tensor, streams: Sequence[RandomStream]) -> list[int]:
    """Sample an id per row from softmax(logits), using one number of the row's stream."""
    unit = torch.tensor(
        [[stream.uniform()] for stream in streams], dtype=torch.float64, device=logits.device
    )
    cumulative = logits.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.minimum(
        unit * total, total.nextafter(torch.zeros_like(total))
    )  # the product may round up to the total
    return torch.searchsorted(cumulative, below, right=True)[:, 0].tolist()


# --- Decoding state -------------------------------------------------------------------------------

# finished rows leave the caches once at most this fraction continues, as copying costs a few steps
COMPACTION_THRESHOLD = 0.75
TokenChooser = Callable[[Tensor, TokenHistory], list[int]]


class DecodingState:
    """Rows, possibly of different lengths, that are being decoded. `logits` [rows, vocabulary] are
    for the next token.

    `rows` are the indices of the prompts that continue, `texts` all ids of each.
    """

    def __init__(
        self,
        net: Transformer,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sequence: SequenceInfo | None = None,
        encoder_output: EncoderOutput | None = None,
    ) -> None:
        self.net = net
        self.memory = encoder_output
        self.count = max_new_tokens
        self.texts = _real_token_ids(prompt, sequence)
        self.rows = list(range(len(self.texts)))
        check_prompt_length(net.spec, max(map(len, self.texts)), max_new_tokens)
        at = sequence or SequenceInfo.contiguous(0, prompt.shape[1], prompt.device)
        self.cache = net.cache(batch=len(prompt), capacity=prompt.shape[1] + max_new_tokens)
        h = net.hidden(prompt, sequence=at, source=encoder_output, cache=self.cache)
        self.logits = net.apply_head(pool_last(h, at)[:, None])[:, 0]

    def append_tokens(self, ids: Sequence[int]) -> None:
        """Append one token to each row and compute the next logits."""
        for text, token_id in zip(self.texts, ids, strict=True):
            text.append(token_id)
        x = torch.tensor(ids, device=self.logits.device)[:, None]
        self.logits = self.net(x, source=self.memory, cache=self.cache)[:, -1]

    def keep(self, index: Sequence[int]) -> None:
        """Keep the rows with these indices, in this order; an index may repeat."""
        if list(index) == list(range(len(self.rows))):
            return
        at = torch.tensor(index, device=self.logits.device)
        rows = [self.rows[n] for n in index]
        self.cache.rows(at)
        if self.memory is not None and rows != self.rows:
            self.memory = self.memory.rows(at)
        self.rows = rows
        self.logits = self.logits[at]
        self.texts = [list(self.texts[n]) for n in index]


def run_decode_steps(
    state: DecodingState,
    choose: TokenChooser,
    completions: Sequence[Completion],
    max_new_tokens: int,
) -> Iterator[None]:
    """Decode one token per unfinished completion and yield after each step; `completions` has one
    per prompt.
    """
    ids: list[int] = []
    for _ in range(max_new_tokens):
        if ids:
            state.append_tokens(ids)
        ids = choose(state.logits, state.texts)
        for row, token_id in zip(state.rows, ids, strict=True):
            completions[row].take(token_id)
        yield
        going = [n for n, row in enumerate(state.rows) if not completions[row].over]
        if not going:
            break
        if len(going) <= COMPACTION_THRESHOLD * len(ids):
            state.keep(going)
            ids = [ids[n] for n in going]
    for answer in completions:
        answer.close()


@contextmanager
def eval_mode(net: Transformer) -> Iterator[None]:
    """Evaluation mode without gradients; restores the training flags afterwards."""
    training = [module for module in net.modules() if module.training]
    try:
        with torch.no_grad():
            net.eval()
            yield
    finally:
        for module in training:
            module.training = True


def pad_left(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, SequenceInfo | None]:
    """Return ids [rows, tokens], padded on the left if lengths differ, and then the `SequenceInfo`
    of the tokens.

    >>> ids, tokens = pad_left([[3, 1, 4], [1]], torch.device("cpu"))
    >>> ids.tolist(), tokens.segment.tolist()
    ([[3, 1, 4], [0, 0, 1]], [[0, 0, 0], [-1, -1, 0]])
    """
    lengths = [len(row) for row in rows]
    ids = torch.tensor([[0] * (max(lengths) - len(row)) + list(row) for row in rows], device=device)
    return ids, None if min(lengths) == max(lengths) else SequenceInfo.from_batch(
        ids, lengths=lengths, pad="left"
    )


def max_positions(stack: StackSpec) -> int | None:
    """Return the maximum sequence length of a stack, or None if it is unlimited."""
    positions = stack.embedding.positions if stack.embedding else None
    limits = [positions.length if positions and positions.kind == "learned" else None]
    for block in stack.kinds_of_blocks:
        for spec in block.attention_specs.values():
            limits += [part.max_positions(spec) for _, part in spec.parts()]
    return min((length for length in limits if length is not None), default=None)


def check_prompt_length(spec: ModelSpec, prompt_length: int, max_new_tokens: int) -> None:
    """Raise if the prompt and the new tokens exceed the positions of the last stack.

    >>> from headwise import families
    >>> check_prompt_length(
    ...     families.read_model_spec({"model_type": "gpt2", "n_positions": 8}), 5, 6
    ... )
    Traceback (most recent call last):
    ValueError: 5 tokens and 6 new are 2 more than the 8 positions of gpt2 can take; ask for at most 4 new...
    """
    limit = max_positions(spec.stacks[-1])
    if limit is None:
        return
    where = f"the {limit} positions of {spec.name}"
    if prompt_length > limit:
        raise ValueError(
            f"a prompt of {pluralise(prompt_length, 'token')} is {prompt_length - limit} longer "
            f"than {where}; shorten it"
        )
    beyond = prompt_length + max_new_tokens - 1 - limit  # the last new token is never fed back
    if beyond > 0:
        fact = (
            f"{pluralise(prompt_length, 'token')} and {max_new_tokens} new are {beyond} more "
            f"than {where} can take"
        )
        raise ValueError(
            f"{fact}; ask for at most {max_new_tokens - beyond} new, or shorten the prompt"
        )


def require_language_model(spec: ModelSpec) -> int:
    """Return the vocabulary size; raise if the model is not a language model."""
    embedding = spec.stacks[-1].embedding
    vocabulary = embedding.tokens if embedding else 0
    head = spec.heads[0] if spec.heads else None
    if not vocabulary or head is None or head.at != "each" or head.outputs != vocabulary:
        required = (
            f"Head('tokens', {vocabulary})" if vocabulary else "one over tokens that it also reads"
        )
        raise SpecError(
            f"{spec.name} does not predict the next token; its first head must be {required}"
        )
    return vocabulary


def _real_token_ids(prompt: Tensor, tokens: SequenceInfo | None) -> list[list[int]]:
    rows: list[list[int]] = prompt.tolist()
    if tokens is None or tokens.start is not None:
        return rows
    is_real: list[list[bool]] = tokens.is_real.expand(len(rows), -1).tolist()
    return [list(compress(row, live)) for row, live in zip(rows, is_real, strict=True)]
