"""Runs one engine step: prefills a chunk of prompts and decodes one token per row, in few model
calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from ...util.errors import SpecError
from .. import Transformer
from .decoding_state import sample_tokens
from .kv_memory import KVMemory
from .requests import Request, split_by_size, split_prefill

CALL_OVERHEAD_BYTES = 2**25  # fixed overhead of a call, as bytes that could be moved meanwhile
CALL_OVERHEAD_TOKENS = 32  # cost of reading the weights once, as tokens that could be computed
MAX_POSTPONED_STEPS = 16  # steps that only read prompts although rows could decode
GATHER_PASSES = 3  # a gathered page is read, written, and read again
MAX_RECORDED_STEPS = 2**16  # steps whose records are kept

RequestPart = tuple[Request, int]  # a request and its number of tokens in this call


class StepRecord(NamedTuple):
    """One step: decoded rows and their total context; prompts, their new tokens and their cached
    tokens (`past`).
    """

    rows: int
    context: int
    num_prompts: int
    tokens: int
    past: int
    seconds: float


class BatchRunner:
    """Calls the model for the rows of an engine."""

    def __init__(self, net: Transformer, memory: KVMemory, max_positions: int | None) -> None:
        self.net = net
        self.memory = memory
        self.longest = max_positions
        self.steps: deque[StepRecord] = deque(maxlen=MAX_RECORDED_STEPS)
        self.peak = self.shared = self.sources = 0  # bytes, tokens, tokens
        self._num_postponed = 0  # steps in a row that only read prompts
        moved = (
            sum(p.nbytes for p in list(net.stacks.values())[-1].parameters()) + CALL_OVERHEAD_BYTES
        )
        self._call_cost_pages = (
            moved / (GATHER_PASSES * memory.page_bytes) if memory.page_bytes else float("inf")
        )

    def step(self, requests: Sequence[Request]) -> None:
        """Run one step for these requests."""
        begun = perf_counter()
        for request in requests:
            self._restart_long_request(request)
        prompts = self._schedule_prefill([request for request in requests if request.is_prefilling])
        past = sum(request.row.length for request, _ in prompts)
        self._run_calls(prompts)
        rows = self._rows_to_decode(requests, is_reading=bool(prompts))
        context = sum(request.row.length + 1 for request, _ in rows)
        self._run_calls(rows)
        if prompts or rows:
            num_tokens = sum(count for _, count in prompts)
            seconds = perf_counter() - begun
            self.steps.append(
                StepRecord(len(rows), context, len(prompts), num_tokens, past, seconds)
            )

    def _rows_to_decode(
        self, requests: Sequence[Request], *, is_reading: bool
    ) -> list[RequestPart]:
        """The rows that get a token in this step: all whose prompts are read, or none.

        A step of few rows takes almost as long as one of many. So the first rows of a burst wait
        for the others until half of the prompts are read, unless that takes too long. Rows that
        have begun to decode never wait.
        """
        rows = [
            (request, 1) for request in requests if not request.ended and not request.is_prefilling
        ]
        num_waiting = sum(not request.ended and request.is_prefilling for request in requests)
        is_burst = (
            is_reading
            and num_waiting > len(rows)
            and all(request.num_output_ids <= 1 for request, _ in rows)
        )
        self._num_postponed = self._num_postponed + 1 if rows and is_burst else 0
        if self._num_postponed > MAX_POSTPONED_STEPS:
            self._num_postponed = 0
        return [] if self._num_postponed else rows

    # --- prefill ----------------------------------------------------------------------------------

    def _schedule_prefill(self, reading: Sequence[Request]) -> list[RequestPart]:
        """Choose prompts and their token counts; a request that could share a prefix being computed
        waits for it.
        """
        candidates: list[tuple[Request, int]] = []

        def unread() -> Iterator[int]:
            in_progress = set[bytes]()
            sources = 0
            for request in reading:
                length = self._num_cached_tokens(request)
                next_hash = (
                    self.memory.pool.block_tables.next_hashes(request.row, request.context, length)
                    if self.memory.shares
                    else None
                )
                if next_hash in in_progress or (
                    sources and sources + len(request.source) > self.memory.batching.chunk
                ):
                    continue
                in_progress |= {next_hash} if next_hash else set()
                sources += len(request.source)
                candidates.append((request, length))
                yield len(request.context) - length

        counts = list(
            split_prefill(unread(), self.memory.batching.chunk, self.memory.min_first_chunk)
        )
        for request, length in candidates[: len(counts)]:
            self._start_request(request, length)
        return [
            (request, n)
            for (request, _), n in zip(candidates, counts, strict=False)
            if not request.ended
        ]

    def _num_cached_tokens(self, request: Request) -> int:
        """Number of its tokens that are cached, or that it could share before it starts."""
        row = request.row
        block_tables = self.memory.pool.block_tables
        if row.length or not self.memory.shares:
            return row.length
        return block_tables.find_prefix(row, request.context, self.memory.min_first_chunk)

    def _start_request(self, request: Request, length: int) -> None:
        """Reuse a cached prefix and encode the source."""
        if request.row.length:
            return
        if length:
            self.memory.pool.block_tables.reuse_prefix(request.row, length)
            self.shared += length
        if request.source:
            self.sources += len(request.source)
            try:
                with torch.no_grad():
                    source = torch.tensor([request.source], device=self.memory.device)
                    self.memory.remember(request.placed, self.net.encode(source))
            except Exception as error:  # other requests continue
                request.fail(error)

    def _restart_long_request(self, request: Request) -> None:
        """Restart a request from its last tokens once it exceeds the last position."""
        if self.longest is not None and len(request.context) > self.longest:
            request.base = len(request.ids) - (request.config.window or 1)
            self.memory.restart(request.placed)

    # --- model calls ------------------------------------------------------------------------------

    def _run_calls(self, parts: Sequence[RequestPart]) -> None:
        """Run the parts in calls of similar size: by new tokens, or by pages if each part has one
        token.

        If no layer gathers pages to decode, all rows share one call, because a long row does not
        slow the others.
        """
        is_decode = all(count == 1 for _, count in parts)
        if is_decode and parts and not self.memory.reading.gathers:
            self._run_call(parts)
            return
        size = {
            request.number: self._gathered_pages((request, count)) if is_decode else count
            for request, count in parts
        }
        ordered = sorted(parts, key=lambda part: -size[part[0].number])
        for count in split_by_size(
            [size[request.number] for request, _ in ordered],
            self._call_cost_pages if is_decode else CALL_OVERHEAD_TOKENS,
        ):
            for call_parts in self._split_by_buffer(ordered[:count]):
                self._run_call(call_parts)
            ordered = ordered[count:]

    def _split_by_buffer(self, parts: Sequence[RequestPart]) -> Iterator[Sequence[RequestPart]]:
        """Split the parts so that their pages, padded to the longest row, fit into the gather
        buffer.
        """
        widest = max(map(self._gathered_pages, parts))
        max_rows = max(1, self.memory.pages // max(1, widest))
        yield from (parts[first : first + max_rows] for first in range(0, len(parts), max_rows))

    def _gathered_pages(self, part: RequestPart) -> int:
        return self.memory.max_gathered_pages(part[0].placed, part[1])

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

    def _forward(self, parts: Sequence[RequestPart]) -> tuple[list[Request], Tensor]:
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
        try:
            with torch.no_grad():
                call = self.memory.call([request.placed for request, _ in parts])
                at = call.paged_batch.next_positions(counts)
                x = torch.tensor(ids, device=self.memory.device)
                h = self.net.hidden(x, sequence=at, source=call.memory, cache=call.caches)
                done = [n for n, (request, _) in enumerate(parts) if request.num_pending == 0]
                ends = torch.tensor(
                    [counts[n] - 1 for n in done], dtype=torch.int64, device=h.device
                )
                logits = self.net.apply_head(
                    h[torch.tensor(done, dtype=torch.int64, device=h.device), ends][:, None]
                )[:, 0]
                self.memory.keep(call)
        except BaseException:
            for row, length in zip(rows, before, strict=True):
                row.length = length
            raise
        self.peak = max(self.peak, self.memory.used)
        for request, _ in parts if self.memory.shares else ():
            self.memory.pool.block_tables.publish_prefix(request.row, request.context)
        return [parts[n][0] for n in done], logits

    def _append_tokens(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Choose and append the next token of each request; rows with equal options are sampled
        together.
        """
        groups: dict[object, list[int]] = defaultdict(list)
        broken = logits.amax(-1).isnan().tolist()  # a NaN is the maximum of its row
        for n, request in enumerate(requests):
            if broken[n]:
                request.fail(
                    ValueError("the model produced NaN logits; check its weights and the prompt")
                )
            else:
                groups[request.temperature, request.config].append(n)
        for rows in groups.values():
            group = [requests[n] for n in rows]
            numbers = [request.numbers for request in group] if group[0].temperature else []
            past = [request.ids for request in group]
            temperature = group[0].temperature
            how = group[0].config
            chosen = (
                logits if len(rows) == len(logits) else logits[rows]
            )  # without a copy if all rows are alike
            ids = sample_tokens(chosen, past, temperature=temperature, config=how, streams=numbers)
            for request, token_id in zip(group, ids, strict=True):
                try:
                    request.take(token_id)
                except SpecError as error:  # the tokenizer failed on the text of this request
                    request.fail(error)
