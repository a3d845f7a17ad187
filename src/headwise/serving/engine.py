"""Many requests answered by one model: they join and leave between steps."""

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
from .requests import RequestStream, RequestTiming, ServingRequest
from .scheduler import record_overtaking, select_next_request

DEFAULT_BATCHING = BatchingConfig()


class Engine:
    """A model that answers requests together, its memory for them within a budget of bytes.

    `submit` hands one in and gives the stream of its tokens. Whoever reads a stream drives all of them, step by step;
    inside `with engine.driven():` a thread does. A request is let in when the pages it may come to need are sure to be
    there, so none is ever put back: the same tokens as if it were alone, and no work done twice.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    >>> net = hw.build(hw.families.read_model_spec(config | {"num_hidden_layers": 2, "vocab_size": 11}), seed=0)
    >>> engine = Engine(net, budget=200_000)
    >>> one, two = engine.submit([3, 1, 4], max_new_tokens=5), engine.submit([1], max_new_tokens=3)
    >>> list(one) == hw.greedy_decode(net, torch.tensor([[3, 1, 4]]), max_new_tokens=5)[0], len(two.result())
    (True, 3)
    """

    def __init__(self, net: Transformer, *, budget: int, batching: BatchingConfig = DEFAULT_BATCHING) -> None:
        if not isinstance(net, Transformer):
            raise ValueError(f"net is of type {type(net).__name__}; give what hw.build made, or hw.load read")
        if type(budget) is not int or budget < 1:
            raise ValueError(f"budget={budget!r} is no number of bytes; give 2**30 for one GiB, say")
        TextGenerator.of(net, 1, 0.0, DEFAULT_DECODING)  # refuses a model that does not say which token comes next
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
        """Hand in ids or a text; what could never be answered is refused here. Any thread may.

        At a temperature it draws from stream 0 of the seed, as `hw.generate` for one prompt, or from those numbers.
        """
        request = self._make_request(prompt, max_new_tokens, temperature, config, seed)
        with self._condition:
            request.number, self._num_requests = self._num_requests, self._num_requests + 1
            self._waiting.append(request)
            self._condition.notify_all()
        return RequestStream(request, self._step_until, self._cancel)

    def step(self) -> bool:
        """Let requests in, read a chunk of prompts, and one token of every row; whether there is more to do."""
        with self._condition:
            while self._is_stepping:
                self._condition.wait()
            self._is_stepping = True
        self._run_step()
        with self._condition:
            return bool(self._waiting or self._running)

    def run(self) -> None:
        """Step until every request has ended."""
        self._step_until(lambda: not self._waiting and not self._running)

    @contextmanager
    def background_thread(self) -> Iterator[None]:
        """A thread that steps as long as there is something to do; it ends with the block, requests do not."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run_background, args=(stop,), name="headwise-engine", daemon=True)
        with self._condition:
            if self._has_background_thread:
                raise ValueError("a thread drives this engine already; leave its block first")
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
        """What was measured so far."""
        with self._condition:
            return ServingReport.of(self.memory, list(self._timings), self._runner)

    # --- who drives ----------------------------------------------------------------------------------------

    def _step_until(self, ready: Callable[[], bool]) -> None:
        """Step until that is so, or wait for it while somebody else steps."""
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
            except Exception as error:  # who waits for this thread would wait for ever
                self._fail_all(error)

    def _wait_for_work(self, stop: threading.Event) -> bool:
        """Wait for something to do, and take the right to do it; false when that is to end."""
        with self._condition:
            while not stop.is_set() and (self._is_stepping or not (self._waiting or self._running)):
                self._condition.wait()
            goes = not stop.is_set()
            self._is_stepping = self._is_stepping or goes
            return goes

    def _fail_all(self, error: Exception) -> None:
        with self._condition:
            for request in (*self._waiting, *self._running):
                request.fail(error)
            self._remove_ended()
            self._condition.notify_all()

    def _run_step(self) -> None:
        """One step, by who has the right to."""
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

    # --- who is there --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let in whoever is next, while what they may come to need is sure to be there."""
        while self._waiting:
            request = select_next_request(self._waiting, self.memory.batching)
            if not self.memory.can_admit([one.place for one in self._running if one.place], request.tokens):
                return
            record_overtaking(self._waiting, request)
            self._waiting.remove(request)
            request.place = self.memory.enter(request.tokens, request.root)
            self._running.append(request)

    def _remove_ended(self) -> None:
        """Let go of whoever has ended or was cancelled."""
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
        self, prompt: Any, count: int, temperature: float, how: DecodingConfig, seed: int | Numbers | None
    ) -> ServingRequest:
        """What is asked, or why it could never be answered."""
        asked = TextGenerator.of(self.net, count, temperature, how)
        if how.beams > 1:
            raise ValueError(f"beams={how.beams} of one request would be rows that none counts on; call hw.generate")
        if how.compile == "on":
            raise ValueError(
                "compile='on' makes a graph of rows that are alike, and requests are not; leave compile out"
            )
        given = parse_prompts(self.net, prompt, how.window)
        if given.form != "alone":
            raise ValueError(f"the prompt is a list of {len(given.rows)}; submit each by itself")
        ids, source = self._decoder_and_source_ids(given.rows[0])
        check_prompt_length(self.net.spec, len(ids), count, how.window)
        if len(ids) < self.memory.min_first_chunk:
            fact = f"the prompt has {len(ids)} tokens, but the first {self.memory.min_first_chunk} must come together"
            raise ValueError(f"{fact}; give {self.memory.min_first_chunk} or more")
        numbers = seed if isinstance(seed, Numbers) else make_random_streams(seed, 1)[0]
        answer = asked.answer(given.kind, given.rows[0])
        request = ServingRequest(ids, source, count, temperature, how, numbers, answer, given.kind)
        known = self._runner.longest
        self.memory.check(request.tokens if known is None else min(request.tokens, known))
        return request

    def _decoder_and_source_ids(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """What the last stack goes on from, and the source that another reads before it."""
        if self.net.spec.kind != "encoder-decoder":
            return list(prompt), []
        most = self.memory.batching.source
        if len(prompt) > most:
            raise ValueError(
                f"a source of {len(prompt)} tokens is {len(prompt) - most} longer than the {most} there is room for; "
                f"make the engine with Batching(source={len(prompt)})"
            )
        return list(get_decoder_start_ids(self.net)), prompt
