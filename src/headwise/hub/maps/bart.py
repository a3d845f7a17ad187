"""BART and its kin: both stacks spell their layers alike; the last head's bias is a constant."""

from __future__ import annotations

from ..plan import WeightNames
from ..slots import TensorLocation


def name_attention(own_prefix: str, file_prefix: str) -> dict[str, str]:
    """The rows of one attention."""
    sides = {f"project.{side}": f"{side}_proj" for side in "qkv"} | {"output.o": "out_proj"}
    matrices = {f"{own_prefix}.{name}": f"{file_prefix}.{other}.weight" for name, other in sides.items()}
    return matrices | {f"{own_prefix}.{name}_bias": f"{file_prefix}.{other}.bias" for name, other in sides.items()}


def name_norm(own_prefix: str, file_prefix: str) -> dict[str, str]:
    """The rows of one norm."""
    return {f"{own_prefix}.{name}": f"{file_prefix}.{name}" for name in ("weight", "bias")}


def name_stack(name: str) -> dict[str, str]:
    """The rows of one stack."""
    ours, layer = f"{name}.{{layer}}", f".{name}.layers.{{layer}}"
    return {
        f"{name}.embedding.positions": f".{name}.embed_positions.weight",
        **name_norm(f"{name}.embedding.norm", f".{name}.layernorm_embedding"),
        **name_norm(f"{name}.norm", f".{name}.layer_norm"),
        **name_attention(f"{ours}.attention", f"{layer}.self_attn"),
        **name_norm(f"{ours}.attention_norm", f"{layer}.self_attn_layer_norm"),
        f"{ours}.feed.up": f"{layer}.fc1.weight",
        f"{ours}.feed.up_bias": f"{layer}.fc1.bias",
        f"{ours}.feed.down": f"{layer}.fc2.weight",
        f"{ours}.feed.down_bias": f"{layer}.fc2.bias",
        **name_norm(f"{ours}.feed_norm", f"{layer}.final_layer_norm"),
    }


BART_WEIGHTS = WeightNames(
    families=("bart", "mbart", "marian", "pegasus"),
    prefixes=("model", ""),
    locations={
        "encoder.embedding.tokens": ".shared.weight",
        "decoder.embedding.tokens": ".decoder.embed_tokens.weight",
        **name_stack("encoder"),
        **name_stack("decoder"),
        **name_attention("decoder.{layer}.cross", ".decoder.layers.{layer}.encoder_attn"),
        **name_norm("decoder.{layer}.cross_norm", ".decoder.layers.{layer}.encoder_attn_layer_norm"),
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": TensorLocation("final_logits_bias", "one output", {"one": 0}, {"one": 1}),
        "head.classes.transform": "classification_head.dense.weight",
        "head.classes.transform_bias": "classification_head.dense.bias",
        "head.classes.weight": "classification_head.out_proj.weight",
        "head.classes.bias": "classification_head.out_proj.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    tied_names={".encoder.embed_tokens.weight": ".shared.weight"},
    ignored=(r"(encoder|decoder)\.version$", r"^model\.(encoder|decoder)\.embed_positions\.weight$"),
)
