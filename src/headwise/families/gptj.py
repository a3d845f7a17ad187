"""GPT-J: the first channels of a head turn in neighbouring pairs; attention and feed-forward share a norm."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm
from ..parts.rotary import Rotary
from ..presets import design
from . import trunk
from .config import Config
from .registry import family


@family("gptj", "GPTJ")
def gptj(config: Config, task: str) -> Model:
    """A head over tokens with a bias; attention has none."""
    model = config.size("n_embd", "hidden_size", default=4096)
    heads = config.heads("n_head", "num_attention_heads", default=16)
    dim = config.dim(model, heads)
    turned = config.maybe("rotary_dim", default=64)
    if turned is None:
        config.wrong("rotary_dim = None turns as many channels as the model has", "give one of at most a head's width")
    turn = Rotary(dims=None if turned == dim else turned, pairs="interleaved")
    spec = design(model=model, heads=heads, pattern="causal()", modifiers=(turn,))
    act = config.activation("activation_function", "gelu_new")
    feed = Dense(config.maybe("n_inner") or 4 * model, act, bias="ud")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5))
    layers = config.layers("n_layer", "num_hidden_layers", default=28)
    blocks = trunk.blocks([spec] * layers, feed, norm, placement="parallel")
    ends = trunk.Ends(config.size("vocab_size", default=50400), bias="learned")
    return trunk.decoder(config, task, blocks, norm, ends)
