"""State of decoding: rows that grow by one token per step, and the choice of that token: greedy,
sampled, or by beam search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.counter_rng import RandomStream
from ...kernels.devices import to_float64
from ...util.errors import SpecError, pluralise
from ..embeddings_heads import CheckedIds, pool_last
from ..model_spec import ModelSpec, StackSpec
from ..transformer import EncoderOutput, ModelCache, Transformer
from .decoding_config import DEFAULT_DECODING, MIN_TEMPERATURE, DecodingConfig
from .text_output import Completion

# --- Choice of the next token ---------------------------------------------------------------------

NEG_INF = float("-inf")
NAN_ID = -1  # in place of the id of a row whose logits have a NaN
TokenHistory = Sequence[Sequence[int]]  # the ids that each row has read or written so far


def sample_tokens(
    logits: Tensor,
    history: TokenHistory = (),
    *,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    streams: Sequence[RandomStream] = (),
) -> list[int]:
    """Return the next id of each row of logits [rows, vocabulary], on the host.

    Below `MIN_TEMPERATURE` it is the most likely one; otherwise each row samples with its own
    stream. `history` holds the ids of each row so far, for the repetition penalty.

    >>> sample_tokens(torch.tensor([[0.0, 2.0, 1.0]]))
    [1]
    >>> sample_tokens(torch.tensor([[0.0, 2.0, 1.0]]), [[1]], config=DecodingConfig(repetition=3.0))
    [2]
    """
    return read_ids(
        choose_tokens(logits, history, temperature=temperature, config=config, streams=streams)
    )


def choose_tokens(
    logits: Tensor,
    history: TokenHistory = (),
    *,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    streams: Sequence[RandomStream] = (),
) -> Tensor:
    """`sample_tokens` on the device of the logits, without a wait: ids [rows], `NAN_ID` for rows
    with NaN.
    """
    logits = apply_repetition_penalty(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), history, config.repetition
    )
    highest, ids = logits.max(-1)  # a NaN is the maximum of its row
    if temperature >= MIN_TEMPERATURE:
        exact = to_float64(filter_logits(logits / temperature, config))
        unit = exact.new_tensor([[stream.uniform()] for stream in streams])
        cumulative = exact.softmax(-1).cumsum(-1)
        total = cumulative[:, -1:]
        # the product may round up to the total
        below = torch.minimum(unit * total, total.nextafter(torch.zeros_like(total)))
        ids = torch.searchsorted(cumulative, below, right=True)[:, 0].to(ids.device)
    return torch.where(highest.isnan(), NAN_ID, ids)


def read_ids(chosen: Tensor) -> list[int]:
    """Copy chosen ids to the host, the one wait of a decode step; raise for rows with NaN."""
    ids: list[int] = chosen.tolist()
    if NAN_ID in ids:
        raise ValueError(
            "the model produced NaN logits, so its weights are broken; load another checkpoint"
        )
    return ids


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
        # in ascending order of probability
        excluded = ordered.softmax(-1).cumsum(-1) <= 1 - config.top_p
        excluded[..., -1] = False
        logits = logits.masked_fill(excluded.scatter(-1, order, excluded), NEG_INF)
    if config.min_p is not None:
        share = logits.softmax(-1)
        logits = logits.masked_fill(share < config.min_p * share.amax(-1, keepdim=True), NEG_INF)
    return logits


# --- Decoding state -------------------------------------------------------------------------------

# finished rows leave the caches once at most this fraction continues, as copying costs a few steps
COMPACTION_THRESHOLD = 0.75
TokenChooser = Callable[[Tensor, TokenHistory], Tensor]  # as `choose_tokens`
# caches of compiled steps have a multiple of these slots, so that few sizes are compiled
CAPACITY_STEP = 64


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
        compile: bool = False,
    ) -> None:
        self.net = net
        self.is_compiled = compile
        self.memory = encoder_output
        self.count = max_new_tokens
        self.texts = _real_token_ids(prompt, sequence)
        self.rows = list(range(len(self.texts)))
        check_prompt_length(net.spec, max(map(len, self.texts)), max_new_tokens)
        at = sequence or SequenceInfo.contiguous(0, prompt.shape[1], prompt.device)
        capacity = prompt.shape[1] + max_new_tokens
        self.step = _run_step
        if compile:
            capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
            self.step = _compile_step(prompt.device.type)
        kind = "static" if compile else "smallest"
        self.cache = net.cache(batch=len(prompt), capacity=capacity, kind=kind)
        h = net.hidden(prompt, sequence=at, source=encoder_output, cache=self.cache)
        self.logits = net.apply_head(pool_last(h, at)[:, None])[:, 0]

    def append_tokens(self, ids: Sequence[int], chosen: Tensor) -> None:
        """Append one token to each row and compute the next logits; `chosen` are the ids on the
        device.
        """
        for text, token_id in zip(self.texts, ids, strict=True):
            text.append(token_id)
        self.logits = self.step(self.net, chosen[:, None], self.memory, self.cache)

    def keep(self, index: Sequence[int]) -> None:
        """Keep the rows with these indices, in this order; an index may repeat."""
        if list(index) == list(range(len(self.rows))):
            return
        at = torch.tensor(index, device=self.logits.device)
        rows = [self.rows[n] for n in index]
        self.cache.take_rows(at)
        if self.memory is not None and rows != self.rows:
            self.memory = self.memory.rows(at)
        self.rows = rows
        self.logits = self.logits[at]
        self.texts = [list(self.texts[n]) for n in index]


def _run_step(
    net: Transformer, ids: Tensor, memory: EncoderOutput | None, cache: ModelCache
) -> Tensor:
    """Return the logits [rows, vocabulary] that follow one more token of each row."""
    return net(CheckedIds(ids), source=memory, cache=cache)[:, -1]


COMPILED_STEPS: dict[str, Callable[..., Tensor]] = {}  # by kind of device


def _compile_step(device: str) -> Callable[..., Tensor]:
    """Return the decode step compiled for a kind of device: one function for all models, because
    torch keeps a graph for each of them.
    """
    if device not in COMPILED_STEPS:
        mode = "reduce-overhead" if device == "cuda" else None
        COMPILED_STEPS[device] = torch.compile(_run_step, mode=mode)
    return COMPILED_STEPS[device]


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
    chosen = torch.empty(0, dtype=torch.int64)
    for _ in range(max_new_tokens):
        if ids:
            state.append_tokens(ids, chosen)
        chosen = choose(state.logits, state.texts)
        ids = read_ids(chosen)
        for row, token_id in zip(state.rows, ids, strict=True):
            completions[row].take(token_id)
        yield
        going = [n for n, row in enumerate(state.rows) if not completions[row].over]
        if not going:
            break
        if not state.is_compiled and len(going) <= COMPACTION_THRESHOLD * len(ids):
            state.keep(going)
            ids = [ids[n] for n in going]
            chosen = chosen[torch.tensor(going, device=chosen.device)]
    for answer in completions:
        answer.close()


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
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


def check_token_count(max_new_tokens: object) -> None:
    """Raise unless it is an integer of at least 1."""
    if (
        not isinstance(max_new_tokens, int)
        or isinstance(max_new_tokens, bool)
        or max_new_tokens < 1
    ):
        raise ValueError(
            f"max_new_tokens={max_new_tokens!r} is not a token count; give an integer of at least 1"
        )


def check_prompt_length(spec: ModelSpec, prompt_length: int, max_new_tokens: int) -> None:
    """Raise if the prompt and the new tokens exceed the positions of the last stack.

    >>> from headwise import families
    >>> check_prompt_length(
    ...     families.read_model_spec({"model_type": "gpt2", "n_positions": 8}), 5, 6
    ... )
    Traceback (most recent call last):
    ValueError: 5 tokens and 6 new are 2 more than the 8 positions of gpt2 can take; ask for at most
    4 new...
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


