"""Continuous batching of many requests on one model within a memory budget: requests join and leave
between steps.

A step prefills a chunk of prompts and decodes one token per row, in few model calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.cache import PagedSequence
from ...kernels.counter_rng import RandomStream
from ...util.errors import SpecError
from .. import Transformer
from ..embeddings_heads import CheckedIds
from .decoding_config import DEFAULT_DECODING, DecodingConfig
from .decoding_state import NAN_ID, check_prompt_length, choose_tokens
from .generate import TextGenerator, make_random_streams, parse_prompts
from .kv_memory import BatchingConfig, KVMemory
from .text_output import Completion

DEFAULT_BATCHING = BatchingConfig()
CALL_OVERHEAD_BYTES = 2**25  # fixed overhead of a call, as bytes that could be moved meanwhile
CALL_OVERHEAD_TOKENS = 32  # cost of reading the weights once, as tokens that could be computed
MAX_POSTPONED_STEPS = 16  # steps that only read prompts although rows could decode
GATHER_PASSES = 3  # a gathered page is read, written, and read again
MAX_RECORDED_STEPS = 2**16  # steps to keep records of


@dataclass(eq=False)
class RequestStream:
    """A request, and an iterator over the ids of its output as they arrive.

    Reading runs steps of the engine, for all requests. `ids` are the ids so far; `ended` is
    "length", "stop", "cancelled" or "failed", and empty while the request runs; `error` is why it
    failed. `context` holds the ids of the prompt and of the output, also those that a stop text may
    still take back.
    """

    context: list[int]
    count: int
    temperature: float
    config: DecodingConfig
    numbers: RandomStream
    completion: Completion
    kind: str  # of the prompt: "text" or "ids"
    row: PagedSequence
    step: Callable[[], object]
    number: int
    ids: list[int] = field(default_factory=list[int])
    ended: str = ""
    error: Exception | None = None
    num_output_ids: int = 0
    num_read: int = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while len(self.ids) == self.num_read and not self.ended:
            self.step()
        if len(self.ids) > self.num_read:
            self.num_read += 1
            return self.ids[self.num_read - 1]
        if self.error is not None:
            raise self.error
        raise StopIteration

    @property
    def text(self) -> str:
        """The text so far, if the prompt was text."""
        return self.completion.text

    def result(self) -> list[int] | str:
        """Run the engine until the end and return the output: text for text, else ids. A cancelled
        request returns what it has.
        """
        while not self.ended:
            self.step()
        if self.error is not None:
            raise self.error
        return self.text if self.kind == "text" else list(self.ids)

    def cancel(self) -> None:
        """End the request; the next step of the engine frees its memory."""
        self.ended = self.ended or "cancelled"

    @property
    def num_pending(self) -> int:
        """Number of ids that are not in the cache yet."""
        return len(self.context) - self.row.length

    @property
    def is_prefilling(self) -> bool:
        """True if it has more than the last output token to read."""
        return not self.row.length or self.num_pending > 1

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.ended = "failed"
        self.error = error
        self.completion.close()

    def take(self, token_id: int) -> None:
        """Append an output token and update the end state."""
        self.context.append(token_id)
        self.num_output_ids += 1
        self.completion.take(token_id)
        if not self.completion.over and self.num_output_ids == self.count:
            self.completion.close()
            self.ended = "length"
        if self.completion.over:
            self.ended = self.ended or "stop"
        self.ids += self.completion.take_new_ids()


RequestPart = tuple[RequestStream, int]  # a request and its number of tokens in this call


class StepRecord(NamedTuple):
    """One step: decoded rows and their total context; prompts and their new tokens."""

    rows: int
    context: int
    num_prompts: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class EngineReport:
    """Requests that have ended with their tokens, all steps of the engine, and memory against the
    budget.

    `computed` counts prefilled prompt tokens, `shared` prompt tokens found in the cache.
    """

    requests: int
    tokens: int
    computed: int
    shared: int
    seconds: float
    peak_bytes: int
    budget: int
    steps: tuple[StepRecord, ...] = field(repr=False)

    @property
    def data(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return asdict(self) | {"steps": len(self.steps), "tokens_per_second": rate}

    def __str__(self) -> str:
        data = self.data
        return (
            f"{self.requests} requests, {self.tokens} tokens in {self.seconds:,.2f} s: "
            f"{data['tokens_per_second']:,.1f} tokens per second; prompt tokens computed "
            f"{self.computed:,}, found in the cache {self.shared:,}; peak {self.peak_bytes:,} of "
            f"{self.budget:,} bytes"
        )


class Engine:
    """Answers many requests with one decoder; the KV cache stays within `budget` bytes.

    `submit` adds a request and returns the stream of its tokens. Reading any stream runs engine
    steps for all requests. Requests are admitted in the order of their arrival, each when all pages
    that it may ever need are guaranteed. So no request is preempted or recomputed, and each gets
    the tokens that it would get alone.

    >>> import headwise as hw, torch
    >>> config = {
    ...     "model_type": "llama",
    ...     "hidden_size": 8,
    ...     "intermediate_size": 12,
    ...     "num_attention_heads": 2,
    ... }
    >>> net = hw.build(
    ...     hw.families.read_model_spec(config | {"num_hidden_layers": 2, "vocab_size": 11}), seed=0
    ... )
    >>> engine = Engine(net, budget=200_000)
    >>> first, second = (
    ...     engine.submit([3, 1, 4], max_new_tokens=5),
    ...     engine.submit([1], max_new_tokens=3),
    ... )
    >>> (
    ...     list(first)
    ...     == hw.generation.greedy_decode(net, torch.tensor([[3, 1, 4]]), max_new_tokens=5)[0],
    ...     len(second.result()),
    ... )
    (True, 3)
    """

    def __init__(
        self, net: Transformer, *, budget: int, batching: BatchingConfig = DEFAULT_BATCHING
    ) -> None:
        if type(budget) is not int or budget < 1:
            raise ValueError(
                f"budget must be a positive integer of bytes, got {budget!r}; give 2**30 for one "
                "GiB"
            )
        # refuses models that are not language models
        TextGenerator.from_options(net, 1, 0.0, DEFAULT_DECODING)
        self.net = net.eval()
        self.memory = KVMemory(net, budget, batching)
        self.steps: deque[StepRecord] = deque(maxlen=MAX_RECORDED_STEPS)
        self._waiting = list[RequestStream]()
        self._running = list[RequestStream]()
        self._num_requests = self._num_tokens = 0
        self._peak = self._shared = 0  # bytes, tokens
        self._num_postponed = 0  # steps in a row that only read prompts
        weights = list(net.stacks.values())[-1].parameters()
        moved = sum(weight.nbytes for weight in weights) + CALL_OVERHEAD_BYTES
        self._call_cost_pages = moved / (GATHER_PASSES * self.memory.page_bytes)

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        config: DecodingConfig = DEFAULT_DECODING,
        seed: int | RandomStream | None = None,
    ) -> RequestStream:
        """Add a request for ids or text and return its stream.

        Requests that could never run are refused here. With a temperature above 0, tokens are
        sampled from stream 0 of the seed, as `hw.generate` does for one prompt; `seed` may also be
        a `RandomStream` to sample from.
        """
        generator = TextGenerator.from_options(self.net, max_new_tokens, temperature, config)
        if config.compile:
            raise ValueError("the engine does not compile its steps; leave compile=True out")
        if config.beams > 1:
            raise ValueError(
                f"the engine does not support beam search (beams={config.beams}); call hw.generate"
            )
        prompts = parse_prompts(self.net, prompt)
        if prompts.form != "alone":
            raise ValueError(
                f"the prompt is a list of {len(prompts.rows)} prompts; submit each separately"
            )
        ids = list(prompts.rows[0])
        check_prompt_length(self.net.spec, len(ids), max_new_tokens)
        if len(ids) < self.memory.min_first_chunk:
            fact = f"the prompt has {len(ids)} tokens"
            raise ValueError(
                f"{fact}, but this attention pattern needs at least {self.memory.min_first_chunk}"
            )
        request = RequestStream(
            context=ids,
            count=max_new_tokens,
            temperature=temperature,
            config=config,
            numbers=seed if isinstance(seed, RandomStream) else make_random_streams(seed, 1)[0],
            completion=generator.answer(prompts.kind, prompts.rows[0]),
            kind=prompts.kind,
            # The last output token is never fed back.
            row=self.memory.new_row(len(ids) + max_new_tokens - 1),
            step=self.step,
            number=self._num_requests,
        )
        self._num_requests += 1
        self._waiting.append(request)
        return request

    def step(self) -> bool:
        """Admit requests, prefill one chunk of prompts and decode one token per row; return whether
        work remains.
        """
        try:
            self._remove_ended()
            self._admit()
            self._run_step(list(self._running))
        finally:
            self._remove_ended()
        return bool(self._waiting or self._running)

    def finish_requests(self) -> None:
        """Run steps until every request has ended."""
        while self.step():
            pass

    def report(self) -> EngineReport:
        """Return the measurements so far."""
        return EngineReport(
            requests=self._num_requests - len(self._waiting) - len(self._running),
            tokens=self._num_tokens,
            computed=sum(step.tokens for step in self.steps),
            shared=self._shared,
            seconds=sum(step.seconds for step in self.steps),
            peak_bytes=self._peak,
            budget=self.memory.budget,
            steps=tuple(self.steps),
        )

    def _admit(self) -> None:
        """Admit waiting requests while all pages that they may ever need are guaranteed."""
        while self._waiting:
            rows = [request.row for request in self._running]
            if not self.memory.can_admit(rows, self._waiting[0].row):
                return
            self._running.append(self._waiting.pop(0))

    def _remove_ended(self) -> None:
        """Remove requests that have ended, and free their pages."""
        for requests in (self._waiting, self._running):
            for request in [request for request in requests if request.ended]:
                requests.remove(request)
                self._num_tokens += request.num_output_ids
                self.memory.pool.block_tables.free_sequence(request.row)

    def _run_step(self, requests: Sequence[RequestStream]) -> None:
        begun = perf_counter()
        prompts = self._schedule_prefill([request for request in requests if request.is_prefilling])
        self._run_calls(prompts)
        rows = self._rows_to_decode(requests, is_reading=bool(prompts))
        context = sum(request.row.length + 1 for request, _ in rows)
        self._run_calls(rows)
        if prompts or rows:
            num_tokens = sum(count for _, count in prompts)
            seconds = perf_counter() - begun
            self.steps.append(StepRecord(len(rows), context, len(prompts), num_tokens, seconds))

    def _rows_to_decode(
        self, requests: Sequence[RequestStream], *, is_reading: bool
    ) -> list[RequestPart]:
        """Return the rows that get a token in this step: all rows with read prompts, or none.

        A step of few rows takes almost as long as one of many. So the first rows of a burst wait
        for the others until half of the prompts are read, unless that takes too long. Rows that
        have begun to decode never wait.
        """
        going = [request for request in requests if not request.ended]
        rows = [(request, 1) for request in going if not request.is_prefilling]
        is_burst = (
            is_reading
            and len(going) > 2 * len(rows)
            and all(request.num_output_ids <= 1 for request, _ in rows)
        )
        self._num_postponed = self._num_postponed + 1 if rows and is_burst else 0
        if self._num_postponed > MAX_POSTPONED_STEPS:
            self._num_postponed = 0
        return [] if self._num_postponed else rows

    def _schedule_prefill(self, reading: Sequence[RequestStream]) -> list[RequestPart]:
        """Choose prompts and their token counts; a request that could share a prefix being computed
        waits for it.
        """
        tables = self.memory.pool.block_tables
        candidates = list[RequestPart]()  # with the number of tokens that are cached
        in_progress = set[bytes]()
        for request in reading:
            length = request.row.length or tables.find_prefix(
                request.row, request.context, self.memory.min_first_chunk
            )
            next_hash = tables.next_hashes(request.row, request.context, length)
            if next_hash is None or next_hash not in in_progress:
                candidates.append((request, length))
            if next_hash is not None:
                in_progress.add(next_hash)
        pending = [len(request.context) - length for request, length in candidates]
        counts = list(
            split_prefill(pending, self.memory.batching.chunk, self.memory.min_first_chunk)
        )
        parts = list[RequestPart]()
        for (request, length), count in zip(candidates, counts, strict=False):
            if length > request.row.length:
                tables.reuse_prefix(request.row, length)
                self._shared += length
            parts.append((request, count))
        return parts

    # --- model calls ------------------------------------------------------------------------------

    def _run_calls(self, parts: Sequence[RequestPart]) -> None:
        """Run the parts in calls of similar size: by new tokens, or by pages if each part has one
        token.

        If no layer gathers pages to decode, all rows share one call, because a long row does not
        slow the others.
        """
        is_decode = all(count == 1 for _, count in parts)
        if is_decode and parts and not self.memory.gathers:
            self._run_call(parts)
            return

        def size(part: RequestPart) -> int:
            return self._gathered_pages(part) if is_decode else part[1]

        ordered = sorted(parts, key=size, reverse=True)
        call_cost = self._call_cost_pages if is_decode else CALL_OVERHEAD_TOKENS
        for count in split_by_size([size(part) for part in ordered], call_cost):
            call, ordered = ordered[:count], ordered[count:]
            # Its pages, padded to the longest row, must fit into the gather buffer.
            widest = max(map(self._gathered_pages, call))
            max_rows = max(1, self.memory.pages // max(1, widest))
            for first in range(0, count, max_rows):
                self._run_call(call[first : first + max_rows])

    def _gathered_pages(self, part: RequestPart) -> int:
        return self.memory.max_gathered_pages(part[0].row, part[1])

    def _run_call(self, parts: Sequence[RequestPart]) -> None:
        """Run one call; if it fails, run each part alone, so that only the faulty request fails."""
        try:
            done, logits = self._forward(parts)
            self._append_tokens(done, logits)
        except Exception as error:
            if len(parts) == 1:
                parts[0][0].fail(error)
                return
            for part in parts:
                self._run_call([part])

    def _forward(self, parts: Sequence[RequestPart]) -> tuple[list[RequestStream], Tensor]:
        """Return the fully read requests and their next-token logits; a failed call changes no
        state.
        """
        rows = [request.row for request, _ in parts]
        counts = [count for _, count in parts]
        before = [row.length for row in rows]
        longest = max(counts)
        ids = [
            request.context[start : start + count] + [0] * (longest - count)
            for (request, count), start in zip(parts, before, strict=True)
        ]
        device = self.memory.device
        try:
            with torch.no_grad():
                batch, cache = self.memory.call(rows)
                at = batch.next_positions(counts)
                x = CheckedIds(torch.tensor(ids, device=device))
                h = self.net.hidden(x, sequence=at, cache=cache)
                done = [n for n, (request, _) in enumerate(parts) if request.num_pending == 0]
                ends = [counts[n] - 1 for n in done]
                index = torch.tensor([done, ends], dtype=torch.int64, device=device)
                logits = self.net.apply_head(h[index[0], index[1]][:, None])[:, 0]
        except BaseException:
            for row, length in zip(rows, before, strict=True):
                row.length = length
            raise
        self._peak = max(self._peak, self.memory.used)
        for request, _ in parts:
            self.memory.pool.block_tables.publish_prefix(request.row, request.context)
        return [parts[n][0] for n in done], logits

    def _append_tokens(self, requests: Sequence[RequestStream], logits: Tensor) -> None:
        """Choose and append the next token of each request; rows with equal options are sampled
        together.
        """
        groups: dict[object, list[int]] = defaultdict(list)
        for n, request in enumerate(requests):
            groups[request.temperature, request.config].append(n)
        chosen: list[Tensor] = []
        for rows in groups.values():
            group = [requests[n] for n in rows]
            ids = choose_tokens(
                # without a copy if all rows are alike
                logits if len(rows) == len(logits) else logits[rows],
                [request.context for request in group],
                temperature=group[0].temperature,
                config=group[0].config,
                streams=[request.numbers for request in group],
            )
            chosen.append(ids)
        token_ids = torch.cat(chosen).tolist() if chosen else []  # the one wait of a step
        for n, token_id in zip(chain.from_iterable(groups.values()), token_ids, strict=True):
            _give_token(requests[n], token_id)


def _give_token(request: RequestStream, token_id: int) -> None:
    if token_id == NAN_ID:
        request.fail(ValueError("the model produced NaN logits; check its weights and the prompt"))
        return
    try:
        request.take(token_id)
    except SpecError as error:  # the tokenizer failed on the text of this request
        request.fail(error)


def split_prefill(
    pending: Iterable[int], chunk_size: int, min_first_chunk: int = 0
) -> Iterator[int]:
    """Yield how many tokens of each prompt a step prefills, in order, up to `chunk_size` in total.

    The first `min_first_chunk` tokens of a prompt must be in one step; they wait for a step with
    room, or go first in one even if they exceed it.

    >>> (
    ...     list(split_prefill([100, 3, 5], 64)),
    ...     list(split_prefill([5, 3, 70], 64)),
    ...     list(split_prefill([5, 3, 70], 64, min_first_chunk=60)),
    ... )
    ([64], [5, 3, 56], [5, 3])
    """
    remaining = chunk_size
    for number, count in enumerate(pending):
        least = min(count, min_first_chunk)
        num_tokens = max(min(count, remaining), 0 if number else least)
        if num_tokens < max(least, 1):
            return
        remaining -= num_tokens
        yield num_tokens


def split_by_size(sizes: Sequence[int], call_cost: float) -> list[int]:
    """Return the number of rows in each call, for rows sorted by decreasing size.

    A call costs as much as if all its rows had the size of the first. A call is split if that saves
    more than `call_cost`.

    >>> (
    ...     split_by_size([40, 39, 2, 2, 2, 1], call_cost=100),
    ...     split_by_size([40, 39, 2], call_cost=100),
    ... )
    ([2, 4], [3])
    """
    count = len(sizes)
    if count < 2:
        return [count] * count
    saved, at = max(((sizes[0] - sizes[n]) * (count - n), n) for n in range(1, count))
    if saved <= call_cost:
        return [count]
    return split_by_size(sizes[:at], call_cost) + split_by_size(sizes[at:], call_cost)
