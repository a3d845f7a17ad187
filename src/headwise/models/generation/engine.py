"""Continuous batching of many requests on one model within a memory budget: requests join and leave
between steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...kernels.counter_rng import RandomStream
from .. import Transformer
from .batch_runner import BatchRunner, StepRecord
from .decoding_config import DEFAULT_DECODING, DecodingConfig
from .decoding_state import check_prompt_length, max_positions
from .generate import TextGenerator, make_random_streams
from .kv_memory import BatchingConfig, KVMemory
from .prompts import get_decoder_start_ids, parse_prompts
from .requests import Request, RequestStream

DEFAULT_BATCHING = BatchingConfig()


@dataclass(frozen=True)
class EngineReport:
    """Requests that have ended with their tokens, all steps of the engine, and memory against the
    budget.

    `computed` counts prefilled prompt tokens, `shared` prompt tokens found in the cache, `sources`
    encoder tokens. `layers` is the number of layers with paged caches; `gathers` maps those that
    gather their pages to the reason.
    """

    requests: int
    tokens: int
    computed: int
    shared: int
    sources: int
    seconds: float
    peak_bytes: int
    budget: int
    layers: int
    gathers: dict[str, str]
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
    """Answers many requests with one model; the KV cache stays within `budget` bytes.

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
        self.net = net.eval()
        self.memory = KVMemory(net, budget, batching)
        self._runner = BatchRunner(self.net, self.memory, max_positions(net.spec.stacks[-1]))
        self._waiting = list[Request]()
        self._running = list[Request]()
        self._num_requests = 0
        self._num_tokens = 0

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
        request = self._make_request(prompt, max_new_tokens, temperature, config, seed)
        request.number = self._num_requests
        self._num_requests += 1
        self._waiting.append(request)
        return RequestStream(request, self.step)

    def step(self) -> bool:
        """Admit requests, prefill one chunk of prompts and decode one token per row; return whether
        work remains.
        """
        try:
            self._remove_ended()
            self._admit()
            self._runner.step(list(self._running))
        finally:
            self._remove_ended()
        return bool(self._waiting or self._running)

    def run(self) -> None:
        """Run steps until every request has ended."""
        while self.step():
            pass

    def report(self) -> EngineReport:
        """Return the measurements so far."""
        runner = self._runner
        return EngineReport(
            requests=self._num_requests - len(self._waiting) - len(self._running),
            tokens=self._num_tokens,
            computed=sum(step.tokens for step in runner.steps),
            shared=runner.shared,
            sources=runner.sources,
            seconds=sum(step.seconds for step in runner.steps),
            peak_bytes=runner.peak,
            budget=self.memory.budget,
            layers=self.memory.reading.layers,
            gathers=self.memory.reading.gathers,
            steps=tuple(runner.steps),
        )

    def _admit(self) -> None:
        """Admit waiting requests while all pages that they may ever need are guaranteed."""
        while self._waiting:
            request = self._waiting[0]
            places = [running.place for running in self._running if running.place]
            if not self.memory.can_admit(places, request.tokens):
                return
            self._waiting.pop(0)
            request.place = self.memory.enter(request.tokens, request.namespace)
            self._running.append(request)

    def _remove_ended(self) -> None:
        """Remove requests that have ended, and free their memory."""
        for requests in (self._waiting, self._running):
            for request in [request for request in requests if request.ended]:
                requests.remove(request)
                self._num_tokens += request.num_output_ids
                if request.place is not None:
                    self.memory.leave(request.place)
                    request.place = None

    def _make_request(
        self,
        prompt: Any,
        count: int,
        temperature: float,
        how: DecodingConfig,
        seed: int | RandomStream | None,
    ) -> Request:
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
        numbers = seed if isinstance(seed, RandomStream) else make_random_streams(seed, 1)[0]
        completion = generator.answer(prompts.kind, prompts.rows[0])
        request = Request(
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
