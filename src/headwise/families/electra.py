"""ELECTRA: BERT whose table may be narrower than its layers, and that tells which tokens were replaced."""

from __future__ import annotations

from dataclasses import replace

from ..model_spec import EmbeddingSpec, HeadTransformSpec, ModelSpec, OutputHeadSpec, PositionSpec, UnsupportedPart
from ..presets import design
from . import model_builders
from .config_reader import TransformersConfig, read_tied_stack, register_family, select_heads


@register_family("electra", "Electra", default_task="ForPreTraining")
def read_electra(config: TransformersConfig, task: str) -> ModelSpec:
    """Of every token whether it was replaced (2003.10555)."""
    sizes = model_builders.read_encoder_sizes(config, model_builders.EncoderDefaults(256, 4, hidden=1024))
    narrow = config.read_int("embedding_size", default=128)
    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    length, types = (
        config.read_int("max_position_embeddings", default=512),
        config.read_int("type_vocab_size", default=2),
    )
    table, rows, beyond = None, length + types + sizes.vocab_size, tuple[UnsupportedPart, ...]()
    if narrow == sizes.model:
        table = EmbeddingSpec(sizes.vocab_size, positions=PositionSpec("learned", length), types=types, norm=sizes.norm)
    else:
        beyond = (factorized_embedding(narrow, sizes.model, rows),)
    body = model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, table)
    owner = read_tied_stack(config, "encoder", True)
    masked = make_token_head(sizes, narrow, "gelu", owner)
    if table is None and task in ("ForMaskedLM", "ForCausalLM"):
        beyond += (factorized_token_head(narrow, sizes.vocab_size, owner),)
    if task == "ForPreTraining":
        replaced = OutputHeadSpec(
            "replaced", 1, transform=HeadTransformSpec(sizes.model, sizes.activation), bias="learned"
        )
        ways = select_heads(config, task, {task: [replaced]})
        return ModelSpec("electra", "encoder", (body,), ways, tuple(config.notes), beyond)
    return model_builders.build_encoder(
        config,
        task,
        body,
        model_builders.EncoderHeads(HeadTransformSpec(sizes.model, "gelu"), masked, pools_base_model=False),
        beyond,
    )


def factorized_embedding(narrow: int, model: int, rows: int) -> UnsupportedPart:
    """A table of another width than the layers', with its norm, and the map between."""
    why = f"tokens, positions and types are {narrow} wide and brought to {model} by a map, which no word says"
    sizes = {"rows": rows * narrow, "norm": 2 * narrow, "wider": narrow * model + model}
    return UnsupportedPart(why, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items()))


def factorized_token_head(narrow: int, tokens: int, table: str) -> UnsupportedPart:
    """A head over tokens by such a table: its bias, and a matrix of its own where it is not tied."""
    own = () if table else (("head.tokens.weight", tokens * narrow),)
    return UnsupportedPart("the head over tokens reads that narrow table", (("head.tokens.bias", tokens), *own))


def make_token_head(sizes: model_builders.EncoderSizes, narrow: int, act: str, owner: str) -> OutputHeadSpec:
    """The head over tokens, or what of it words can say where the table is narrower."""
    inner = HeadTransformSpec(narrow, act, sizes.norm)
    if narrow == sizes.model:
        return OutputHeadSpec("tokens", sizes.vocab_size, transform=inner, bias="learned", table=owner)
    return OutputHeadSpec("tokens", transform=inner)


# --- ALBERT --------------------------------------------------------------------------------------------

ALBERT_DEFAULTS = model_builders.EncoderDefaults(4096, 64, 12, 30000, 16384, "gelu_new")


@register_family("albert", "Albert", default_task="ForMaskedLM")
def read_albert(config: TransformersConfig, task: str) -> ModelSpec:
    """Every depth has a state of its own and the weights of the first."""
    sizes = model_builders.read_encoder_sizes(config, ALBERT_DEFAULTS)
    for name in ("num_hidden_groups", "inner_group_num"):
        config.require_default(name, 1, "makes several layers that take turns, which is not described")
    narrow = config.read_int("embedding_size", default=128)
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    length, types = (
        config.read_int("max_position_embeddings", default=512),
        config.read_int("type_vocab_size", default=2),
    )
    if narrow == sizes.model:
        config.fail(f"embedding_size = {narrow} is hidden_size", "give a narrower one: the map between is learned too")
    beyond = (factorized_embedding(narrow, sizes.model, length + types + sizes.vocab_size),)
    body = replace(model_builders.make_encoder_stack(sizes, [attention] * sizes.layers, None), weights_of="first")
    owner = read_tied_stack(config, "encoder", True)
    if task == "ForMaskedLM":
        beyond += (factorized_token_head(narrow, sizes.vocab_size, owner),)
    said = model_builders.EncoderHeads(
        HeadTransformSpec(sizes.model), make_token_head(sizes, narrow, sizes.activation, owner)
    )
    return model_builders.build_encoder(config, task, body, said, beyond)
