"""ELECTRA and ALBERT: BERT with token embeddings that may be narrower than the layers."""

from __future__ import annotations

from dataclasses import replace

from ..model_spec import EmbeddingSpec, HeadTransformSpec, ModelSpec, OutputHeadSpec, PositionSpec, UnsupportedPart
from ..presets import design
from . import model_builders
from .config_reader import TransformersConfig, read_tied_stack, register_family, select_heads


@register_family("electra", "Electra", default_task="ForPreTraining")
def read_electra(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ELECTRA (2003.10555); the pretraining head detects replaced tokens."""
    sizes = model_builders.read_encoder_sizes(config, model_builders.EncoderDefaults(256, 4, hidden=1024))
    narrow = config.read_int("embedding_size", default=128)
    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    length, types = (
        config.read_int("max_position_embeddings", default=512),
        config.read_int("type_vocab_size", default=2),
    )
    table, rows, unsupported = None, length + types + sizes.vocab_size, tuple[UnsupportedPart, ...]()
    if narrow == sizes.model:
        table = EmbeddingSpec(sizes.vocab_size, positions=PositionSpec("learned", length), types=types, norm=sizes.norm)
    else:
        unsupported = (factorized_embedding(narrow, sizes.model, rows),)
    body = model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, table)
    owner = read_tied_stack(config, "encoder", True)
    masked = make_token_head(sizes, narrow, "gelu", owner)
    if table is None and task in ("ForMaskedLM", "ForCausalLM"):
        unsupported += (factorized_token_head(narrow, sizes.vocab_size, owner),)
    if task == "ForPreTraining":
        replaced = OutputHeadSpec(
            "replaced", 1, transform=HeadTransformSpec(sizes.model, sizes.activation), bias="learned"
        )
        heads = select_heads(config, task, {task: [replaced]})
        return ModelSpec("electra", "encoder", (body,), heads, tuple(config.notes), unsupported)
    return model_builders.build_encoder(
        config,
        task,
        body,
        model_builders.EncoderHeads(HeadTransformSpec(sizes.model, "gelu"), masked, pools_base_model=False),
        unsupported,
    )


def factorized_embedding(narrow: int, model: int, rows: int) -> UnsupportedPart:
    """Embeddings narrower than the layers, with their norm and the projection to the width of the layers."""
    reason = f"embeddings have {narrow} channels, projected to {model}, which EmbeddingSpec lacks"
    sizes = {"rows": rows * narrow, "norm": 2 * narrow, "wider": narrow * model + model}
    return UnsupportedPart(reason, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items()))


def factorized_token_head(narrow: int, tokens: int, table: str) -> UnsupportedPart:
    """The head of narrow token embeddings: its bias, and its matrix unless tied."""
    own = () if table else (("head.tokens.weight", tokens * narrow),)
    return UnsupportedPart("the masked-LM head uses the narrow embeddings", (("head.tokens.bias", tokens), *own))


def make_token_head(sizes: model_builders.EncoderSizes, narrow: int, act: str, owner: str) -> OutputHeadSpec:
    """Return the masked-LM head, without its output matrix if the embeddings are narrower."""
    inner = HeadTransformSpec(narrow, act, sizes.norm)
    if narrow == sizes.model:
        return OutputHeadSpec("tokens", sizes.vocab_size, transform=inner, bias="learned", table=owner)
    return OutputHeadSpec("tokens", transform=inner)


# --- ALBERT --------------------------------------------------------------------------------------------

ALBERT_DEFAULTS = model_builders.EncoderDefaults(4096, 64, 12, 30000, 16384, "gelu_new")


@register_family("albert", "Albert", default_task="ForMaskedLM")
def read_albert(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ALBERT; all layers share the weights of the first."""
    sizes = model_builders.read_encoder_sizes(config, ALBERT_DEFAULTS)
    for name in ("num_hidden_groups", "inner_group_num"):
        config.require_default(name, 1, "uses several layers in turn, which is not described")
    narrow = config.read_int("embedding_size", default=128)
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    length, types = (
        config.read_int("max_position_embeddings", default=512),
        config.read_int("type_vocab_size", default=2),
    )
    if narrow == sizes.model:
        config.fail(
            f"embedding_size = {narrow} equals hidden_size",
            "give a smaller one: ALBERT always has a projection between them",
        )
    unsupported = (factorized_embedding(narrow, sizes.model, length + types + sizes.vocab_size),)
    body = replace(model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, None), weights_of="first")
    owner = read_tied_stack(config, "encoder", True)
    if task == "ForMaskedLM":
        unsupported += (factorized_token_head(narrow, sizes.vocab_size, owner),)
    heads = model_builders.EncoderHeads(
        HeadTransformSpec(sizes.model), make_token_head(sizes, narrow, sizes.activation, owner)
    )
    return model_builders.build_encoder(config, task, body, heads, unsupported)
