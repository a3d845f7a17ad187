"""RoBERTa (1907.11692), XLM-R, CamemBERT, Longformer: BERT with positions that start after the padding row."""

from __future__ import annotations

from ..model_spec import ApproximateAttention, EmbeddingSpec, HeadTransformSpec, ModelSpec, OutputHeadSpec
from ..presets import design
from . import model_builders
from .bert import BERT_WEIGHTS as BERT
from .config_reader import TransformersConfig, read_tied_stack, register_family


@register_family("xlm-roberta", "XLMRoberta", default_task="ForMaskedLM")
@register_family("camembert", "Camembert", default_task="ForMaskedLM")
@register_family("roberta", "Roberta", default_task="ForMaskedLM")
def read_roberta(config: TransformersConfig, task: str) -> ModelSpec:
    """Read RoBERTa; its masked-LM head uses the exact GELU, whatever the layers use."""
    sizes = model_builders.read_encoder_sizes(
        config, model_builders.EncoderDefaults(vocab_size=50265 if config.family_name == "roberta" else 30522)
    )
    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    types = config.read_int("type_vocab_size", default=2, minimum=0)
    table = EmbeddingSpec(
        sizes.vocab_size, positions=model_builders.make_offset_positions(config), types=types, norm=sizes.norm
    )
    body = model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, table)
    inner = HeadTransformSpec(sizes.model, "gelu", sizes.norm)
    masked = OutputHeadSpec(
        "tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True)
    )
    return model_builders.build_encoder(
        config, task, body, model_builders.EncoderHeads(HeadTransformSpec(sizes.model), masked)
    )


# --- Weight names of RoBERTa and its relatives ---------------------------------------------------------

ROBERTA_LM_HEAD, ROBERTA_CLASSIFIER = "lm_head", "classifier"
ROBERTA_LAYERS = {name: path for name, path in BERT.locations.items() if not name.startswith("head.")}

ROBERTA_WEIGHTS = BERT._replace(
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
        **BERT.suffix_aliases,
        **{f"{ROBERTA_CLASSIFIER}.{name}": f"{ROBERTA_CLASSIFIER}.out_proj.{name}" for name in ("weight", "bias")},
    },
    ignored=(r"embeddings\.position_ids$", r"^(roberta\.)?pooler\.", r"^lm_head\."),
)

# --- Longformer ----------------------------------------------------------------------------------------

GLOBAL_TOKENS_REASON = "global tokens are chosen per call and have their own projections; exact without global tokens"


@register_family("longformer", "Longformer", default_task="ForMaskedLM")
def read_longformer(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Longformer as a spec without global tokens; hw.LongformerAttention runs the full layer."""
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

    types = config.read_int("type_vocab_size", default=2, minimum=0)
    table = EmbeddingSpec(
        sizes.vocab_size, positions=model_builders.make_offset_positions(config), types=types, norm=sizes.norm
    )
    body = model_builders.make_encoder_stack(
        sizes, [attention(window) for window in _windows(config, sizes.layers)], table
    )
    inner = HeadTransformSpec(sizes.model, "gelu", sizes.norm)
    masked = OutputHeadSpec(
        "tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True)
    )
    return model_builders.build_encoder(
        config, task, body, model_builders.EncoderHeads(HeadTransformSpec(sizes.model), masked)
    )


def _windows(config: TransformersConfig, layers: int) -> list[int]:
    """Return the window of windows layer: the neighbours on both sides together."""
    setting = config.values.get("attention_window", 512)
    windows = (config.read_list("attention_window") or []) if isinstance(setting, (list, tuple)) else [setting] * layers
    if len(windows) != layers or any(type(window) is not int or window < 2 or window % 2 for window in windows):
        config.fail(
            f"attention_window = {setting!r} is not an even number for each of {layers} layers",
            "give 512 or a list of one per layer",
        )
    return windows
