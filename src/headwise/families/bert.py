"""BERT and its relatives: encoders with a masked-LM head."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
    UnsupportedPart,
)
from ..model_spec.model import group_blocks
from ..parts.collaborative import Collaborative
from ..parts.relative_position_bias import T5Bias
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import model_builders
from .attention_config import make_dot
from .config_reader import (
    TransformersConfig,
    read_num_labels,
    read_tied_stack,
    register_family,
    select_heads,
)
from .model_builders import LayerAttention
from .weight_names import WeightNames

# --- BERT, DistilBERT and MPNet: post-LayerNorm ---------------------------------------------------


@register_family("bert", "Bert", default_task="ForMaskedLM")
def read_bert(config: TransformersConfig, task: str) -> ModelSpec:
    """Read BERT (1810.04805): learned positions, token types, classifiers on the pooled first
    token.
    """
    model = config.read_int("hidden_size", default=768)
    heads = config.read_num_heads("num_attention_heads", default=12)
    layers = config.read_num_layers("num_hidden_layers", default=12)
    tokens = config.read_int("vocab_size", default=30522)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    act = config.read_activation("hidden_act", "gelu")
    config.require_default("position_embedding_type", "absolute", "is not described")
    config.require_default(
        "add_cross_attention",
        False,
        "adds cross-attention to a second model, which is not described",
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

    pool, table, count = (
        HeadTransformSpec(model),
        read_tied_stack(config, "encoder", True),
        read_num_labels(config),
    )
    if not table:
        config.add_note(
            "tie_word_embeddings: the second bias of the decoder in transformers is left out"
        )
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
    return ModelSpec(
        "bert", "encoder", (stack,), select_heads(config, task, heads_by_task), tuple(config.notes)
    )


# --- BERT -----------------------------------------------------------------------------------------

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
        "encoder.{layer}.attention.project.mixing": f"{BERT_LAYER}.attention.self.mixing",
        "encoder.{layer}.attention.project.content": f"{BERT_LAYER}.attention.self.content_bias.weight",
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
        **{
            f"head.{name}.transform": ".pooler.dense.weight"
            for name in ("pooler", "next", "classes", "choice")
        },
        **{
            f"head.{name}.transform_bias": ".pooler.dense.bias"
            for name in ("pooler", "next", "classes", "choice")
        },
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

# --- BERT with collaborative heads ----------------------------------------------------------------

MIXING_NAME = re.compile(r"encoder\.layer\.(\d+)\.attention\.self\.mixing$")


def with_collaborative_heads(model: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """Return BERT with one query-key space for all heads (2006.16362) in the layers that have
    mixing vectors.

    The released code, like its config.json, does not say so elsewhere. It divides scores by
    sqrt(width / heads).
    """
    widths = {
        int(match[1]): shape[1]
        for name, shape in shapes.items()
        if (match := MIXING_NAME.search(name))
    }
    if not widths:
        return model
    (stack,) = model.stacks
    blocks = list(stack.layers)
    for layer, width in widths.items():
        if layer >= len(blocks):
            continue  # reading the tensors says that there is no such layer
        spec = blocks[layer].attention
        assert isinstance(spec, AttentionSpec)
        similarity = make_dot((width / spec.heads.q) ** -0.5, spec.heads.dim**-0.5)
        shared = replace(spec, project=Collaborative(width=width, bias="v"), similarity=similarity)
        blocks[layer] = replace(blocks[layer], attention=shared)
    return replace(model, stacks=(replace(stack, runs=group_blocks(blocks)),))


# --- DistilBERT -----------------------------------------------------------------------------------


@register_family("distilbert", "DistilBert", default_task="ForMaskedLM")
def read_distilbert(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DistilBERT; its classifier pools the first token with a ReLU."""
    model = config.read_int("dim", "hidden_size", default=768)
    heads = config.read_num_heads("n_heads", "num_attention_heads", default=12)
    config.resolve_head_dim(model, heads)
    config.require_default(
        "sinusoidal_pos_embds",
        False,
        "makes the positions constant sinusoids, which is not described",
    )
    norm, act = NormSpec("layer", 1e-12), config.read_activation("activation", "gelu")
    feed = FeedForwardSpec(config.read_int("hidden_dim", default=3072), act, bias="ud")
    layers = config.read_num_layers("n_layers", "num_hidden_layers", default=6)
    sizes = model_builders.EncoderSizes(
        model, heads, layers, config.read_int("vocab_size", default=30522), norm, feed
    )
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=512))
    attention = design(model=model, heads=heads, bias="qkvo")
    body = model_builders.make_encoder_stack(
        sizes, [attention] * layers, EmbeddingSpec(sizes.vocab_size, positions=positions, norm=norm)
    )
    inner = HeadTransformSpec(model, act, norm)
    masked = OutputHeadSpec(
        "tokens",
        sizes.vocab_size,
        transform=inner,
        bias="learned",
        table=read_tied_stack(config, "encoder", True),
    )
    return model_builders.build_encoder(
        config,
        task,
        body,
        model_builders.EncoderHeads(
            HeadTransformSpec(model, "relu"), masked, pools_base_model=False
        ),
    )


