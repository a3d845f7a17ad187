"""Many requests answered by one model: they join and leave between steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..generation.decoding_config import USUAL, Decoding
from ..generation.decoding_state import check_room, longest
from ..generation.generate import Asked, streams_of
from ..generation.prompts import beginning, taken
from ..models import Transformer
from ..ops.counter_rng import RandomStream as Numbers
from .kv_memory import Batching, Room
from .metrics import Report
from .model_runner import KEPT, Stepping
from .requests import Request, Stream, Timing
from .scheduler import first, overtake

PLAIN = Batching()


class Engine:
    """A model that answers requests together, its memory for them within a budget of bytes.

    `submit` hands one in and gives the stream of its tokens. Whoever reads a stream drives all of them, step by step;
    inside `with engine.driven():` a thread does. A request is let in when the pages it may come to need are sure to be
    there, so none is ever put back: the same tokens as if it were alone, and no work done twice.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    >>> net = hw.build(hw.families.read(config | {"num_hidden_layers": 2, "vocab_size": 11}), seed=0)
    >>> engine = Engine(net, budget=200_000)
    >>> one, two = engine.submit([3, 1, 4], max_new_tokens=5), engine.submit([1], max_new_tokens=3)
    >>> list(one) == hw.greedy(net, torch.tensor([[3, 1, 4]]), count=5)[0], len(two.result())
    (True, 3)
    """

    def __init__(self, net: Transformer, *, budget: int, batching: Batching = PLAIN) -> None:
        if not isinstance(net, Transformer):
            raise ValueError(f"net is of type {type(net).__name__}; give what hw.build made, or hw.load read")
        if type(budget) is not int or budget < 1:
            raise ValueError(f"budget={budget!r} is no number of bytes; give 2**30 for one GiB, say")
        Asked.of(net, 1, 0.0, USUAL)  # refuses a model that does not say which token comes next
        self.net, self.room = net.eval(), Room(net, budget, batching)
        self._stepping = Stepping(self.net, self.room, longest(net.described.stacks[-1]))
        self._news = threading.Condition()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._ended: deque[Timing] = deque(maxlen=KEPT)
        self._count, self._driving, self._background = 0, False, False

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        how: Decoding = USUAL,
        seed: int | Numbers | None = None,
    ) -> Stream:
        """Hand in ids or a text; what could never be answered is refused here. Any thread may.

        At a temperature it draws from stream 0 of the seed, as `hw.generate` for one prompt, or from those numbers.
        """
        request = self._request(prompt, max_new_tokens, temperature, how, seed)
        with self._news:
            request.number, self._count = self._count, self._count + 1
            self._waiting.append(request)
            self._news.notify_all()
        return Stream(request, self._drive, self._cancel)

    def step(self) -> bool:
        """Let requests in, read a chunk of prompts, and one token of every row; whether there is more to do."""
        with self._news:
            while self._driving:
                self._news.wait()
            self._driving = True
        self._once()
        with self._news:
            return bool(self._waiting or self._running)

    def run(self) -> None:
        """Step until every request has ended."""
        self._drive(lambda: not self._waiting and not self._running)

    @contextmanager
    def driven(self) -> Iterator[None]:
        """A thread that steps as long as there is something to do; it ends with the block, requests do not."""
        stop = threading.Event()
        thread = threading.Thread(target=self._keep_on, args=(stop,), name="headwise-engine", daemon=True)
        with self._news:
            if self._background:
                raise ValueError("a thread drives this engine already; leave its block first")
            self._background = True
        thread.start()
        try:
            yield
        finally:
            with self._news:
                stop.set()
                self._background = False
                self._news.notify_all()
            thread.join()

    def report(self) -> Report:
        """What was measured so far."""
        with self._news:
            return Report.of(self.room, list(self._ended), self._stepping)

    # --- who drives ----------------------------------------------------------------------------------------

    def _drive(self, ready: Callable[[], bool]) -> None:
        """Step until that is so, or wait for it while somebody else steps."""
        while True:
            with self._news:
                while not ready() and (self._driving or self._background):
                    self._news.wait()
                if ready():
                    return
                self._driving = True
            self._once()

    def _keep_on(self, stop: threading.Event) -> None:
        while self._called(stop):
            try:
                self._once()
            except Exception as error:  # who waits for this thread would wait for ever
                self._end_all(error)

    def _called(self, stop: threading.Event) -> bool:
        """Wait for something to do, and take the right to do it; false when that is to end."""
        with self._news:
            while not stop.is_set() and (self._driving or not (self._waiting or self._running)):
                self._news.wait()
            goes = not stop.is_set()
            self._driving = self._driving or goes
            return goes

    def _end_all(self, error: Exception) -> None:
        with self._news:
            for request in (*self._waiting, *self._running):
                request.fail(error)
            self._sweep()
            self._news.notify_all()

    def _once(self) -> None:
        """One step, by who has the right to."""
        try:
            with self._news:
                self._sweep()
                self._admit()
                running = list(self._running)
            self._stepping.step(running)
        finally:
            with self._news:
                self._sweep()
                self._driving = False
                self._news.notify_all()

    # --- who is there --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let in whoever is next, while what they may come to need is sure to be there."""
        while self._waiting:
            request = first(self._waiting, self.room.batching)
            if not self.room.admits([one.place for one in self._running if one.place], request.tokens):
                return
            overtake(self._waiting, request)
            self._waiting.remove(request)
            request.place = self.room.enter(request.tokens, request.root)
            self._running.append(request)

    def _sweep(self) -> None:
        """Let go of whoever has ended or was cancelled."""
        for requests in (self._waiting, self._running):
            for request in [request for request in requests if request.cancelled or request.ended]:
                request.ended = request.ended or "cancelled"
                requests.remove(request)
                if request.place is not None:
                    self.room.leave(request.place)
                    request.place = None
                self._ended.append(request.timing)

    def _cancel(self, request: Request) -> None:
        with self._news:
            request.cancelled = True
            if not self._driving:
                self._sweep()
            self._news.notify_all()

    def _request(
        self, prompt: Any, count: int, temperature: float, how: Decoding, seed: int | Numbers | None
    ) -> Request:
        """What is asked, or why it could never be answered."""
        asked = Asked.of(self.net, count, temperature, how)
        if how.beams > 1:
            raise ValueError(f"beams={how.beams} of one request would be rows that none counts on; call hw.generate")
        if how.compile == "on":
            raise ValueError(
                "compile='on' makes a graph of rows that are alike, and requests are not; leave compile out"
            )
        given = taken(self.net, prompt, how.window)
        if given.form != "alone":
            raise ValueError(f"the prompt is a list of {len(given.rows)}; submit each by itself")
        ids, source = self._begun(given.rows[0])
        check_room(self.net.described, len(ids), count, how.window)
        if len(ids) < self.room.opening:
            fact = f"the prompt has {len(ids)} tokens, but the first {self.room.opening} must come together"
            raise ValueError(f"{fact}; give {self.room.opening} or more")
        numbers = seed if isinstance(seed, Numbers) else streams_of(seed, 1)[0]
        answer = asked.answer(given.kind, given.rows[0])
        request = Request(ids, source, count, temperature, how, numbers, answer, given.kind)
        known = self._stepping.longest
        self.room.check(request.tokens if known is None else min(request.tokens, known))
        return request

    def _begun(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """What the last stack goes on from, and the source that another reads before it."""
        if self.net.described.kind != "encoder-decoder":
            return list(prompt), []
        most = self.room.batching.source
        if len(prompt) > most:
            raise ValueError(
                f"a source of {len(prompt)} tokens is {len(prompt) - most} longer than the {most} there is room for; "
                f"make the engine with Batching(source={len(prompt)})"
            )
        return list(beginning(self.net)), prompt
