"""GPT-Neo: GPT-2 without a scale of scores, with a window in every other layer."""

from __future__ import annotations

from typing import Any

from ..blueprint import Dense, Model, Norm, Positions
from ..parts.dot import Dot
from ..presets import design
from . import trunk
from .config import Config
from .registry import family


@family("gpt_neo", "GPTNeo")
def gpt_neo(config: Config, task: str) -> Model:
    """A bias behind heads alone."""
    model = config.size("hidden_size", default=2048)
    heads = config.heads("num_heads", "num_attention_heads", default=16)
    layers = config.layers("num_layers", "num_hidden_layers", default=24)
    config.dim(model, heads)
    window = config.size("window_size", default=256)
    patterns = {"global": "causal()", "local": f"window({window})"}
    said: dict[str, Any] = {"model": model, "heads": heads, "bias": "o", "similarity": Dot(scale=1.0)}
    attentions = trunk.each(_types(config, layers), lambda kind: design(**said, pattern=patterns[kind]))
    act = config.activation("activation_function", "gelu_new")
    feed = Dense(config.maybe("intermediate_size") or 4 * model, act, bias="ud")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5))
    positions = Positions("learned", config.size("max_position_embeddings", default=2048))
    ends = trunk.Ends(config.size("vocab_size", default=50257), True, positions=positions)
    return trunk.decoder(config, task, trunk.blocks(attentions, feed, norm), norm, ends)


def _types(config: Config, layers: int) -> list[str]:
    """Of each layer, as attention_types tells them: patterns, and how often each is repeated."""
    told: Any = config.said.get("attention_types") or [[["global", "local"], layers // 2]]
    try:
        found = [kind for pattern, times in told for _ in range(times) for kind in pattern]
    except (TypeError, ValueError):
        config.wrong(f"attention_types = {told!r} is no list of patterns with counts", "write [[['global'], 2]], say")
    if len(found) != layers or set(found) - {"global", "local"}:
        config.wrong(f"attention_types names {found!r} for {layers} layers", "name 'global' or 'local' for each")
    return found