# --- MPNet ----------------------------------------------------------------------------------------

PAD_ID = 1  # transformers uses 1 in every MPNet and ignores pad_token_id


@register_family("mpnet", "MPNet", default_task="ForMaskedLM")
def read_mpnet(config: TransformersConfig, task: str) -> ModelSpec:
    """Read MPNet: BERT with relative position biases as in T5; positions start after the padding
    row.
    """
    sizes = model_builders.read_encoder_sizes(
        config, model_builders.EncoderDefaults(vocab_size=30527)
    )
    config.require_default(
        "relative_attention_num_buckets", 32, "is not the number that transformers uses"
    )
    bias = T5Bias(32, 128, "both")
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo", modifiers=(bias,))
    rows, skipped = (
        config.read_int("max_position_embeddings", default=512, minimum=PAD_ID + 2),
        PAD_ID + 1,
    )
    positions = PositionSpec("learned", rows - skipped, skipped=skipped)
    table = EmbeddingSpec(sizes.vocab_size, positions=positions, norm=sizes.norm)
    return _build_with_token_head(config, task, sizes, [attention] * sizes.layers, table)


# --- RoBERTa (1907.11692), XLM-R, CamemBERT, Longformer: positions after the padding row ----------


@register_family("xlm-roberta", "XLMRoberta", default_task="ForMaskedLM")
@register_family("camembert", "Camembert", default_task="ForMaskedLM")
@register_family("roberta", "Roberta", default_task="ForMaskedLM")
def read_roberta(config: TransformersConfig, task: str) -> ModelSpec:
    """Read RoBERTa; its masked-LM head uses the exact GELU, whatever the layers use."""
    sizes = model_builders.read_encoder_sizes(
        config,
        model_builders.EncoderDefaults(
            vocab_size=50265 if config.family_name == "roberta" else 30522
        ),
    )
    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    return _build_with_token_head(
        config, task, sizes, [attention] * sizes.layers, _offset_embedding(config, sizes)
    )


def _offset_embedding(
    config: TransformersConfig, sizes: model_builders.EncoderSizes
) -> EmbeddingSpec:
    types = config.read_int("type_vocab_size", default=2, minimum=0)
    positions = model_builders.make_offset_positions(config)
    return EmbeddingSpec(sizes.vocab_size, positions=positions, types=types, norm=sizes.norm)


def _build_with_token_head(
    config: TransformersConfig,
    task: str,
    sizes: model_builders.EncoderSizes,
    attentions: Iterable[LayerAttention],
    embedding: EmbeddingSpec,
) -> ModelSpec:
    """Build an encoder whose masked-LM head uses the exact GELU."""
    body = model_builders.make_encoder_stack(sizes, attentions, embedding)
    masked = make_token_head(sizes, sizes.model, "gelu", read_tied_stack(config, "encoder", True))
    return model_builders.build_encoder(
        config, task, body, model_builders.EncoderHeads(HeadTransformSpec(sizes.model), masked)
    )


# --- Weight names of RoBERTa and its relatives ----------------------------------------------------

ROBERTA_LM_HEAD, ROBERTA_CLASSIFIER = "lm_head", "classifier"
ROBERTA_LAYERS = {
    name: path for name, path in BERT_WEIGHTS.locations.items() if not name.startswith("head.")
}

