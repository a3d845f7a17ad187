"""OPT: GPT-2's blocks with a relu, and two rows of positions before the first (2205.01068)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm, Positions
from ..presets import design
from . import trunk
from .config import Config
from .registry import family


@family("opt", "OPT")
def opt(config: Config, task: str) -> Model:
    """Norms stand before, or behind in one size of it, which then has none at the end."""
    sizes = trunk.sizes(config, model=768, heads=12)
    config.refuse("layer_norm_elementwise_affine", True, "leaves out weights of norms, which is not described")
    biased, before = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    narrow = config.maybe("word_embed_proj_dim") or sizes.model
    spec = design(**sizes.words, pattern="causal()", bias="qkvo" if biased else "")
    act = config.activation("activation_function", "relu")
    feed = Dense(config.size("ffn_dim", default=3072), act, bias="ud" if biased else "")
    norm = Norm()
    blocks = trunk.blocks([spec] * trunk.depth(config, 12), feed, norm, placement="pre" if before else "post")
    last = norm if before and not config.flag("_remove_final_layer_norm", False) else None
    positions = Positions("learned", trunk.length(config, 2048), skipped=2)
    tokens = config.size("vocab_size", default=50272)
    if narrow != sizes.model:
        config.wrong(
            f"word_embed_proj_dim = {narrow} is not hidden_size = {sizes.model}, and a table of tokens of another "
            "width is not described",
            "read its layers as a model without a table",
        )
    return trunk.decoder(config, task, blocks, last, trunk.Ends(tokens, True, positions=positions))
