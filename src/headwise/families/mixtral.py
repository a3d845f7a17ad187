"""Mixtral and the mixtures of Qwen: experts in the place of feed-forwards."""

from __future__ import annotations

from typing import Any

from ..blueprint import Beyond, Block, Dense, Experts, Model, Norm
from ..parts.qk_norm import QKNorm
from ..presets import design
from . import trunk
from .attention import Rope
from .config import Config
from .llama import biases, windows
from .registry import family


@family("mixtral", "Mixtral")
def mixtral(config: Config, task: str) -> Model:
    """Two of eight experts (2401.04088)."""
    window = config.maybe("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    each = [pattern] * trunk.depth(config, 32)
    sizes = trunk.sizes(config, model=4096, heads=32, kv=8)
    rope = Rope(config, trunk.length(config, 131072), theta=1_000_000.0)
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-5))
    hidden = config.size("intermediate_size", default=14336)
    expert = Dense(hidden, config.activation("hidden_act", "silu"), "gated")
    count = config.size("num_local_experts", "num_experts", default=8)
    feed = Experts(expert, count, config.size("num_experts_per_tok", default=2, most=count), scores="chosen")
    blocks = [Block(one, feed=feed, norm=norm) for one in _attentions(sizes, rope, each)]
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=32000)))


@family("qwen2_moe", "Qwen2Moe")
def qwen2_moe(config: Config, task: str) -> Model:
    """One expert of all tokens beside those chosen, let in by a gate of its own (2407.10671)."""
    sizes = trunk.sizes(config, model=2048, heads=16, kv=16)
    rope = Rope(config, trunk.length(config, 32768))
    act = config.activation("hidden_act", "silu")
    shared = Dense(config.size("shared_expert_intermediate_size", default=5632), act, "gated")
    expert = Dense(config.size("moe_intermediate_size", default=1408), act, "gated")
    chosen = trunk.mixture(config, expert, count=60, active=4, weighed="all")
    experts = Experts(chosen.each, chosen.count, chosen.active, shared, chosen.scores)
    feeds = _feeds(config, Dense(config.size("intermediate_size", default=5632), act, "gated"), experts)
    bias = "qkv" if config.flag("qkv_bias", True) else ""
    attentions = _attentions(sizes, rope, windows(config, usual=24), bias=bias)
    gates = tuple((f"decoder.{n}.feed.shared_gate", sizes.model) for n, one in enumerate(feeds) if one is experts)
    beyond = (Beyond("every token lets the shared expert in by a sigmoid, which no word says", gates),) if gates else ()
    return _whole(config, task, attentions, feeds, 151936, beyond)


@family("qwen3_moe", "Qwen3Moe")
def qwen3_moe(config: Config, task: str) -> Model:
    """Queries and keys normalised, no expert of all tokens (2505.09388)."""
    sizes = trunk.sizes(config, model=2048, heads=32, kv=4)
    rope = Rope(config, trunk.length(config, 32768))
    window = config.maybe("sliding_window", default=4096) if config.flag("use_sliding_window", False) else None
    act = config.activation("hidden_act", "silu")
    expert = Dense(config.size("moe_intermediate_size", default=768), act, "gated")
    experts = trunk.mixture(config, expert, count=128, active=8, weighed="all")
    feeds = _feeds(config, Dense(config.size("intermediate_size", default=6144), act, "gated"), experts)
    norms = (QKNorm(eps=config.number("rms_norm_eps", default=1e-6)),)
    patterns = ["causal()" if window is None else f"window({window})"] * len(feeds)
    return _whole(config, task, _attentions(sizes, rope, patterns, bias=biases(config), modifiers=norms), feeds, 151936)


def _attentions(sizes: trunk.Sizes, rope: Rope, patterns: list[str], **said: Any) -> list[trunk.Attention]:
    turns = (*said.pop("modifiers", ()), rope.rotary(sizes.dim))
    return trunk.each(patterns, lambda p: rope.said(design(**sizes.words, pattern=p, modifiers=turns, **said)))


def _feeds(config: Config, dense: Dense, experts: Experts) -> list[Dense | Experts]:
    """Of each layer: experts in every so-manieth, but for those that are named."""
    step = config.size("decoder_sparse_step", default=1)
    named = config.items("mlp_only_layers") or []
    layers = trunk.depth(config, 24)
    return [dense if n in named or (n + 1) % step else experts for n in range(layers)]


def _whole(
    config: Config,
    task: str,
    attentions: list[trunk.Attention],
    feeds: list[Dense | Experts],
    tokens: int,
    beyond: tuple[Beyond, ...] = (),
) -> Model:
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-6))
    blocks = [Block(one, feed=feed, norm=norm) for one, feed in zip(attentions, feeds, strict=True)]
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=tokens)), beyond)
