"""T5: relative position biases shared by the layers of a stack, unscaled scores, no biases, RMSNorm."""

from __future__ import annotations

from typing import Any

from ..model_spec import BlockSpec, EmbeddingSpec, FeedForwardSpec, ModelSpec, NormSpec, OutputHeadSpec, StackSpec
from ..parts.dot_product import Dot
from ..parts.t5_bias import T5Bias
from ..presets import design
from .config_reader import ACTIVATIONS, TransformersConfig, read_num_labels, register_family, select_heads
from .weight_names import WeightNames


@register_family("t5", "T5", default_task="ForConditionalGeneration")
def read_t5(config: TransformersConfig, task: str) -> ModelSpec:
    """Read T5; v1.1 has gated feed-forwards and does not scale the input of the output head."""
    model = config.read_int("d_model", "hidden_size", default=512)
    tokens = config.read_int("vocab_size", default=32128)
    layers = config.read_num_layers("num_layers", "num_hidden_layers", default=6)
    deep = config.read_optional_int("num_decoder_layers", maximum=10_000) or layers
    norm = NormSpec("rms", config.read_float("layer_norm_epsilon", default=1e-6))
    buckets = config.read_int("relative_attention_num_buckets", default=32, maximum=1 << 16)
    reach = config.read_int("relative_attention_max_distance", default=128)
    heads = config.read_num_heads("num_heads", "num_attention_heads", default=8)
    design_args: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "dim": config.read_head_dim("d_kv", "head_dim", default=64),
    }
    design_args |= {"similarity": Dot(scale=1.0)}

    both = design(**design_args, modifiers=(T5Bias(buckets, reach, "both"),))
    back = design(**design_args, modifiers=(T5Bias(buckets, reach, "back"),), pattern="causal()")
    feed = _read_feed_forward(config)
    encoder = [BlockSpec(both, feed=feed, norm=norm)] * layers
    decoder = [BlockSpec(back, design(**design_args), feed, norm)] * deep
    stacks = (
        StackSpec.from_blocks("encoder", model, encoder, embedding=EmbeddingSpec(tokens), norm=norm),
        StackSpec.from_blocks("decoder", model, decoder, embedding=EmbeddingSpec(tokens, table="encoder"), norm=norm),
    )
    # Old files scale the head's input if embeddings are tied; transformers 5 has the key scale_decoder_outputs.
    tied = config.read_bool("tie_word_embeddings", True)
    scale = model**-0.5 if config.read_bool("scale_decoder_outputs", tied) else 1.0
    classes = OutputHeadSpec("classes", read_num_labels(config), bias="learned")
    heads_by_task = {
        "ForConditionalGeneration": [OutputHeadSpec("tokens", tokens, table="encoder", scale=scale)],
        "WithLMHeadModel": [OutputHeadSpec("tokens", tokens, table="encoder", scale=scale)],
        "Model": [],
        "EncoderModel": [],
        "ForTokenClassification": [classes],
    }
    kind, num_stacks = ("encoder", 1) if task in ("EncoderModel", "ForTokenClassification") else ("encoder-decoder", 2)
    return ModelSpec("t5", kind, stacks[:num_stacks], select_heads(config, task, heads_by_task), tuple(config.notes))


def _read_feed_forward(config: TransformersConfig) -> FeedForwardSpec:
    """Read feed_forward_proj: "relu", or "gated-gelu", which means the tanh approximation of GELU."""
    forms = {name: ("plain", ours) for name, ours in ACTIVATIONS.items()}
    forms |= {f"gated-{name}": ("gated", ours) for name, ours in ACTIVATIONS.items()}
    forms["gated-gelu"] = ("gated", "gelu_tanh")
    form, act = forms[config.read_choice("feed_forward_proj", "relu", forms)]
    return FeedForwardSpec(config.read_int("d_ff", default=2048), act, form)


# --- T5 ------------------------------------------------------------------------------------------------

OWN_LAYER, FILE_BLOCK = "{stack}.{{layer}}", "{stack}.block.{{layer}}.layer"


def name_t5_stack(name: str, feed_forward_index: int) -> dict[str, str]:
    """Map the tensors of one stack to their stored names; the feed-forward is sublayer `feed_forward_index`."""
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
