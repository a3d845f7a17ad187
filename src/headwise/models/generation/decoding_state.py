"""State of decoding: rows that grow by one token per step, the choice of that token, and the
compiled step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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

# --- Compiled decode steps ------------------------------------------------------------------------


DecodeStep = Callable[..., Tensor]
CompileReporter = Callable[["CompileDecision"], object]
COMPILERS = ("c++", "g++", "clang++")
# Measured on two cores: processor seconds of a graph, and of each
# layer of it; and seconds a step that it saves for each layer in float32. In bfloat16, whose small
# operations are slow, it saves more.
COMPILE_SECONDS = (22.0, 2.4)
SECONDS_SAVED_PER_LAYER = 0.08e-3


@dataclass(frozen=True)
class CompileDecision:
    """Whether decode steps are compiled, and why."""

    should_compile: bool
    reason: str


UNEQUAL_LENGTHS = CompileDecision(False, "not compiled: rows are of several lengths")
MIXED_REQUESTS = CompileDecision(
    False, "not compiled: requests of several lengths are answered together"
)


def ignore_decision(decision: CompileDecision) -> None:
    """A reporter that does nothing."""


def decide_compile(net: Transformer, mode: str, num_steps: int) -> CompileDecision:
    """Decide whether up to `num_steps` steps are compiled in mode "on", "off" or "auto"; "on"
    raises if it cannot.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> decide_compile(hw.build(hw.families.read_model_spec(config)), "off", 64)
    CompileDecision(should_compile=False, reason='not compiled: compile is off')
    """
    if mode == "off":
        return CompileDecision(False, "not compiled: compile is off")
    reason = find_compile_obstacle(net)
    if reason:
        if mode == "on":
            raise SpecError(
                f"steps cannot be compiled: {reason}; leave compile out, or give compile='auto'"
            )
        return CompileDecision(False, f"not compiled: {reason}")
    if mode == "on":
        return CompileDecision(True, "compiled: compile is on")
    return estimate_compile_gain(len(list(net.stacks.values())[-1].blocks), num_steps)


def find_compile_obstacle(net: Transformer) -> str:
    """Return why steps of this model cannot be compiled here, or an empty string."""
    if next(net.parameters()).device.type == "cpu" and not any(
        shutil.which(name) for name in COMPILERS
    ):
        return "there is no C++ compiler"
    if net.probes:
        return "probes observe its attention"
    return ""


def estimate_compile_gain(num_layers: int, num_steps: int) -> CompileDecision:
    """Decide whether compiling saves more time over `num_steps` steps than it takes.

    >>> estimate_compile_gain(12, 64)
    CompileDecision(should_compile=False, reason='not compiled: 64 steps could gain about 0.1 s, compiling takes about
    51 s')
    >>> estimate_compile_gain(12, 100_000).should_compile
    True
    """
    gain = num_steps * num_layers * SECONDS_SAVED_PER_LAYER
    cost = COMPILE_SECONDS[0] + COMPILE_SECONDS[1] * num_layers
    estimate = (
        f"{pluralise(num_steps, 'step')} could gain about {gain:.1f} s, compiling takes "
        f"about {cost:.0f} s"
    )
    return CompileDecision(
        gain > cost, f"{'compiled' if gain > cost else 'not compiled'}: {estimate}"
    )


def compile_decode_step(net: Transformer) -> DecodeStep:
    """Return the compiled forward pass for one token per row: one graph for any position, capacity
    and rows above one.

    Call it only if `cache.is_predictable`, and after one uncompiled step. That step computes what
    layers determine on their first run, so that nothing is recompiled.
    """
    return torch.compile(net.forward, dynamic=True, fullgraph=True)


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
    rows = [row for row, ids in enumerate(history) for _ in ids]
    in_text[rows, [token_id for ids in history for token_id in ids]] = True
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

    `rows` are the indices of the prompts that continue, `texts` all ids of each. A row that exceeds
    the model's last position continues from its last `config.window` tokens. `choice` is the
    `CompileDecision`; steps for rows of different lengths are never compiled.
    """

    def __init__(
        self,
        net: Transformer,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sequence: SequenceInfo | None = None,
        encoder_output: EncoderOutput | None = None,
        config: DecodingConfig = DEFAULT_DECODING,
    ) -> None:
        window = config.window
        decision = decide_compile(net, config.compile, max_new_tokens)
        same_length = sequence is None or sequence.start is not None
        self.choice = decision if same_length or not decision.should_compile else UNEQUAL_LENGTHS
        self._compiled_step = compile_decode_step(net) if self.choice.should_compile else None
        self._is_first_step = True  # the first step runs uncompiled; see compile_decode_step
        self.net = net
        self.memory = encoder_output
        self.count = max_new_tokens
        self.window = window
        self.texts = _real_token_ids(prompt, sequence)
        self.rows = list(range(len(self.texts)))
        self._max_positions = max_positions(net.spec.stacks[-1])
        self._cached_lengths = [len(text) for text in self.texts]  # cached tokens of each row
        check_prompt_length(net.spec, max(self._cached_lengths), max_new_tokens, window)
        self._prefill(prompt, sequence)

    def _prefill(self, ids: Tensor, tokens: SequenceInfo | None) -> None:
        """Run the model on the prompts and fill the caches."""
        at = tokens or SequenceInfo.contiguous(0, ids.shape[1], ids.device)
        self.cache = self.net.cache(batch=len(ids), capacity=ids.shape[1] + self.count)
        h = self.net.hidden(ids, sequence=at, source=self.memory, cache=self.cache)
        self.logits = self.net.apply_head(pool_last(h, at)[:, None])[:, 0]

    def append_tokens(self, ids: Sequence[int]) -> None:
        """Append one token to each row and compute the next logits."""
        self._cached_lengths = [length + 1 for length in self._cached_lengths]
        for text, token_id in zip(self.texts, ids, strict=True):
            text.append(token_id)
        if self._max_positions is not None and max(self._cached_lengths) > self._max_positions:
            self._restart_long_rows(self._max_positions)
            return
        x = torch.tensor(ids, device=self.logits.device)[:, None]
        graph = (
            None if self._is_first_step or not self.cache.is_predictable else self._compiled_step
        )
        self._is_first_step = False
        self.logits = (graph or self.net)(x, source=self.memory, cache=self.cache)[:, -1]

    def _restart_long_rows(self, longest: int) -> None:
        """Refill the caches: rows beyond the last position keep the end of their text, others keep
        everything.
        """
        self._cached_lengths = [
            length if length <= longest else self.window or 1 for length in self._cached_lengths
        ]
        ends = [
            text[-length:] for text, length in zip(self.texts, self._cached_lengths, strict=True)
        ]
        self._prefill(*pad_left(ends, self.logits.device))

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
        self._cached_lengths = [self._cached_lengths[n] for n in index]
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
    limits += [
        part.max_positions(spec)
        for run in stack.runs
        for block in run.blocks
        for spec in block.attention_specs.values()
        for _, part in spec.parts()
    ]
    return min((length for length in limits if length is not None), default=None)


def check_prompt_length(
    spec: ModelSpec, prompt_length: int, max_new_tokens: int, window: int | None
) -> None:
    """Raise if the prompt and the new tokens exceed the positions of the last stack.

    >>> from headwise import families
    >>> check_prompt_length(
    ...     families.read_model_spec({"model_type": "gpt2", "n_positions": 8}), 5, 6, None
    ... )
    Traceback (most recent call last):
    ValueError: 5 tokens and 6 new are 2 more than the 8 positions of gpt2 can take; ask for at most 4 new...
    """
    limit = max_positions(spec.stacks[-1])
    if limit is None:
        return
    where = f"the {limit} positions of {spec.name}"
    if window is not None and window > limit:
        raise ValueError(f"window={window} is more than {where}; give at most window={limit}")
    if prompt_length > limit:
        raise ValueError(
            f"a prompt of {pluralise(prompt_length, 'token')} is {prompt_length - limit} longer "
            f"than {where}; "
            f"read the last with window={limit}"
        )
    beyond = prompt_length + max_new_tokens - 1 - limit  # the last new token is never fed back
    if beyond > 0 and window is None:
        fact = (
            f"{pluralise(prompt_length, 'token')} and {max_new_tokens} new are {beyond} more "
            f"than {where} can take"
        )
        first = f"ask for at most {max_new_tokens - beyond} new"
        raise ValueError(
            f"{fact}; {first}, or go on from the last tokens alone with window={max(1, limit // 2)}"
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
    live: list[list[bool]] = tokens.is_real.expand(len(rows), -1).tolist()
    return [
        [token_id for token_id, is_real in zip(row, row_live, strict=True) if is_real]
        for row, row_live in zip(rows, live, strict=True)
    ]
