"""One more token of a whole model: the same checkpoint decoded by us and by others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...hub import load
from ...models import Transformer
from ..benchmark_case import BenchmarkCase, MissingPeer, RequiredWork, SpeedTarget, TimedCall, import_quietly, make_peer
from ..reference_models import CTranslate2Stepper, convert_to_ctranslate2

TITLE = "One-token step of a whole model"
HISTORY = (
    "Kernels for products of a few tokens, for attention, and for norms, turns and gates between them, called without "
    "torch's way into an operation; queries, keys and values, gate and up in one product each. Beside sdpa's 83 ms "
    "transformers' own modules and cache take 20 to 24 without any attention. See log/2026-11-22-fast-models.md."
)
# The shape of a Llama of 107.2 million parameters, one table for both ends.
MODEL_CONFIG = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2304,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
NUM_CONTEXT_TOKENS, MAX_NEW_TOKENS = 2048, 500  # tokens that are read before, and steps that are made at most
TRANSFORMERS_SDPA, TRANSFORMERS_EAGER, TRANSFORMERS_ON_HEADWISE, CTRANSLATE = (
    "transformers sdpa",
    "transformers eager",
    "transformers on headwise",
    "CTranslate2",
)


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Four rows and one, in bfloat16; CTranslate2 in float32, for it has no bfloat16 on this kind of machine."""
    try:
        theirs = import_quietly("transformers")
    except ImportError as error:
        yield BenchmarkCase("107M Llama", lambda: None, {TRANSFORMERS_SDPA: MissingPeer(str(error))}, tolerance=None)
        return
    with tempfile.TemporaryDirectory(prefix="headwise-bench-") as made:
        folder = Path(made) / "llama"
        theirs.LlamaForCausalLM(theirs.LlamaConfig(**MODEL_CONFIG)).to(torch.bfloat16).save_pretrained(folder)
        for rows in (4, 1):
            yield from _batch_cases(theirs, folder, rows)


def _batch_cases(theirs: Any, folder: Path, rows: int) -> Iterator[BenchmarkCase]:
    """The same step with the interface of transformers alone, and with our model."""
    ids = torch.randint(MODEL_CONFIG["vocab_size"], (rows, NUM_CONTEXT_TOKENS + 1))
    prompt, last = ids[:, :-1], ids[:, -1:]
    model = _model(theirs, folder, "sdpa")
    read = _prefill(theirs, model, prompt)
    need = RequiredWork(bytes_read=sum(p.nbytes for p in model.parameters()) + _cache_bytes(read))
    name, notes = f"107M Llama, bf16, batch {rows}, {NUM_CONTEXT_TOKENS} tokens", {"a step is": f"{rows} tokens"}
    aims = (SpeedTarget(TRANSFORMERS_SDPA, 3.0),) if rows > 1 else ()
    alone = _step(_model(theirs, folder, "headwise"), read, last)
    yield BenchmarkCase(
        f"{name}, {TRANSFORMERS_ON_HEADWISE}",
        alone,
        {TRANSFORMERS_SDPA: _step(model, read, last)},
        aims,
        need,
        0.05,
        HISTORY,
        notes=notes,
    )
    peers: dict[str, TimedCall | MissingPeer] = {
        TRANSFORMERS_SDPA: _step(model, read, last),
        TRANSFORMERS_EAGER: _step(_model(theirs, folder, "eager"), read, last),
    }
    aims = (SpeedTarget(TRANSFORMERS_SDPA, 5.0),) if rows > 1 else ()
    net = load(folder).eval()
    own = net.cache(batch=rows, capacity=NUM_CONTEXT_TOKENS + MAX_NEW_TOKENS)
    with torch.no_grad():
        net.hidden(prompt, cache=own)
    yield BenchmarkCase(
        f"{name}, headwise", _headwise_step(net, own, last), peers, aims, need, 0.05, HISTORY, notes=notes
    )
    # Its threads wait by spinning on the cores of torch's, so what runs beside it is slower than alone.
    peers = {
        f"{CTRANSLATE} (float32)": make_peer("ctranslate2", lambda library: _ctranslate2_step(library, folder, ids))
    }
    yield BenchmarkCase(
        f"{name}, headwise, by turns with {CTRANSLATE}", _headwise_step(net, own, last), peers, (), need, 0.05
    )


def _model(theirs: Any, folder: Path, attention: str) -> Any:
    """The checkpoint as transformers runs it, on this function for attention."""
    model = theirs.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(attention)
    return model


def _prefill(theirs: Any, model: Any, prompt: Tensor) -> Any:
    """What transformers remembers of a prompt."""
    cache = theirs.DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(prompt, past_key_values=cache)
    return cache


def _cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _step(model: Any, read: Any, last: Tensor) -> TimedCall:
    """A step of transformers' model behind a cache of its own."""
    cache: list[Any] = []

    def step() -> Tensor:
        if not cache:
            cache.append(deepcopy(read))
        with torch.no_grad():
            return model(last, past_key_values=cache[0]).logits[:, -1]

    return step


def _headwise_step(net: Transformer, read: Any, last: Tensor) -> TimedCall:
    """A step of the same checkpoint as our own model, behind a cache of its own."""
    cache = deepcopy(read)

    def step() -> Tensor:
        with torch.no_grad():
            return net(last, cache=cache)[:, -1]

    return step


def _ctranslate2_step(library: Any, folder: Path, ids: Tensor) -> TimedCall:
    """A step of CTranslate2, which goes on with tokens of its own."""
    made = convert_to_ctranslate2(library, folder, MODEL_CONFIG["vocab_size"])
    return CTranslate2Stepper(library, made, ids.tolist(), MAX_NEW_TOKENS, torch.get_num_threads())
