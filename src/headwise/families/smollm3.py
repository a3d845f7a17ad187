"""SmolLM3: Llama whose every fourth layer turns nothing."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm
from ..presets import design
from . import trunk
from .attention import FULL, SLIDING, Rope, kinds
from .config import Config
from .registry import family


@family("smollm3", "SmolLM3")
def smollm3(config: Config, task: str) -> Model:
    """Layers without positions, after 2305.19466."""
    sizes, layers = trunk.sizes(config, model=2048, heads=16, kv=4), trunk.depth(config, 36)
    rope = Rope(config, trunk.length(config, 32768), theta=2_000_000.0)
    turned = _turned(config, layers)
    window = config.maybe("sliding_window") if config.flag("use_sliding_window", False) else None
    usual = [SLIDING if window and not turn else FULL for turn in turned]
    types = kinds(config, layers, usual, window or 1)
    bias = "qkvo" if config.flag("attention_bias", False) else ""

    def attention(kind: tuple[str, int]) -> trunk.Attention:
        pattern = f"window({window})" if window and kind[0] == SLIDING else "causal()"
        spec = design(**sizes.words, pattern=pattern, bias=bias, modifiers=(rope.rotary(sizes.dim),) if kind[1] else ())
        return rope.said(spec) if kind[1] else spec

    act = config.activation("hidden_act", "silu")
    wide = "ugd" if config.flag("mlp_bias", False) else ""
    feed = Dense(config.size("intermediate_size", default=11008), act, "gated", wide)
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-6))
    blocks = trunk.blocks(trunk.each(zip(types, turned, strict=True), attention), feed, norm)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=128256), True))


def _turned(config: Config, layers: int) -> list[int]:
    """Of each layer, 1 if it turns queries and keys."""
    every = config.size("no_rope_layer_interval", default=4)
    told = config.items("no_rope_layers")
    if told is None:
        return [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(told) != layers or any(turn not in (0, 1) for turn in told):
        config.wrong(f"no_rope_layers = {told!r} does not say 0 or 1 of {layers} layers", "list one for each")
    return told
