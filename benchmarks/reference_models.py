"""Baselines of the benchmarks: models in plain PyTorch, and stepwise decoding with CTranslate2.

`PlainGPT` has the shape of nanoGPT (pre-norm blocks without biases, GELU, learned positions, tied
embeddings); `composed_attention` is DCMHA (2405.08553) and `ReferenceMoH` is Mixture-of-Head
(2410.11842), as published.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.interfaces.core_types import PartParams
from headwise.attention.presets import design
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)

from .harness import import_quietly


@dataclass(frozen=True)
class GPTShape:
    """nanoGPT's recipe for a laptop: 0.80 million parameters."""

    tokens: int = 65
    length: int = 64
    layers: int = 4
    heads: int = 4
    model: int = 128


def to_model_spec(shape: GPTShape) -> ModelSpec:
    """Return the headwise description of the same model."""
    norm = NormSpec("layer_no_bias")
    spec = design(model=shape.model, heads=shape.heads, pattern="causal")
    block = BlockSpec(spec, feed=FeedForwardSpec(4 * shape.model), norm=norm)
    embedding = EmbeddingSpec(shape.tokens, positions=PositionSpec("learned", shape.length))
    stack = StackSpec.from_blocks(
        "decoder", shape.model, [block] * shape.layers, embedding=embedding, norm=norm
    )
    return ModelSpec(
        "small-gpt", "decoder", (stack,), (OutputHeadSpec("tokens", shape.tokens, table="decoder"),)
    )


class PlainBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(shape.model, bias=False) for _ in range(2))
        self.qkv = nn.Linear(shape.model, 3 * shape.model, bias=False)
        self.out = nn.Linear(shape.model, shape.model, bias=False)
        self.up = nn.Linear(shape.model, 4 * shape.model, bias=False)
        self.down = nn.Linear(4 * shape.model, shape.model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, model = x.shape
        q, k, v = (
            part.view(batch, count, self.heads, model // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(model, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, count, model))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """Decoder-only Transformer; returns the logits of the next token."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.tokens, shape.model)
        self.positions = nn.Embedding(shape.length, shape.model)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.model, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers) if deep else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


# --- Dynamically composed heads (DCMHA) in plain PyTorch ------------------------------------------

RMS_EPS = 1e-6


class CompositionFactors(NamedTuple):
    """Composition factors of each token: heads to ranks and ranks to heads [B, T, R, H], and gates
    [B, T, H].
    """

    source: Tensor
    target: Tensor
    gate: Tensor


@dataclass(frozen=True)
class CompositionBranch:
    """Computes factors from tokens: u = GELU(x W1), [w1; w2] = u W2, g = tanh(x Wg), w1 normalised
    over heads.
    """

    hidden: Tensor
    source: Tensor
    target: Tensor
    gate: Tensor

    def __call__(self, x_BTD: Tensor) -> CompositionFactors:
        hidden = F.gelu(F.linear(x_BTD, self.hidden))
        heads = self.gate.shape[0]
        w1, w2 = (
            F.linear(hidden, w).unflatten(-1, (-1, heads)) for w in (self.source, self.target)
        )
        w1 = w1 * torch.rsqrt(w1.square().mean(-1, keepdim=True) + RMS_EPS)
        return CompositionFactors(w1, w2, torch.tanh(F.linear(x_BTD, self.gate)))


def make_branch(weights: PartParams) -> CompositionBranch:
    """Return the query branch of a composition, from its weights by name."""
    return CompositionBranch(
        *(weights[f"query_{name}"] for name in ("hidden", "source", "target", "gate"))
    )


def compose_heads(
    a_BHTS: Tensor, query_factors: CompositionFactors, key_factors: CompositionFactors
) -> Tensor:
    """a' = a + sum_r (a.w1_r) w2_r + a g, with factors of queries and of keys."""
    gate_q, gate_k = (f.gate.transpose(1, 2) for f in (query_factors, key_factors))
    composed_BHTS = a_BHTS + a_BHTS * gate_q[..., None] + a_BHTS * gate_k[:, :, None]
    for r in range(query_factors.source.shape[2]):
        for factors, axis in ((query_factors, -1), (key_factors, -2)):
            source, target = (w[:, :, r].transpose(1, 2).unsqueeze(axis) for w in factors[:2])
            composed_BHTS = composed_BHTS + (a_BHTS * source).sum(1, keepdim=True) * target
    return composed_BHTS


def composed_attention(
    qkv: Sequence[Tensor],
    scores: tuple[CompositionFactors, CompositionFactors],
    weights: tuple[CompositionFactors, CompositionFactors],
) -> Tensor:
    """Causal attention o_BTHV of q, k and v [B, T, H, K], composed before the mask and after the
    softmax.
    """
    q, k, v = (t.transpose(1, 2) for t in qkv)
    a_BHTS = compose_heads(q @ k.mT * q.shape[-1] ** -0.5, *scores)
    future = torch.ones(a_BHTS.shape[-2:], dtype=torch.bool).triu(1)
    w_BHTS = compose_heads(
        a_BHTS.masked_fill(future, torch.finfo(a_BHTS.dtype).min).softmax(-1), *weights
    )
    return (w_BHTS @ v).transpose(1, 2)


# --- Mixture-of-Head (MoH) as in its paper and released code, in plain PyTorch --------------------


class ReferenceMoH(NamedTuple):
    """Causal layer whose first `num_shared` heads are always active, plus `num_routed` others per
    token (2410.11842).

    `maps` are W_Q, W_K, W_V, W_O [out, in] as "q", "k", "v", "o", and routers "shared", "router",
    "kind"; no biases.
    """

    heads: int
    num_shared: int
    num_routed: int
    maps: Mapping[str, Tensor]

    def gates(self, x_BTD: Tensor) -> Tensor:
        """Return the gates g_BTH of eq. 5 and 6, scaled as in the released code: a uniform router
        gives 1.
        """
        share = F.linear(x_BTD, self.maps["router"]).softmax(-1)
        best, chosen = share.topk(self.num_routed, dim=-1)
        eps = torch.finfo(share.dtype).eps
        routed = torch.zeros_like(share).scatter(
            -1, chosen, self.num_routed * best / best.sum(-1, keepdim=True).clamp(min=eps)
        )
        if not self.num_shared:
            return routed
        shared = self.num_shared * F.linear(x_BTD, self.maps["shared"]).softmax(-1)
        kind = 2 * F.linear(x_BTD, self.maps["kind"]).softmax(-1)
        return torch.cat([kind[..., :1] * shared, kind[..., 1:] * routed], -1)

    def core(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor, gates_BTH: Tensor) -> Tensor:
        """Return the head outputs o_BHTV, scaled by their gates."""
        o_BHTV = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTV, is_causal=True)
        return o_BHTV * gates_BTH.transpose(1, 2)[..., None]

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """Return the output of the layer."""
        q, k, v = (
            F.linear(x_BTD, self.maps[name]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        o_BHTV = self.core(q, k, v, self.gates(x_BTD))
        return F.linear(o_BHTV.transpose(1, 2).flatten(2), self.maps["o"])


# --- CTranslate2, one decode step at a time -------------------------------------------------------

STOP_MESSAGE = "stop"


def convert_to_ctranslate2(library: Any, folder: Path, tokens: int) -> Path:
    """Convert a transformers folder for CTranslate2, with the tokenizer it requires: one word per
    token id.
    """
    from tokenizers import Tokenizer, models

    transformers = import_quietly("transformers")
    tokenizer = Tokenizer(
        models.WordLevel({str(token): token for token in range(tokens)}, unk_token="0")
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", bos_token="1", eos_token="2"
    )
    fast.save_pretrained(folder)
    converted = folder.with_name(f"{folder.name}-ctranslate2")
    if not converted.exists():
        library.converters.TransformersConverter(str(folder)).convert(
            str(converted), quantization="float32"
        )
    return converted


class CTranslate2Stepper:
    """Decodes one token of a batch with CTranslate2 per call, and returns the logits [rows,
    tokens].

    The first call also reads the prompts. CTranslate2 decodes in a second thread, which waits
    inside its callback for each token until the next call.
    """

    def __init__(
        self,
        library: Any,
        folder: Path,
        prompts: Sequence[Sequence[int]],
        max_length: int,
        threads: int,
    ) -> None:
        self._requests: queue.Queue[str] = queue.Queue()
        self._results: queue.Queue[Any] = queue.Queue()
        generator = library.Generator(
            str(folder), device="cpu", compute_type="float32", intra_threads=threads
        )
        prompt_tokens = [[str(token) for token in row] for row in prompts]
        self._worker = threading.Thread(
            target=_decode_worker,
            args=(generator, prompt_tokens, max_length, self._requests, self._results),
            daemon=True,
        )
        weakref.finalize(self, _stop_worker, self._worker, self._requests)

    def __call__(self) -> Tensor:
        if self._worker.ident is None:
            self._worker.start()
        else:
            self._requests.put("go on")
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result


def _stop_worker(worker: threading.Thread, requests: queue.Queue[str]) -> None:
    """Stop the decoding thread: a process that exits inside a callback would abort."""
    if worker.is_alive():
        requests.put(STOP_MESSAGE)
        worker.join(timeout=60)


def _decode_worker(
    generator: Any,
    prompt_tokens: list[list[str]],
    max_length: int,
    requests: queue.Queue[str],
    results: queue.Queue[Any],
) -> None:
    stops: list[str] = []

    def on_token(step: Any) -> bool:
        if step.batch_id == 0:  # the callback of the first row has the logits of all rows
            results.put(torch.from_numpy(np.array(step.logits)))
        if step.batch_id == len(prompt_tokens) - 1 and requests.get() == STOP_MESSAGE:
            stops.append(
                STOP_MESSAGE
            )  # stops every row; otherwise earlier rows would continue to max_length
        return bool(stops)

    options = {"include_prompt_in_result": False, "return_logits_vocab": True, "callback": on_token}
    try:
        generator.generate_batch(prompt_tokens, max_length=max_length, **options)
        results.put(RuntimeError(f"decoding ended early, or after max_length={max_length} tokens"))
    except Exception as error:
        results.put(error)
