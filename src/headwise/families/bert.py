"""BERT, DistilBERT and MPNet: post-LayerNorm encoders with a masked-LM head."""

from __future__ import annotations

from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from ..parts.t5_bias import T5Bias
from ..presets import design
from . import model_builders
from .config_reader import TransformersConfig, read_num_labels, read_tied_stack, register_family, select_heads
from .weight_names import WeightNames


@register_family("bert", "Bert", default_task="ForMaskedLM")
def read_bert(config: TransformersConfig, task: str) -> ModelSpec:
    """Read BERT (1810.04805): learned positions, token types, classifiers on the pooled first token."""
    model = config.read_int("hidden_size", default=768)
    heads = config.read_num_heads("num_attention_heads", default=12)
    layers = config.read_num_layers("num_hidden_layers", default=12)
    tokens = config.read_int("vocab_size", default=30522)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    act = config.read_activation("hidden_act", "gelu")
    config.require_default("position_embedding_type", "absolute", "is not described")
    config.require_default(
        "add_cross_attention", False, "adds cross-attention to a second model, which is not described"
    )
    config.resolve_head_dim(model, heads)

    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=3072), act, bias="ud")
    attention = design(model=model, heads=heads, pattern=pattern, bias="qkvo")
    embedding = EmbeddingSpec(
        tokens,
        positions=PositionSpec("learned", config.read_int("max_position_embeddings", default=512)),
        types=config.read_int("type_vocab_size", default=2),
        norm=norm,
    )
    blocks = [BlockSpec(attention, feed=feed, norm=norm, placement="post")] * layers
    stack = StackSpec.from_blocks("encoder", model, blocks, embedding=embedding)

    pool, table, count = HeadTransformSpec(model), read_tied_stack(config, "encoder", True), read_num_labels(config)
    if not table:
        config.add_note("tie_word_embeddings: the second bias of the decoder in transformers is left out")
    masked = OutputHeadSpec(
        "tokens", tokens, transform=HeadTransformSpec(model, act, norm), bias="learned", table=table
    )
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pool)],
        "ForMaskedLM": [masked],
        "LMHeadModel": [masked],
        "ForPreTraining": [masked, OutputHeadSpec("next", 2, "first", pool, "learned")],
        "ForNextSentencePrediction": [OutputHeadSpec("next", 2, "first", pool, "learned")],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [OutputHeadSpec("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", count, bias="learned")],
    }
    return ModelSpec("bert", "encoder", (stack,), select_heads(config, task, heads_by_task), tuple(config.notes))


# --- BERT ----------------------------------------------------------------------------------------------

BERT_LAYER, BERT_LM_HEAD = ".encoder.layer.{layer}", "cls.predictions"