ROBERTA_WEIGHTS = BERT_WEIGHTS._replace(
    families=("roberta", "xlm-roberta", "camembert"),
    prefixes=("roberta", ""),
    locations={
        **ROBERTA_LAYERS,
        "head.tokens.transform": f"{ROBERTA_LM_HEAD}.dense.weight",
        "head.tokens.transform_bias": f"{ROBERTA_LM_HEAD}.dense.bias",
        "head.tokens.transform_norm.weight": f"{ROBERTA_LM_HEAD}.layer_norm.weight",
        "head.tokens.transform_norm.bias": f"{ROBERTA_LM_HEAD}.layer_norm.bias",
        "head.tokens.weight": f"{ROBERTA_LM_HEAD}.decoder.weight",
        "head.tokens.bias": f"{ROBERTA_LM_HEAD}.bias",
        "head.pooler.transform": ".pooler.dense.weight",
        "head.pooler.transform_bias": ".pooler.dense.bias",
        "head.classes.transform": f"{ROBERTA_CLASSIFIER}.dense.weight",
        "head.classes.transform_bias": f"{ROBERTA_CLASSIFIER}.dense.bias",
        "head.classes.weight": f"{ROBERTA_CLASSIFIER}.out_proj.weight",
        "head.classes.bias": f"{ROBERTA_CLASSIFIER}.out_proj.bias",
        "head.choice.transform": ".pooler.dense.weight",
        "head.choice.transform_bias": ".pooler.dense.bias",
        "head.choice.weight": f"{ROBERTA_CLASSIFIER}.out_proj.weight",
        "head.choice.bias": f"{ROBERTA_CLASSIFIER}.out_proj.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    tied_names={f"{ROBERTA_LM_HEAD}.decoder.bias": f"{ROBERTA_LM_HEAD}.bias"},
    suffix_aliases={
        **BERT_WEIGHTS.suffix_aliases,
        **{
            f"{ROBERTA_CLASSIFIER}.{name}": f"{ROBERTA_CLASSIFIER}.out_proj.{name}"
            for name in ("weight", "bias")
        },
    },
    ignored=(r"embeddings\.position_ids$", r"^(roberta\.)?pooler\.", r"^lm_head\."),
)

# --- Longformer -----------------------------------------------------------------------------------

GLOBAL_TOKENS_REASON = (
    "global tokens are chosen per call and have their own projections; exact without global tokens"
)


@register_family("longformer", "Longformer", default_task="ForMaskedLM")
def read_longformer(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Longformer as a spec without global tokens; hw.LongformerAttention
    runs the full layer.
    """
    sizes = model_builders.read_encoder_sizes(config)
    projections = [f"{projection}_global" for projection in ("query", "key", "value")]
    parameters = [(f"{projection}.weight", sizes.model**2) for projection in projections] + [
        (f"{projection}.bias", sizes.model) for projection in projections
    ]

    def attention(window: int) -> ApproximateAttention:
        pattern = f"window({window + 1}, after={window // 2})"
        return ApproximateAttention(
            design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo"),
            GLOBAL_TOKENS_REASON,
            tuple(parameters),
        )

    attentions = [attention(window) for window in _windows(config, sizes.layers)]
    return _build_with_token_head(config, task, sizes, attentions, _offset_embedding(config, sizes))


def _windows(config: TransformersConfig, layers: int) -> list[int]:
    """Return the window of windows layer: the neighbours on both sides together."""
    setting = config.values.get("attention_window", 512)
    windows = (
        (config.read_list("attention_window") or [])
        if isinstance(setting, (list, tuple))
        else [setting] * layers
    )
    if len(windows) != layers or any(
        type(window) is not int or window < 2 or window % 2 for window in windows
    ):
        config.fail(
            f"attention_window = {setting!r} is not an even number for each of {layers} layers",
            "give 512 or a list of one per layer",
        )
    return windows


# --- ELECTRA and ALBERT: token embeddings that may be narrower than the layers --------------------


@register_family("electra", "Electra", default_task="ForPreTraining")
def read_electra(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ELECTRA (2003.10555); the pretraining head detects replaced tokens."""
    sizes = model_builders.read_encoder_sizes(
        config, model_builders.EncoderDefaults(256, 4, hidden=1024)
    )
    narrow = config.read_int("embedding_size", default=128)
    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    length = config.read_int("max_position_embeddings", default=512)
    types = config.read_int("type_vocab_size", default=2)
    table, rows, unsupported = (
        None,
        length + types + sizes.vocab_size,
        tuple[UnsupportedPart, ...](),
    )
    if narrow == sizes.model:
        table = EmbeddingSpec(
            sizes.vocab_size,
            positions=PositionSpec("learned", length),
            types=types,
            norm=sizes.norm,
        )
    else:
        unsupported = (factorized_embedding(narrow, sizes.model, rows),)
    body = model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, table)
    owner = read_tied_stack(config, "encoder", True)
    masked = make_token_head(sizes, narrow, "gelu", owner)
    if table is None and task in ("ForMaskedLM", "ForCausalLM"):
        unsupported += (factorized_token_head(narrow, sizes.vocab_size, owner),)
    if task == "ForPreTraining":
        replaced = OutputHeadSpec(
            "replaced",
            1,
            transform=HeadTransformSpec(sizes.model, sizes.activation),
            bias="learned",
        )
        heads = select_heads(config, task, {task: [replaced]})
        return ModelSpec("electra", "encoder", (body,), heads, tuple(config.notes), unsupported)
    return model_builders.build_encoder(
        config,
        task,
        body,
        model_builders.EncoderHeads(
            HeadTransformSpec(sizes.model, "gelu"), masked, pools_base_model=False
        ),
        unsupported,
    )


def factorized_embedding(narrow: int, model: int, rows: int) -> UnsupportedPart:
    """Embeddings narrower than the layers, with their norm and the projection to the width of the
    layers.
    """
    reason = f"embeddings have {narrow} channels, projected to {model}, which EmbeddingSpec lacks"
    sizes = {"rows": rows * narrow, "norm": 2 * narrow, "wider": narrow * model + model}
    return UnsupportedPart(
        reason, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items())
    )


