"""OLMo: norms that learn nothing at first, then norms behind, and queries and keys normalised over all heads."""

from __future__ import annotations

from typing import Any

from ..blueprint import Dense, Model, Nearly, Norm
from ..parts.qk_norm import QKNorm
from ..presets import design
from ..spec import AttentionSpec
from . import trunk
from .attention import FULL, SLIDING, Rope, by_kind, kinds
from .config import Config
from .registry import family

TOKENS = 50304


@family("olmo", "Olmo")
def olmo(config: Config, task: str) -> Model:
    """LayerNorm without weights or biases (2402.00838)."""
    sizes, rope = _said(config)
    norm = Norm("bare", 1e-5)
    blocks = trunk.blocks(_alike(config, sizes, rope, ()), _feed(config), norm)
    return trunk.decoder(config, task, blocks, norm, _ends(config))


@family("olmo2", "Olmo2")
def olmo2(config: Config, task: str) -> Model:
    """A norm behind every sublayer and none before (2501.00656)."""
    sizes, rope = _said(config)
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-5))
    turns = (QKNorm(scope="full", eps=norm.eps),)
    blocks = trunk.blocks(_alike(config, sizes, rope, turns), _feed(config), norm, placement="after")
    return trunk.decoder(config, task, blocks, norm, _ends(config))


@family("olmo3", "Olmo3")
def olmo3(config: Config, task: str) -> Model:
    """As OLMo 2, with a window in three layers of four."""
    sizes, layers = trunk.sizes(config, model=4096, heads=32), trunk.depth(config, 32)
    thetas = {FULL: config.number("rope_theta", default=500_000.0), SLIDING: 500_000.0}
    ropes = by_kind(config, trunk.length(config, 2048), thetas)
    window = config.maybe("sliding_window", default=4096)
    usual = [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(layers)]
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-5))

    def attention(kind: str) -> trunk.Attention:
        turns = (QKNorm(scope="full", eps=norm.eps), ropes[kind].rotary(sizes.dim))
        pattern = f"window({window})" if kind == SLIDING else "causal()"
        return ropes[kind].said(design(**sizes.words, bias=_bias(config), pattern=pattern, modifiers=turns))

    attentions = trunk.each(kinds(config, layers, usual, window), attention)
    blocks = trunk.blocks(attentions, _feed(config), norm, placement="after")
    return trunk.decoder(config, task, blocks, norm, _ends(config))


@family("olmoe", "Olmoe")
def olmoe(config: Config, task: str) -> Model:
    """Eight of 64 experts, whose shares are not brought to a sum of one (2409.02060)."""
    sizes, rope = _said(config, model=2048, heads=16, positions=4096)
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-5))
    expert = Dense(config.size("intermediate_size", default=2048), config.activation("hidden_act", "silu"), "gated")
    feed = trunk.mixture(config, expert, count=64, active=8, weighed="all")
    turns = (QKNorm(scope="full", eps=norm.eps),)
    blocks = trunk.blocks(_alike(config, sizes, rope, turns, usual=16), feed, norm)
    return trunk.decoder(config, task, blocks, norm, _ends(config))


def _said(config: Config, model: int = 4096, heads: int = 32, positions: int = 2048) -> tuple[trunk.Sizes, Rope]:
    return trunk.sizes(config, model, heads), Rope(config, trunk.length(config, positions))


def _alike(
    config: Config, sizes: trunk.Sizes, rope: Rope, turns: tuple[Any, ...], usual: int = 32
) -> list[AttentionSpec | Nearly]:
    """The attention of every layer; clipped queries, keys and values are no words of ours."""
    turned = (*turns, rope.rotary(sizes.dim))
    spec = design(**sizes.words, bias=_bias(config), pattern="causal()", modifiers=turned)
    said: AttentionSpec | Nearly = rope.said(spec)
    if (clip := config.maybe_number("clip_qkv")) is not None:
        said = Nearly(spec, f"clip_qkv bounds queries, keys and values at {clip:g}, which no word says")
    return [said] * trunk.depth(config, usual)


def _bias(config: Config) -> str:
    return "qkvo" if config.flag("attention_bias", False) else ""


def _feed(config: Config) -> Dense:
    return Dense(config.size("intermediate_size", default=11008), config.activation("hidden_act", "silu"), "gated")


def _ends(config: Config) -> trunk.Ends:
    return trunk.Ends(config.size("vocab_size", default=TOKENS))
