"""Gemma and Gemma 3: norms whose weights are stored less one, heads of a width of their own, a scaled table."""

from __future__ import annotations

from typing import Any

from ..blueprint import Dense, Model, Norm
from ..parts.qk_norm import QKNorm
from ..parts.softcap import Softcap
from ..presets import design
from . import trunk
from .attention import FULL, SLIDING, Rope, by_kind, kinds, scaled
from .config import Config
from .registry import family


@family("gemma", "Gemma")
def gemma(config: Config, task: str) -> Model:
    """As Llama, but for norms, activation and table (2403.08295)."""
    sizes = trunk.sizes(config, model=3072, heads=16, kv=16, dim=256)
    config.refuse("use_bidirectional_attention", False, "reads ahead, which is not described")
    rope = Rope(config, trunk.length(config, 8192))
    spec = design(**sizes.words, pattern="causal()", bias=_bias(config), modifiers=(rope.rotary(sizes.dim),))
    norm = Norm("offset", config.number("rms_norm_eps", default=1e-6))
    act = config.activation("hidden_act", "gelu_pytorch_tanh")
    feed = _feed(config, "gelu_tanh" if act == "gelu" else act, 24576)  # transformers reads the exact one as this
    blocks = trunk.blocks([rope.said(spec)] * trunk.depth(config, 28), feed, norm)
    return _whole(config, task, blocks, norm, 256000)


@family("gemma3_text", "Gemma3")
def gemma3_text(config: Config, task: str) -> Model:
    """Five layers with a window to one without, angles of two bases, queries and keys normalised (2503.19786)."""
    sizes = trunk.sizes(config, model=2304, heads=8, kv=4, dim=256)
    layers, every = trunk.depth(config, 26), config.size("sliding_window_pattern", default=6)
    config.refuse("use_bidirectional_attention", False, "reads ahead, which is not described")
    thetas = {FULL: config.number("rope_theta", default=1_000_000.0)}
    thetas |= {SLIDING: config.number("rope_local_base_freq", default=10_000.0)}
    ropes = by_kind(config, trunk.length(config, 131072), thetas)
    window = config.maybe("sliding_window", default=4096)
    usual = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]

    norm = Norm("offset", config.number("rms_norm_eps", default=1e-6))
    scale = scaled(config.number("query_pre_attn_scalar", default=256) ** -0.5, sizes.dim**-0.5)
    said: dict[str, Any] = {**sizes.words, "bias": _bias(config), "similarity": scale}
    caps = () if config.maybe_number("attn_logit_softcapping") is None else (_cap(config),)

    def attention(kind: str) -> trunk.Attention:
        turns = (QKNorm("offset", eps=norm.eps), ropes[kind].rotary(sizes.dim), *caps)
        pattern = f"window({window})" if kind == SLIDING else "causal()"
        return ropes[kind].said(design(**said, pattern=pattern, modifiers=turns))

    feed = _feed(config, config.activation("hidden_activation", "gelu_pytorch_tanh"), 9216)
    attentions = trunk.each(kinds(config, layers, usual, window), attention)
    blocks = trunk.blocks(attentions, feed, norm, placement="sandwich")
    return _whole(config, task, blocks, norm, 262208)


@family("gemma3", "Gemma3", usual="ForConditionalGeneration")
def gemma3(config: Config, task: str) -> Model:
    """The decoder of one that also reads pictures."""
    text = config.table("text_config") or Config({}, config.where)
    text.name, text.notes = config.name, config.notes
    config.note("vision_config: the tower that reads pictures, and what brings them to the decoder, are left out")
    return gemma3_text(text, {"ForConditionalGeneration": "ForCausalLM"}.get(task, task))


def _bias(config: Config) -> str:
    return "qkvo" if config.flag("attention_bias", False) else ""


def _cap(config: Config) -> Softcap:
    return Softcap(config.number("attn_logit_softcapping", default=50.0))


def _feed(config: Config, act: str, usual: int) -> Dense:
    return Dense(config.size("intermediate_size", default=usual), act, "gated")


def _whole(config: Config, task: str, blocks: list[Any], norm: Norm, tokens: int) -> Model:
    """A table of tokens times the root of its width, the same at the end."""
    (wide,) = {spec.model for spec in blocks[0].specs.values()}
    count, cap = config.size("vocab_size", default=tokens), config.maybe_number("final_logit_softcapping")
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(count, True, scale=wide**0.5, cap=cap))