# --- Greedy decoding ------------------------------------------------------------------------------


def greedy_decode(
    net: Transformer,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    sequence: SequenceInfo | None = None,
    end_id: int | None = None,
    encoder_output: EncoderOutput | None = None,
) -> list[list[int]]:
    """Return up to `max_new_tokens` most likely ids after each row of a prompt [B, P]; a row stops
    before `end_id`.

    If rows differ in length, pad them and give sequence=SequenceInfo.from_batch(prompt,
    lengths=..., pad="left"). `encoder_output` is what `net.encode(source)` returned. Past tokens
    are cached.

    >>> import torch, headwise as hw
    >>> described = hw.families.read_model_spec(
    ...     {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ... )
    >>> net = hw.build(described, seed=0)
    >>> first, second = greedy_decode(net, torch.tensor([[3, 1], [4, 1]]), max_new_tokens=5)
    >>> len(first), first == greedy_decode(net, torch.tensor([[3, 1]]), max_new_tokens=5)[0]
    (5, True)
    """
    require_language_model(net.spec)
    check_token_count(max_new_tokens)
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or not prompt.numel():
        shape = list(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(
            f"prompt is {shape}; give ids [rows, tokens] with at least one token in each row"
        )
    if sequence is not None and not bool(sequence.is_real.any(1).all()):
        raise ValueError("a row of the prompt is all padding; give at least one token in each row")
    answers = [Completion(() if end_id is None else (end_id,)) for _ in range(len(prompt))]
    with eval_mode(net):
        course = DecodingState(
            net,
            prompt,
            max_new_tokens=max_new_tokens,
            sequence=sequence,
            encoder_output=encoder_output,
        )
        for _ in run_decode_steps(course, choose_tokens, answers, max_new_tokens):
            pass
    return [answer.ids for answer in answers]


# --- Beam search ----------------------------------------------------------------------------------

IsFinished = Callable[[Sequence[int]], bool]  # True if an output with these ids has ended


class BeamHypothesis(NamedTuple):
    """The ids of a hypothesis and the sum of their log-probabilities, or its score once it is
    finished.
    """

    value: float
    ids: tuple[int, ...]


class RankedExtensions(NamedTuple):
    """Sums [active, vocabulary] of all extensions by one token; values and flat indices of the
    `count` best.

    They suffice if outputs end at end ids alone; a stop text may end more.
    """

    sums: Tensor
    count: int
    values: Tensor
    places: Tensor

    def read_others(self) -> Iterator[tuple[float, int]]:
        """Read the extensions behind the best ones from the device, in order."""
        sums = self.sums.flatten()
        places = self.places
        for _ in range(self.count, len(sums), self.count):
            sums[places] = NEG_INF
            values, places = sums.topk(self.count)
            yield from zip(values.tolist(), places.tolist(), strict=True)


def read_best(ranked: Sequence[RankedExtensions]) -> list[list[tuple[float, int]]]:
    """Copy the best extensions of several searches to the host at once: values and indices."""
    packed = [torch.stack([one.values, one.places.double()]) for one in ranked]
    values, places = torch.cat(packed, 1).tolist()
    pairs = [(value, int(place)) for value, place in zip(values, places, strict=True)]
    ends = list(accumulate(one.count for one in ranked))
    return [pairs[end - one.count : end] for one, end in zip(ranked, ends, strict=True)]


@dataclass
class BeamSearch:
    """The hypotheses of one prompt: at most `beams` active ones and `beams` finished ones (`over`),
    best first.

    Each step ranks enough of the extensions by one token that `beams` remain active whatever ends.
    An extension that ends, or has `count` tokens, is finished if it is among the first `beams`; its
    score is its sum divided by length ** length_penalty. The search ends when no active hypothesis
    can beat the `best` finished ones.
    """

    how: DecodingConfig
    count: int
    ends: frozenset[int]
    ended: IsFinished
    active: list[BeamHypothesis] = field(default_factory=lambda: [BeamHypothesis(0.0, ())])
    over: list[BeamHypothesis] = field(default_factory=list)

    def rank(self, log_probs: Tensor) -> RankedExtensions:
        """Rank the extensions by one token, from log-probabilities [active, vocabulary]."""
        sums = to_float64(log_probs)
        sums = sums + sums.new_tensor([[hypothesis.value] for hypothesis in self.active])
        count = min(max(2, 1 + len(self.ends)) * self.how.beams, sums.numel())
        return RankedExtensions(sums, count, *sums.flatten().topk(count))

    def step(self, ranked: RankedExtensions, best: Iterable[tuple[float, int]]) -> list[int]:
        """Extend by one token; `best` are the best extensions on the host. Return the parent of
        each new hypothesis.
        """
        before = self.active
        self.active = []
        is_last = len(before[0].ids) + 1 == self.count
        parents: list[int] = []
        for rank, (value, place) in enumerate(chain(best, ranked.read_others())):
            is_full = is_last or len(self.active) == self.how.beams
            if value == NEG_INF or (rank >= self.how.beams and is_full):
                break
            parent, token_id = divmod(place, ranked.sums.shape[1])
            answer = BeamHypothesis(value, (*before[parent].ids, token_id))
            if is_last or self.ended(answer.ids):
                self._add_finished(answer, rank)
            elif len(self.active) < self.how.beams:
                self.active.append(answer)
                parents.append(parent)
        if self._is_decided:
            self.active = []
        return parents[: len(self.active)]

    def _add_finished(self, answer: BeamHypothesis, rank: int) -> None:
        if rank < self.how.beams:
            score = answer.value / len(answer.ids) ** self.how.length_penalty
            ids = answer.ids
            finished = [*self.over, BeamHypothesis(score, ids)]
            self.over = sorted(finished, key=lambda hypothesis: -hypothesis.value)[: self.how.beams]

    @property
    def _is_decided(self) -> bool:
        """True if no active hypothesis can win: sums only fall, which bounds its best score."""
        if not self.active or len(self.over) < self.how.best:
            return False
        last = self.over[self.how.best - 1]
        best_length = self.count if self.how.length_penalty > 0 else len(self.active[0].ids)
        return self.active[0].value / best_length**self.how.length_penalty <= last.value


def run_beam_search(
    state: DecodingState,
    config: DecodingConfig,
    end_ids: frozenset[int],
    is_finished: IsFinished,
) -> list[list[BeamHypothesis]]:
    """Return the `best` finished hypotheses of each prompt, best first, with their end ids.

    As in transformers, the repetition penalty applies to log-probabilities, which are not
    renormalised.
    """
    searches = [BeamSearch(config, state.count, end_ids, is_finished) for _ in state.rows]
    while state.rows:
        logits = state.logits.to(torch.promote_types(state.logits.dtype, torch.float32))
        penalised = apply_repetition_penalty(logits.log_softmax(-1), state.texts, config.repetition)
        prompts = [(prompt, len(list(rows))) for prompt, rows in groupby(state.rows)]
        parts = penalised.split([count for _, count in prompts])
        ranked = [
            searches[prompt].rank(part) for (prompt, _), part in zip(prompts, parts, strict=True)
        ]
        index = list[int]()
        ids = list[int]()
        at = 0
        for (prompt, count), own, best in zip(prompts, ranked, read_best(ranked), strict=True):
            index += [at + parent for parent in searches[prompt].step(own, best)]
            ids += [answer.ids[-1] for answer in searches[prompt].active]
            at += count
        if not index:
            break
        state.keep(index)
        state.append_tokens(ids, torch.tensor(ids, device=state.logits.device))
    return [search.over[: config.best] for search in searches]
