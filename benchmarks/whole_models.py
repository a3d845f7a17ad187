"""Whole decoder-only models: training steps of a GPT, and decode steps of a Llama."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.hub import load
from headwise.models import Transformer, build

from .harness import (
    BenchmarkCase,
    CaseKind,
    MissingPeer,
    RequiredWork,
    SpeedTarget,
    TimedCall,
    import_quietly,
    make_peer,
)
from .reference_models import (
    CTranslate2Stepper,
    GPTShape,
    PlainGPT,
    convert_to_ctranslate2,
    to_model_spec,
)

SMALL_GPT = GPTShape()
LARGE_GPT = GPTShape(tokens=512, length=256, layers=6, heads=6, model=384)
HANDWRITTEN = "handwritten PyTorch"
HANDWRITTEN_COMPILED = "handwritten PyTorch, compiled"


def gpt_training_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield two sizes; unless quick, in two precisions, and the larger one also compiled."""
    for shape, rows in ((SMALL_GPT, 12), (LARGE_GPT, 4)):
        for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
            yield _training_case(shape, rows, dtype, compiled=False)
    if not quick:
        yield _training_case(LARGE_GPT, 4, torch.bfloat16, compiled=True)


def _training_case(
    shape: GPTShape, rows: int, dtype: torch.dtype, *, compiled: bool
) -> BenchmarkCase:
    torch.manual_seed(0)
    net = build(to_model_spec(shape), seed=0)
    size = sum(p.numel() for p in net.parameters())

    def run(net: nn.Module) -> TimedCall:
        return _training_step(
            torch.compile(net, dynamic=False) if compiled else net, shape, rows, dtype
        )

    peers: dict[str, TimedCall | MissingPeer] = {
        HANDWRITTEN_COMPILED if compiled else HANDWRITTEN: run(PlainGPT(shape))
    }
    if not compiled:
        peers["transformers GPT-2"] = make_peer(
            "transformers", lambda library: run(_transformers_gpt2(library, shape))
        )
        peers["x-transformers"] = make_peer(
            "x_transformers", lambda library: run(_x_transformers_decoder(library, shape))
        )
    kind = (
        f"{'float32' if dtype == torch.float32 else 'bfloat16'}{', compiled' if compiled else ''}"
    )
    name = f"training step, {size / 1e6:.1f} M parameters, {kind}"
    # Two FLOPs per parameter and token in the forward pass, four in the backward pass.
    required = RequiredWork(flops=6 * rows * shape.length * size, dtype=dtype)
    targets = tuple(
        SpeedTarget(peer, 1.0) for peer, call in peers.items() if not isinstance(call, MissingPeer)
    )
    notes = {"tokens per step": f"{rows * shape.length:,}"}
    return BenchmarkCase(
        name,
        run(net),
        peers,
        targets,
        required,
        tolerance=None,
        notes=notes,
    )


def _transformers_gpt2(library: Any, shape: GPTShape) -> nn.Module:
    sizes = {
        "n_embd": shape.model,
        "n_head": shape.heads,
        "n_layer": shape.layers,
        "n_positions": shape.length,
    }
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return library.GPT2LMHeadModel(
        library.GPT2Config(vocab_size=shape.tokens, use_cache=False, **sizes, **dropout)
    )


def _x_transformers_decoder(library: Any, shape: GPTShape) -> nn.Module:
    layers = library.Decoder(
        dim=shape.model, depth=shape.layers, heads=shape.heads, attn_flash=True
    )
    sizes = {"num_tokens": shape.tokens, "max_seq_len": shape.length}
    return library.TransformerWrapper(**sizes, attn_layers=layers, tie_embedding=True)


def _training_step(
    net: Callable[..., Any], shape: GPTShape, rows: int, dtype: torch.dtype
) -> TimedCall:
    """Return a training step on fixed ids: forward, cross entropy, backward,
    clipping, fused AdamW.
    """
    assert isinstance(net, nn.Module)
    net.train()
    ids, labels = torch.randint(
        shape.tokens, (2, rows, shape.length), generator=torch.Generator().manual_seed(0)
    )
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast("cpu", dtype) if dtype == torch.bfloat16 else nullcontext()

    def run() -> None:
        with autocast:
            outputs = net(ids)
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()

    return run


# A Llama with 107.2 million parameters and tied embeddings.
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
NUM_CONTEXT_TOKENS, MAX_NEW_TOKENS = (
    2048,
    500,
)  # tokens of the prompt, and the largest number of decode steps
TRANSFORMERS_SDPA = "transformers sdpa"
TRANSFORMERS_EAGER = "transformers eager"
TRANSFORMERS_ON_HEADWISE = "transformers on headwise"
CTRANSLATE = "CTranslate2"


