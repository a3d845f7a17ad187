"""T5: every sublayer has a number of its own, and one table of relative positions stands in the first layer."""

from __future__ import annotations

from ..plan import WeightNames

OWN_LAYER, FILE_BLOCK = "{stack}.{{layer}}", "{stack}.block.{{layer}}.layer"


def name_t5_stack(name: str, feed_forward_index: int) -> dict[str, str]:
    """The rows of one stack, whose feed-forward has this number."""
    ours, block = OWN_LAYER.format(stack=name), FILE_BLOCK.format(stack=name)
    return {
        f"{ours}.attention.project.q": f"{block}.0.SelfAttention.q.weight",
        f"{ours}.attention.project.k": f"{block}.0.SelfAttention.k.weight",
        f"{ours}.attention.project.v": f"{block}.0.SelfAttention.v.weight",
        f"{ours}.attention.output.o": f"{block}.0.SelfAttention.o.weight",
        f"{ours}.attention.t5_bias.table": f"{block}.0.SelfAttention.relative_attention_bias.weight",
        f"{ours}.attention_norm.weight": f"{block}.0.layer_norm.weight",
        f"{ours}.feed.up": f"{block}.{feed_forward_index}.DenseReluDense.wi.weight",
        f"{ours}.feed.gate": f"{block}.{feed_forward_index}.DenseReluDense.wi_0.weight",
        f"{ours}.feed.down": f"{block}.{feed_forward_index}.DenseReluDense.wo.weight",
        f"{ours}.feed_norm.weight": f"{block}.{feed_forward_index}.layer_norm.weight",
        f"{name}.norm.weight": f"{name}.final_layer_norm.weight",
    }


T5_WEIGHTS = WeightNames(
    families=("t5",),
    locations={
        "encoder.embedding.tokens": "shared.weight",
        "decoder.embedding.tokens": "decoder.embed_tokens.weight",
        **name_t5_stack("encoder", feed_forward_index=1),
        **name_t5_stack("decoder", feed_forward_index=2),
        "decoder.{layer}.cross.project.q": "decoder.block.{layer}.layer.1.EncDecAttention.q.weight",
        "decoder.{layer}.cross.project.k": "decoder.block.{layer}.layer.1.EncDecAttention.k.weight",
        "decoder.{layer}.cross.project.v": "decoder.block.{layer}.layer.1.EncDecAttention.v.weight",
        "decoder.{layer}.cross.output.o": "decoder.block.{layer}.layer.1.EncDecAttention.o.weight",
        "decoder.{layer}.cross_norm.weight": "decoder.block.{layer}.layer.1.layer_norm.weight",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "classifier.weight",
        "head.classes.bias": "classifier.bias",
    },
    tied_names={"encoder.embed_tokens.weight": "shared.weight"},
    suffix_aliases={"DenseReluDense.wi_1.weight": "DenseReluDense.wi.weight"},
    ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
)
