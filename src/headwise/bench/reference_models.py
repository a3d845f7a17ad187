"""A small GPT written plainly in PyTorch: nanoGPT's shape, the peer of several benchmarks.

Written from the shape alone (pre-norm blocks without biases, GELU, learned positions, one table for both ends).
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

from ..interfaces.core_types import PartParams
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from ..presets import design
from .benchmark_case import import_quietly


@dataclass(frozen=True)
class GPTShape:
    """nanoGPT's recipe for a laptop: 0.80 million parameters."""

    tokens: int = 65
    length: int = 64
    layers: int = 4
    heads: int = 4
    model: int = 128


def to_model_spec(shape: GPTShape) -> ModelSpec:
    """The same shape as a blueprint."""
    norm = NormSpec("unbiased")
    spec = design(model=shape.model, heads=shape.heads, pattern="causal")
    block = BlockSpec(spec, feed=FeedForwardSpec(4 * shape.model), norm=norm)
    embedding = EmbeddingSpec(shape.tokens, positions=PositionSpec("learned", shape.length))
    stack = StackSpec.from_blocks("decoder", shape.model, [block] * shape.layers, embedding=embedding, norm=norm)
    return ModelSpec("small-gpt", "decoder", (stack,), (OutputHeadSpec("tokens", shape.tokens, table="decoder"),))


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + feed(norm(x))."""

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
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).reshape(batch, count, model))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """Logits of the next token."""

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


# --- Dynamically composed heads in plain PyTorch, as published -----------------------------------------

RMS_EPS = 1e-6


class CompositionFactors(NamedTuple):
    """Of each token: heads to ranks and ranks to heads [B, T, R, H], and gates [B, T, H]."""

    source: Tensor
    target: Tensor
    gate: Tensor


@dataclass(frozen=True)
class CompositionBranch:
    """What makes factors of tokens: u = GELU(x W1), [w1; w2] = u W2, g = tanh(x Wg), w1 normalised over heads."""

    hidden: Tensor
    source: Tensor
    target: Tensor
    gate: Tensor

    def __call__(self, x_BTD: Tensor) -> CompositionFactors:
        hidden = F.gelu(F.linear(x_BTD, self.hidden))
        heads = self.gate.shape[0]
        w1, w2 = (F.linear(hidden, w).unflatten(-1, (-1, heads)) for w in (self.source, self.target))
        w1 = w1 * torch.rsqrt(w1.square().mean(-1, keepdim=True) + RMS_EPS)
        return CompositionFactors(w1, w2, torch.tanh(F.linear(x_BTD, self.gate)))


def make_branch(weights: PartParams) -> CompositionBranch:
    """The branch of queries, from the weights of one composition by name."""
    return CompositionBranch(*(weights[f"query_{name}"] for name in ("hidden", "source", "target", "gate")))


def compose_heads(a_BHTS: Tensor, query_factors: CompositionFactors, key_factors: CompositionFactors) -> Tensor:
    """a' = a + sum_r (a.w1_r) w2_r + a g, with factors of queries and of keys."""
    gate_q, gate_k = (f.gate.transpose(1, 2) for f in (query_factors, key_factors))
    made_BHTS = a_BHTS + a_BHTS * gate_q[..., None] + a_BHTS * gate_k[:, :, None]
    for r in range(query_factors.source.shape[2]):
        for factors, axis in ((query_factors, -1), (key_factors, -2)):
            source, target = (w[:, :, r].transpose(1, 2).unsqueeze(axis) for w in factors[:2])
            made_BHTS = made_BHTS + (a_BHTS * source).sum(1, keepdim=True) * target
    return made_BHTS


def composed_attention(
    qkv: Sequence[Tensor],
    scores: tuple[CompositionFactors, CompositionFactors],
    weights: tuple[CompositionFactors, CompositionFactors],
) -> Tensor:
    """o_BTHV, causal, of q, k and v [B, T, H, K]: composed before the mask, and behind the softmax."""
    q, k, v = (t.transpose(1, 2) for t in qkv)
    a_BHTS = compose_heads(q @ k.mT * q.shape[-1] ** -0.5, *scores)
    later = torch.ones(a_BHTS.shape[-2:], dtype=torch.bool).triu(1)
    w_BHTS = compose_heads(a_BHTS.masked_fill(later, torch.finfo(a_BHTS.dtype).min).softmax(-1), *weights)
    return (w_BHTS @ v).transpose(1, 2)