def model_decode_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield batches of four rows and one in bfloat16; CTranslate2 has float32 only on CPUs."""
    try:
        library = import_quietly("transformers")
    except ImportError as error:
        yield BenchmarkCase(
            "107M Llama", lambda: None, {TRANSFORMERS_SDPA: MissingPeer(str(error))}, tolerance=None
        )
        return
    with tempfile.TemporaryDirectory(prefix="headwise-bench-") as name:
        folder = Path(name) / "llama"
        library.LlamaForCausalLM(library.LlamaConfig(**MODEL_CONFIG)).to(
            torch.bfloat16
        ).save_pretrained(folder)
        for rows in (4, 1):
            yield from _batch_cases(library, folder, rows)


def _batch_cases(library: Any, folder: Path, rows: int) -> Iterator[BenchmarkCase]:
    """Yield a decode step of transformers with headwise's attention, and of the model as loaded by
    headwise.
    """
    ids = torch.randint(MODEL_CONFIG["vocab_size"], (rows, NUM_CONTEXT_TOKENS + 1))
    prompt = ids[:, :-1]
    last = ids[:, -1:]
    model = _model(library, folder, "sdpa")
    cache = _prefill(library, model, prompt)
    required = RequiredWork(
        bytes_read=sum(p.nbytes for p in model.parameters()) + _cache_bytes(cache)
    )
    name = f"107M Llama, bf16, batch {rows}, {NUM_CONTEXT_TOKENS} tokens"
    notes = {"tokens per step": f"{rows}"}
    targets = (SpeedTarget(TRANSFORMERS_SDPA, 3.0),) if rows > 1 else ()
    on_headwise = _step(_model(library, folder, "headwise"), cache, last)
    yield BenchmarkCase(
        f"{name}, {TRANSFORMERS_ON_HEADWISE}",
        on_headwise,
        {TRANSFORMERS_SDPA: _step(model, cache, last)},
        targets,
        required,
        0.05,
        notes=notes,
    )
    peers: dict[str, TimedCall | MissingPeer] = {
        TRANSFORMERS_SDPA: _step(model, cache, last),
        TRANSFORMERS_EAGER: _step(_model(library, folder, "eager"), cache, last),
    }
    targets = (SpeedTarget(TRANSFORMERS_SDPA, 5.0),) if rows > 1 else ()
    net = load(folder).eval()
    net_cache = net.cache(batch=rows, capacity=NUM_CONTEXT_TOKENS + MAX_NEW_TOKENS)
    with torch.no_grad():
        net.hidden(prompt, cache=net_cache)
    yield BenchmarkCase(
        f"{name}, headwise",
        _headwise_step(net, net_cache, last),
        peers,
        targets,
        required,
        0.05,
        notes=notes,
    )
    # Threads of CTranslate2 spin while they wait, which slows headwise down; so this is a case of
    # its own.
    peers = {
        f"{CTRANSLATE} (float32)": make_peer(
            "ctranslate2", lambda library: _ctranslate2_step(library, folder, ids)
        )
    }
    yield BenchmarkCase(
        f"{name}, headwise, alternating with {CTRANSLATE}",
        _headwise_step(net, net_cache, last),
        peers,
        (),
        required,
        0.05,
    )


def _model(library: Any, folder: Path, attention: str) -> Any:
    """Load the checkpoint with transformers and one of its attention implementations."""
    safe = {"trust_remote_code": False, "use_safetensors": True, "attn_implementation": None}
    model = library.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **safe).eval()
    model.set_attn_implementation(attention)
    return model


def _prefill(library: Any, model: Any, prompt: Tensor) -> Any:
    """Return the KV cache of transformers after the prompt."""
    cache = library.DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(prompt, past_key_values=cache)
    return cache


def _cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _step(model: Any, prefilled: Any, last: Tensor) -> TimedCall:
    """Return a decode step of a transformers model with its own copy of the cache."""
    cache: list[Any] = []

    def step() -> Tensor:
        if not cache:
            cache.append(deepcopy(prefilled))
        with torch.no_grad():
            return model(last, past_key_values=cache[0]).logits[:, -1]

    return step


def _headwise_step(net: Transformer, prefilled: Any, last: Tensor) -> TimedCall:
    """Return a decode step of the model as loaded by headwise, with its own copy of the cache."""
    cache = deepcopy(prefilled)

    def step() -> Tensor:
        with torch.no_grad():
            return net(last, cache=cache)[:, -1]

    return step


def _ctranslate2_step(library: Any, folder: Path, ids: Tensor) -> TimedCall:
    """Return a decode step of CTranslate2, which continues with the tokens that
    it has generated.
    """
    converted = convert_to_ctranslate2(library, folder, MODEL_CONFIG["vocab_size"])
    return CTranslate2Stepper(
        library, converted, ids.tolist(), MAX_NEW_TOKENS, torch.get_num_threads()
    )


KINDS = {
    "gpt_training": CaseKind("Training steps of a GPT", gpt_training_cases),
    "model_decode": CaseKind("Decode steps of a whole model", model_decode_cases),
}