def factorized_token_head(narrow: int, tokens: int, table: str) -> UnsupportedPart:
    """The head of narrow token embeddings: its bias, and its matrix unless tied."""
    own = () if table else (("head.tokens.weight", tokens * narrow),)
    return UnsupportedPart(
        "the masked-LM head uses the narrow embeddings", (("head.tokens.bias", tokens), *own)
    )


def make_token_head(
    sizes: model_builders.EncoderSizes, narrow: int, act: str, owner: str
) -> OutputHeadSpec:
    """Return the masked-LM head, without its output matrix if the embeddings are narrower."""
    inner = HeadTransformSpec(narrow, act, sizes.norm)
    if narrow == sizes.model:
        return OutputHeadSpec(
            "tokens", sizes.vocab_size, transform=inner, bias="learned", table=owner
        )
    return OutputHeadSpec("tokens", transform=inner)


# --- ALBERT ---------------------------------------------------------------------------------------

ALBERT_DEFAULTS = model_builders.EncoderDefaults(4096, 64, 12, 30000, 16384, "gelu_new")


@register_family("albert", "Albert", default_task="ForMaskedLM")
def read_albert(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ALBERT; all layers share the weights of the first."""
    sizes = model_builders.read_encoder_sizes(config, ALBERT_DEFAULTS)
    for name in ("num_hidden_groups", "inner_group_num"):
        config.require_default(name, 1, "uses several layers in turn, which is not described")
    narrow = config.read_int("embedding_size", default=128)
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    length = config.read_int("max_position_embeddings", default=512)
    types = config.read_int("type_vocab_size", default=2)
    if narrow == sizes.model:
        config.fail(
            f"embedding_size = {narrow} equals hidden_size",
            "give a smaller one: ALBERT always has a projection between them",
        )
    unsupported = (factorized_embedding(narrow, sizes.model, length + types + sizes.vocab_size),)
    body = replace(
        model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, None),
        weights_of="first",
    )
    owner = read_tied_stack(config, "encoder", True)
    if task == "ForMaskedLM":
        unsupported += (factorized_token_head(narrow, sizes.vocab_size, owner),)
    heads = model_builders.EncoderHeads(
        HeadTransformSpec(sizes.model), make_token_head(sizes, narrow, sizes.activation, owner)
    )
    return model_builders.build_encoder(config, task, body, heads, unsupported)


# --- DeBERTa 2 and 3: content and relative positions are scored separately (2006.03654) -----------

DISENTANGLED_REASON = (
    "scores add content-to-position and position-to-content terms, from one table for all layers"
)

DEBERTA_DEFAULTS = model_builders.EncoderDefaults(1536, 24, 24, 128100, 6144, eps=1e-7)


@register_family("deberta-v2", "DebertaV2", default_task="ForMaskedLM")
def read_deberta(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DeBERTa 2 and 3; without relative_attention the layers are BERT's."""
    sizes = model_builders.read_encoder_sizes(config, DEBERTA_DEFAULTS)
    config.require_default(
        "embedding_size",
        sizes.model,
        "gives token embeddings another width, which is not described",
    )
    config.require_default("legacy", True, "has another head over tokens, which is not described")
    length = config.read_int("max_position_embeddings", default=512)
    placed = (
        PositionSpec("learned", length) if config.read_bool("position_biased_input", True) else None
    )
    types = config.read_int("type_vocab_size", default=0, minimum=0)
    table = EmbeddingSpec(sizes.vocab_size, positions=placed, types=types, norm=sizes.norm)
    body = model_builders.make_encoder_stack(
        sizes, [_make_attention(config, sizes)] * sizes.layers, table
    )
    masked = OutputHeadSpec(
        "tokens",
        sizes.vocab_size,
        transform=HeadTransformSpec(sizes.model, sizes.activation, sizes.norm),
        bias="learned",
        table=read_tied_stack(config, "encoder", True),
    )
    wide = config.read_int("pooler_hidden_size", default=sizes.model)
    pool = HeadTransformSpec(wide, config.read_activation("pooler_hidden_act", "gelu"))
    return model_builders.build_encoder(
        config,
        task,
        body,
        model_builders.EncoderHeads(pool, masked, pools_base_model=False),
        _unsupported_parts(config, sizes, length),
    )


def _make_attention(
    config: TransformersConfig, sizes: model_builders.EncoderSizes
) -> LayerAttention:
    spec = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    if not config.read_bool("relative_attention", False):
        return spec
    sides = {"c2p": "pos_key", "p2c": "pos_query"}
    sides_used = (
        []
        if config.read_bool("share_att_key", False)
        else [name for kind, name in sides.items() if kind in _read_score_types(config)]
    )
    parameters = [(f"{name}.weight", sizes.model**2) for name in sides_used] + [
        (f"{name}.bias", sizes.model) for name in sides_used
    ]
    return ApproximateAttention(spec, DISENTANGLED_REASON, tuple(parameters))


def _read_score_types(config: TransformersConfig) -> list[str]:
    """Return the relative score terms (c2p, p2c); old files join them with |."""
    terms = config.values.get("pos_att_type")
    return (
        [kind.strip() for kind in terms.lower().split("|")]
        if isinstance(terms, str)
        else list(terms or [])
    )


def _unsupported_parts(
    config: TransformersConfig, sizes: model_builders.EncoderSizes, length: int
) -> tuple[UnsupportedPart, ...]:
    """The relative position table, its norm, and the convolution beside the first layer."""
    parts = list[UnsupportedPart]()
    if config.read_bool("relative_attention", False):
        reach = config.values.get("max_relative_positions", -1)
        buckets = config.values.get("position_buckets", -1)
        rows = 2 * (
            buckets
            if type(buckets) is int and buckets > 0
            else reach
            if type(reach) is int and reach > 0
            else length
        )
        normed = (("encoder.embedding.distances_norm", 2 * sizes.model),)
        has = "layer_norm" in str(config.values.get("norm_rel_ebd", "none")).lower()
        table = (("encoder.embedding.distances", rows * sizes.model), *(normed if has else ()))
        parts.append(
            UnsupportedPart(
                "relative positions have a table of embeddings that all layers share", table
            )
        )
    if kernel := config.read_int("conv_kernel_size", default=0, minimum=0):
        groups = config.read_int("conv_groups", default=1)
        numbers = sizes.model * sizes.model // groups * kernel + 3 * sizes.model
        reason = "a convolution of the embeddings is added to the output of the first layer"
        parts.append(UnsupportedPart(reason, (("encoder.0.feed.convolution", numbers),)))
    return tuple(parts)