# --- Mixture of heads as its paper and released code have it, in plain PyTorch -------------------------


class ReferenceMoH(NamedTuple):
    """A causal layer of `heads`, the first `always` of which always speak, `active` others for each token (2410.11842).

    `maps` are W_Q, W_K, W_V, W_O [out, in] and the routers "shared", "router", "kind" by name, none with a bias.
    """

    heads: int
    num_shared: int
    num_routed: int
    maps: Mapping[str, Tensor]

    def gates(self, x_BTD: Tensor) -> Tensor:
        """g_BTH: eq. 5 and 6, as the released code scales them, so that a router without preferences gives 1."""
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
        """o_BHTV: what every head reads, scaled by its gate."""
        o_BHTV = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTV, is_causal=True)
        return o_BHTV * gates_BTH.transpose(1, 2)[..., None]

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """The whole layer."""
        q, k, v = (
            F.linear(x_BTD, self.maps[name]).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in ("q", "k", "v")
        )
        o_BHTV = self.core(q, k, v, self.gates(x_BTD))
        return F.linear(o_BHTV.transpose(1, 2).flatten(2), self.maps["o"])


# --- CTranslate2, one step of a batch at a time --------------------------------------------------------

STOP_MESSAGE = "stop"


def convert_to_ctranslate2(library: Any, folder: Path, tokens: int) -> Path:
    """A folder of transformers as CTranslate2 reads it; it asks for a tokenizer, whose words are then the ids."""
    from tokenizers import Tokenizer, models

    theirs = import_quietly("transformers")
    words = Tokenizer(models.WordLevel({str(one): one for one in range(tokens)}, unk_token="0"))
    fast = theirs.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2")
    fast.save_pretrained(folder)
    made = folder.with_name(f"{folder.name}-ctranslate2")
    if not made.exists():
        library.converters.TransformersConverter(str(folder)).convert(str(made), quantization="float32")
    return made


class CTranslate2Stepper:
    """An answer of CTranslate2 that goes on by one token whenever it is called; the logits [rows, tokens] of it.

    The first call reads the prompts. A thread of its own decodes, and waits within the function that it is told of
    each token through.
    """

    def __init__(self, library: Any, folder: Path, prompts: Sequence[Sequence[int]], most: int, threads: int) -> None:
        self._asked: queue.Queue[str] = queue.Queue()
        self._told: queue.Queue[Any] = queue.Queue()
        model = library.Generator(str(folder), device="cpu", compute_type="float32", intra_threads=threads)
        words = [[str(one) for one in row] for row in prompts]
        self._worker = threading.Thread(
            target=_decode_worker, args=(model, words, most, self._asked, self._told), daemon=True
        )
        weakref.finalize(self, _stop_worker, self._worker, self._asked)

    def __call__(self) -> Tensor:
        if self._worker.ident is None:
            self._worker.start()
        else:
            self._asked.put("go on")
        told = self._told.get()
        if isinstance(told, Exception):
            raise told
        return told


def _stop_worker(worker: threading.Thread, asked: queue.Queue[str]) -> None:
    """Let it come to an end: a process that ends within a callback would be aborted."""
    if worker.is_alive():
        asked.put(STOP_MESSAGE)
        worker.join(timeout=60)


def _decode_worker(
    model: Any, words: list[list[str]], most: int, asked: queue.Queue[str], told: queue.Queue[Any]
) -> None:
    ends: list[str] = []

    def heard(step: Any) -> bool:
        if step.batch_id == 0:  # the first row is told the logits of all
            told.put(torch.from_numpy(np.array(step.logits)))
        if step.batch_id == len(words) - 1 and asked.get() == STOP_MESSAGE:
            ends.append(STOP_MESSAGE)  # of each row: those before it would go on to the last token else
        return bool(ends)

    how = {"include_prompt_in_result": False, "return_logits_vocab": True, "callback": heard}
    try:
        model.generate_batch(words, max_length=most, **how)
        told.put(RuntimeError(f"it said an end, or was asked for more than {most} tokens"))
    except Exception as error:
        told.put(error)