BERT_WEIGHTS = WeightNames(
    families=("bert",),
    prefixes=("bert", ""),
    locations={
        "encoder.embedding.tokens": ".embeddings.word_embeddings.weight",
        "encoder.embedding.positions": ".embeddings.position_embeddings.weight",
        "encoder.embedding.types": ".embeddings.token_type_embeddings.weight",
        "encoder.embedding.norm.weight": ".embeddings.LayerNorm.weight",
        "encoder.embedding.norm.bias": ".embeddings.LayerNorm.bias",
        "encoder.{layer}.attention.project.q": f"{BERT_LAYER}.attention.self.query.weight",
        "encoder.{layer}.attention.project.k": f"{BERT_LAYER}.attention.self.key.weight",
        "encoder.{layer}.attention.project.v": f"{BERT_LAYER}.attention.self.value.weight",
        "encoder.{layer}.attention.project.q_bias": f"{BERT_LAYER}.attention.self.query.bias",
        "encoder.{layer}.attention.project.k_bias": f"{BERT_LAYER}.attention.self.key.bias",
        "encoder.{layer}.attention.project.v_bias": f"{BERT_LAYER}.attention.self.value.bias",
        "encoder.{layer}.attention.output.o": f"{BERT_LAYER}.attention.output.dense.weight",
        "encoder.{layer}.attention.output.o_bias": f"{BERT_LAYER}.attention.output.dense.bias",
        "encoder.{layer}.attention_norm.weight": f"{BERT_LAYER}.attention.output.LayerNorm.weight",
        "encoder.{layer}.attention_norm.bias": f"{BERT_LAYER}.attention.output.LayerNorm.bias",
        "encoder.{layer}.feed.up": f"{BERT_LAYER}.intermediate.dense.weight",
        "encoder.{layer}.feed.up_bias": f"{BERT_LAYER}.intermediate.dense.bias",
        "encoder.{layer}.feed.down": f"{BERT_LAYER}.output.dense.weight",
        "encoder.{layer}.feed.down_bias": f"{BERT_LAYER}.output.dense.bias",
        "encoder.{layer}.feed_norm.weight": f"{BERT_LAYER}.output.LayerNorm.weight",
        "encoder.{layer}.feed_norm.bias": f"{BERT_LAYER}.output.LayerNorm.bias",
        "head.tokens.transform": f"{BERT_LM_HEAD}.transform.dense.weight",
        "head.tokens.transform_bias": f"{BERT_LM_HEAD}.transform.dense.bias",
        "head.tokens.transform_norm.weight": f"{BERT_LM_HEAD}.transform.LayerNorm.weight",
        "head.tokens.transform_norm.bias": f"{BERT_LM_HEAD}.transform.LayerNorm.bias",
        "head.tokens.weight": f"{BERT_LM_HEAD}.decoder.weight",
        "head.tokens.bias": f"{BERT_LM_HEAD}.bias",
        **{f"head.{name}.transform": ".pooler.dense.weight" for name in ("pooler", "next", "classes", "choice")},
        **{f"head.{name}.transform_bias": ".pooler.dense.bias" for name in ("pooler", "next", "classes", "choice")},
        "head.next.weight": "cls.seq_relationship.weight",
        "head.next.bias": "cls.seq_relationship.bias",
        "head.classes.weight": "classifier.weight",
        "head.classes.bias": "classifier.bias",
        "head.choice.weight": "classifier.weight",
        "head.choice.bias": "classifier.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    tied_names={f"{BERT_LM_HEAD}.decoder.bias": f"{BERT_LM_HEAD}.bias"},
    suffix_aliases={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=(r"embeddings\.position_ids$", r"^(bert\.)?pooler\.", r"^cls\."),
)

# --- DistilBERT ----------------------------------------------------------------------------------------


@register_family("distilbert", "DistilBert", default_task="ForMaskedLM")
def read_distilbert(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DistilBERT; its classifier pools the first token with a ReLU."""
    model = config.read_int("dim", "hidden_size", default=768)
    heads = config.read_num_heads("n_heads", "num_attention_heads", default=12)
    config.resolve_head_dim(model, heads)
    config.require_default(
        "sinusoidal_pos_embds", False, "makes the positions constant sinusoids, which is not described"
    )
    norm, act = NormSpec("layer", 1e-12), config.read_activation("activation", "gelu")
    feed = FeedForwardSpec(config.read_int("hidden_dim", default=3072), act, bias="ud")
    layers = config.read_num_layers("n_layers", "num_hidden_layers", default=6)
    sizes = model_builders.EncoderSizes(model, heads, layers, config.read_int("vocab_size", default=30522), norm, feed)
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=512))
    attention = design(model=model, heads=heads, bias="qkvo")
    body = model_builders.make_encoder_stack(
        sizes, [attention] * layers, EmbeddingSpec(sizes.vocab_size, positions=positions, norm=norm)
    )
    inner = HeadTransformSpec(model, act, norm)
    masked = OutputHeadSpec(
        "tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True)
    )
    return model_builders.build_encoder(
        config,
        task,
        body,
        model_builders.EncoderHeads(HeadTransformSpec(model, "relu"), masked, pools_base_model=False),
    )


# --- MPNet ---------------------------------------------------------------------------------------------

PAD_ID = 1  # transformers uses 1 in every MPNet and ignores pad_token_id


@register_family("mpnet", "MPNet", default_task="ForMaskedLM")
def read_mpnet(config: TransformersConfig, task: str) -> ModelSpec:
    """Read MPNet: BERT with relative position biases as in T5; positions start after the padding row."""
    sizes = model_builders.read_encoder_sizes(config, model_builders.EncoderDefaults(vocab_size=30527))
    config.require_default("relative_attention_num_buckets", 32, "is not the number that transformers uses")
    bias = T5Bias(32, 128, "both")
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo", modifiers=(bias,))
    rows, skipped = config.read_int("max_position_embeddings", default=512, minimum=PAD_ID + 2), PAD_ID + 1
    positions = PositionSpec("learned", rows - skipped, skipped=skipped)
    table = EmbeddingSpec(sizes.vocab_size, positions=positions, norm=sizes.norm)
    body = model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, table)
    inner = HeadTransformSpec(sizes.model, "gelu", sizes.norm)
    masked = OutputHeadSpec(
        "tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True)
    )
    return model_builders.build_encoder(
        config, task, body, model_builders.EncoderHeads(HeadTransformSpec(sizes.model), masked)
    )
