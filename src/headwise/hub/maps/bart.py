"""BART and its kin: both stacks spell their layers alike; the last head's bias is a constant."""

from __future__ import annotations

from ..plan import Map
from ..slots import Slot


def attention(ours: str, theirs: str) -> dict[str, str]:
    """The rows of one attention."""
    sides = {f"project.{side}": f"{side}_proj" for side in "qkv"} | {"output.o": "out_proj"}
    matrices = {f"{ours}.{name}": f"{theirs}.{other}.weight" for name, other in sides.items()}
    return matrices | {f"{ours}.{name}_bias": f"{theirs}.{other}.bias" for name, other in sides.items()}


def norm(ours: str, theirs: str) -> dict[str, str]:
    """The rows of one norm."""
    return {f"{ours}.{name}": f"{theirs}.{name}" for name in ("weight", "bias")}


def stack(name: str) -> dict[str, str]:
    """The rows of one stack."""
    ours, layer = f"{name}.{{layer}}", f".{name}.layers.{{layer}}"
    return {
        f"{name}.embedding.positions": f".{name}.embed_positions.weight",
        **norm(f"{name}.embedding.norm", f".{name}.layernorm_embedding"),
        **norm(f"{name}.norm", f".{name}.layer_norm"),
        **attention(f"{ours}.attention", f"{layer}.self_attn"),
        **norm(f"{ours}.attention_norm", f"{layer}.self_attn_layer_norm"),
        f"{ours}.feed.up": f"{layer}.fc1.weight",
        f"{ours}.feed.up_bias": f"{layer}.fc1.bias",
        f"{ours}.feed.down": f"{layer}.fc2.weight",
        f"{ours}.feed.down_bias": f"{layer}.fc2.bias",
        **norm(f"{ours}.feed_norm", f"{layer}.final_layer_norm"),
    }


MAP = Map(
    families=("bart", "mbart", "marian", "pegasus"),
    trunks=("model", ""),
    slots={
        "encoder.embedding.tokens": ".shared.weight",
        "decoder.embedding.tokens": ".decoder.embed_tokens.weight",
        **stack("encoder"),
        **stack("decoder"),
        **attention("decoder.{layer}.cross", ".decoder.layers.{layer}.encoder_attn"),
        **norm("decoder.{layer}.cross_norm", ".decoder.layers.{layer}.encoder_attn_layer_norm"),
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": Slot("final_logits_bias", "one output", {"one": 0}, {"one": 1}),
        "head.classes.transform": "classification_head.dense.weight",
        "head.classes.transform_bias": "classification_head.dense.bias",
        "head.classes.weight": "classification_head.out_proj.weight",
        "head.classes.bias": "classification_head.out_proj.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    twins={".encoder.embed_tokens.weight": ".shared.weight"},
    ignored=(r"(encoder|decoder)\.version$", r"^model\.(encoder|decoder)\.embed_positions\.weight$"),
)
