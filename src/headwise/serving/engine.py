"""The serving engine: continuous batching of many requests on one model within a memory budget."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..generation.decoding_config import DEFAULT_DECODING, DecodingConfig
from ..generation.decoding_state import check_prompt_length, max_positions
from ..generation.generate import TextGenerator, make_random_streams
from ..generation.prompts import get_decoder_start_ids, parse_prompts
from ..models import Transformer
from ..ops.counter_rng import RandomStream as Numbers
from .kv_memory import BatchingConfig, KVMemory
from .metrics import ServingReport
from .model_runner import MAX_RECORDED_STEPS, ModelRunner
from .requests import (
    RequestStream,
    RequestTiming,
    ServingRequest,
    record_overtaking,
    select_next_request,
)

DEFAULT_BATCHING = BatchingConfig()


class Engine:
    """Serves many requests with one model; the KV cache stays within `budget` bytes.

    `submit` adds a request and returns the stream of its tokens. Reading any stream runs engine
    steps for all requests; inside `with engine.background_thread():` a thread runs them. A request
    is admitted only when all pages that it may ever need are guaranteed. So no request is preempted
    or recomputed, and each gets the tokens that it would get alone.

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
    ...     list(first) == hw.greedy_decode(net, torch.tensor([[3, 1, 4]]), max_new_tokens=5)[0],
    ...     len(second.result()),
    ... )
    (True, 3)
    """

    def __init__(
        self, net: Transformer, *, budget: int, batching: BatchingConfig = DEFAULT_BATCHING
    ) -> None:
        if not isinstance(net, Transformer):
            raise ValueError(
                f"net is of type {type(net).__name__}; give a model from hw.build or hw.load"
            )
        if type(budget) is not int or budget < 1:
            raise ValueError(
                f"budget must be a positive integer of bytes, got {budget!r}; give 2**30 for one "
                "GiB"
            )
        TextGenerator.of(
            net, 1, 0.0, DEFAULT_DECODING
        )  # refuses models that are not language models
        self.net, self.memory = net.eval(), KVMemory(net, budget, batching)
        self._runner = ModelRunner(self.net, self.memory, max_positions(net.spec.stacks[-1]))
        self._condition = threading.Condition()
        self._waiting: list[ServingRequest] = []
        self._running: list[ServingRequest] = []
        self._timings: deque[RequestTiming] = deque(maxlen=MAX_RECORDED_STEPS)
        self._num_requests, self._is_stepping, self._has_background_thread = 0, False, False

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        config: DecodingConfig = DEFAULT_DECODING,
        seed: int | Numbers | None = None,
    ) -> RequestStream:
        """Add a request for ids or text and return its stream. Callable from any thread.

        Requests that could never run are refused here. With a temperature above 0, tokens are
        sampled from stream 0 of the seed, as `hw.generate` does for one prompt; `seed` may also be
        a `RandomStream` to sample from.
        """
        request = self._make_request(prompt, max_new_tokens, temperature, config, seed)
        with self._condition:
            request.number, self._num_requests = self._num_requests, self._num_requests + 1
            self._waiting.append(request)
            self._condition.notify_all()
        return RequestStream(request, self._step_until, self._cancel)

    def step(self) -> bool:
        """Admit requests, prefill one chunk of prompts and decode one token per row; return whether
        work remains.
        """
        with self._condition:
            while self._is_stepping:
                self._condition.wait()
            self._is_stepping = True
        self._run_step()
        with self._condition:
            return bool(self._waiting or self._running)

    def run(self) -> None:
        """Run steps until every request has ended."""
        self._step_until(lambda: not self._waiting and not self._running)

    @contextmanager
    def background_thread(self) -> Iterator[None]:
        """Run steps in a thread for the duration of the `with` block. Unfinished requests survive
        the block.
        """
        stop = threading.Event()
        thread = threading.Thread(
            target=self._run_background, args=(stop,), name="headwise-engine", daemon=True
        )
        with self._condition:
            if self._has_background_thread:
                raise ValueError(
                    "a background thread already runs this engine; leave its with block first"
                )
            self._has_background_thread = True
        thread.start()
        try:
            yield
        finally:
            with self._condition:
                stop.set()
                self._has_background_thread = False
                self._condition.notify_all()
            thread.join()

    def report(self) -> ServingReport:
        """Return the measurements so far."""
        with self._condition:
            return ServingReport.of(self.memory, list(self._timings), self._runner)

    # --- running steps ----------------------------------------------------------------------------

    def _step_until(self, ready: Callable[[], bool]) -> None:
        """Run steps until `ready()`; wait while another thread runs them."""
        while True:
            with self._condition:
                while not ready() and (self._is_stepping or self._has_background_thread):
                    self._condition.wait()
                if ready():
                    return
                self._is_stepping = True
            self._run_step()

    def _run_background(self, stop: threading.Event) -> None:
        while self._wait_for_work(stop):
            try:
                self._run_step()
            except (
                Exception
            ) as error:  # otherwise callers that wait for this thread would wait forever
                self._fail_all(error)

    def _wait_for_work(self, stop: threading.Event) -> bool:
        """Wait for work and claim the next step; return False once `stop` is set."""
        with self._condition:
            while not stop.is_set() and (self._is_stepping or not (self._waiting or self._running)):
                self._condition.wait()
            has_work = not stop.is_set()
            self._is_stepping = self._is_stepping or has_work
            return has_work

    def _fail_all(self, error: Exception) -> None:
        with self._condition:
            for request in (*self._waiting, *self._running):
                request.fail(error)
            self._remove_ended()
            self._condition.notify_all()

    def _run_step(self) -> None:
        """Run one step; the caller has set `_is_stepping`."""
        try:
            with self._condition:
                self._remove_ended()
                self._admit()
                running = list(self._running)
            self._runner.step(running)
        finally:
            with self._condition:
                self._remove_ended()
                self._is_stepping = False
                self._condition.notify_all()

    # --- admission and removal --------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting requests while all pages that they may ever need are guaranteed."""
        while self._waiting:
            request = select_next_request(self._waiting, self.memory.batching)
            if not self.memory.can_admit(
                [running.place for running in self._running if running.place], request.tokens
            ):
                return
            record_overtaking(self._waiting, request)
            self._waiting.remove(request)
            request.place = self.memory.enter(request.tokens, request.namespace)
            self._running.append(request)

    def _remove_ended(self) -> None:
        """Remove requests that have ended or were cancelled, and free their memory."""
        for requests in (self._waiting, self._running):
            for request in [request for request in requests if request.cancelled or request.ended]:
                request.ended = request.ended or "cancelled"
                requests.remove(request)
                if request.place is not None:
                    self.memory.leave(request.place)
                    request.place = None
                self._timings.append(request.timing)

    def _cancel(self, request: ServingRequest) -> None:
        with self._condition:
            request.cancelled = True
            if not self._is_stepping:
                self._remove_ended()
            self._condition.notify_all()

    def _make_request(
        self,
        prompt: Any,
        count: int,
        temperature: float,
        how: DecodingConfig,
        seed: int | Numbers | None,
    ) -> ServingRequest:
        """Return the request, or raise if it could never run."""
        generator = TextGenerator.of(self.net, count, temperature, how)
        if how.beams > 1:
            raise ValueError(
                f"the engine does not support beam search (beams={how.beams}); call hw.generate"
            )
        if how.compile == "on":
            raise ValueError(
                "the engine does not support compile='on': its rows differ in length; leave "
                "compile out"
            )
        prompts = parse_prompts(self.net, prompt, how.window)
        if prompts.form != "alone":
            raise ValueError(
                f"the prompt is a list of {len(prompts.rows)} prompts; submit each separately"
            )
        ids, source = self._decoder_and_source_ids(prompts.rows[0])
        check_prompt_length(self.net.spec, len(ids), count, how.window)
        if len(ids) < self.memory.min_first_chunk:
            fact = f"the prompt has {len(ids)} tokens"
            raise ValueError(
                f"{fact}, but this attention pattern needs at least {self.memory.min_first_chunk}"
            )
        numbers = seed if isinstance(seed, Numbers) else make_random_streams(seed, 1)[0]
        completion = generator.answer(prompts.kind, prompts.rows[0])
        request = ServingRequest(
            ids, source, count, temperature, how, numbers, completion, prompts.kind, generator.ends
        )
        max_length = self._runner.longest
        self.memory.check(request.tokens if max_length is None else min(request.tokens, max_length))
        return request

    def _decoder_and_source_ids(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Return the ids that the decoder continues, and the source ids of an encoder-decoder."""
        if self.net.spec.kind != "encoder-decoder":
            return list(prompt), []
        limit = self.memory.batching.source
        if len(prompt) > limit:
            raise ValueError(
                f"the source of {len(prompt)} tokens exceeds the limit of {limit}; "
                f"give Engine(..., batching=BatchingConfig(source={len(prompt)}))"
            )
        return list(get_decoder_start_ids(self.net)), prompt
