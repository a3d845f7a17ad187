"""Write the config.json of a model, in the first family that can express it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

from ...attention.masking.patterns import Window
from ...attention.parts.dot_product import DotProduct
from ...attention.spec.attention_spec import AttentionSpec
from ...util.errors import SpecError, suggest
from ..model_spec import FeedForwardSpec, ModelSpec, StackSpec, to_dict
from ..model_spec.serialization import Difference, compare_trees
from .attention_config import FULL_ATTENTION, SLIDING_ATTENTION, rope_to_config
from .config_reader import ACTIVATIONS, FAMILIES, TransformersConfig, read_config

DEFAULT_TEXT = "the default"
REMEDY = "save it with hw.save, which writes every model"


def write_config(model: ModelSpec, family: str = "auto") -> dict[str, Any]:
    """Return the config.json keys that describe this model in a family, for "auto" in the first
    family that can.

    The keys are read back. If they describe a different model, a SpecError names the first
    difference, for "auto" in the family with the fewest differences.

    >>> model = read_config(
    ...     TransformersConfig(
    ...         {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    ...     )
    ... )
    >>> write_config(model)["n_layer"]
    2
    >>> write_config(model, "llama")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: a llama has stacks.0.embedding.positions = the default, gpt2
    {'kind': 'learned', ...
    """
    if family != "auto" and family not in WRITERS:
        raise SpecError(
            f"cannot write configs of {family!r}; {suggest(family, ['auto', *WRITERS])}"
        )
    attempts = list[tuple[list[Difference], dict[str, Any]]]()
    refusal = SpecError()
    for name in WRITERS if family == "auto" else [family]:
        try:
            attempts.append(_try_family(model, name))
        except SpecError as error:  # the family cannot express these sizes
            refusal = error
    if not attempts:
        raise refusal
    differences, keys = min(attempts, key=lambda attempt: len(attempt[0]))
    if not differences:
        return keys
    (where, theirs, own) = differences[0]
    name = keys["model_type"]
    raise SpecError(f"a {name} has {where} = {theirs}, {model.name} {own}; {REMEDY}")


def _try_family(model: ModelSpec, family: str) -> tuple[list[Difference], dict[str, Any]]:
    """Return the keys for one family, and the differences of the model that they describe from this
    one.
    """
    entry = FAMILIES[family]
    class_name = f"{entry.class_prefix}{entry.default_task}"
    keys = {"architectures": [class_name], "model_type": family} | WRITERS[family](model, family)
    theirs = replace(
        read_config(TransformersConfig(keys, f"as a {family}")), name=model.name, notes=model.notes
    )
    return list(find_differences(theirs, model)), keys


def find_differences(one: ModelSpec, other: ModelSpec) -> Iterator[Difference]:
    """Yield the differences of two model descriptions, layer by layer: path, value in one, value in
    the other.
    """
    return compare_trees("", _layers_to_dict(one), _layers_to_dict(other), DEFAULT_TEXT)


def _layers_to_dict(model: ModelSpec) -> dict[str, Any]:
    """Return a model as plain values, with runs of repeated layers expanded to single layers."""
    plain = to_dict(model)
    for stack in plain["stacks"]:
        runs = stack.pop("runs")
        stack["layers"] = list(chain.from_iterable(run["blocks"] * run["times"] for run in runs))
    return plain


def _get_first_layer(
    model: ModelSpec, family: str
) -> tuple[StackSpec, AttentionSpec, FeedForwardSpec]:
    """Return the last stack and the attention and feed-forward of its first layer; refuse models
    without them.
    """
    stack = model.stacks[-1]
    if not stack.layers or stack.embedding is None:
        _raise_missing(model, family, "layers over an embedding")
    block = stack.layers[0]
    if not isinstance(block.attention, AttentionSpec):
        _raise_missing(model, family, "an attention that an AttentionSpec describes in every layer")
    if not isinstance(block.feed, FeedForwardSpec):
        _raise_missing(model, family, "one feed-forward in every layer")
    return stack, block.attention, block.feed


def activation_to_config(name: str) -> str:
    """Return the name of an activation in transformers, or `name` itself if transformers has no
    such activation.

    >>> activation_to_config("silu"), activation_to_config("gelu_tanh")
    ('silu', 'gelu_new')
    """
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == name), name)


def _raise_missing(model: ModelSpec, family: str, has: str) -> NoReturn:
    raise SpecError(f"a {family} has {has}, and {model.name} has not; {REMEDY}")


# --- Writers, by family ---------------------------------------------------------------------------


def write_llama(model: ModelSpec, name: str) -> dict[str, Any]:
    """Write a decoder like Llama; settings shared by all layers come from the first one."""
    stack, spec, feed = _get_first_layer(model, name)
    heads = spec.heads
    if name == "llama" and stack.model % heads.q:
        raise SpecError(
            f"cannot write a llama: {stack.model} channels are not divisible by {heads.q} heads; "
            "write a mistral"
        )
    keys = {
        "hidden_size": stack.model,
        "intermediate_size": feed.hidden,
        "num_hidden_layers": len(stack.layers),
        "num_attention_heads": heads.q,
        "num_key_value_heads": heads.kv,
        "head_dim": heads.dim,
        "hidden_act": activation_to_config(feed.activation),
        "mlp_bias": bool(feed.bias),
        "rms_norm_eps": stack.layers[0].norm.eps,
        "attention_bias": "project.q_bias" in spec.params(),
        "vocab_size": stack.embedding.tokens if stack.embedding else 0,
        "rope_parameters": rope_to_config(spec),
        "tie_word_embeddings": any(head.table for head in model.heads),
    }
    return keys if name == "llama" else keys | _write_windows(stack, name)


def _write_windows(stack: StackSpec, name: str) -> dict[str, Any]:
    """Write the sliding windows of the layers that the family can express."""
    patterns = [spec.pattern for spec in _list_attentions(stack)]
    sizes = [pattern.keys if isinstance(pattern, Window) else None for pattern in patterns]
    window = next((size for size in sizes if size), None)
    if name == "mistral":
        return {"sliding_window": window}
    types = [FULL_ATTENTION if size is None else SLIDING_ATTENTION for size in sizes]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types,
    }


def write_gpt2(model: ModelSpec, name: str) -> dict[str, Any]:
    """Write a GPT-2; if score scales differ between layers, they are divided by the layer
    number.
    """
    stack, spec, feed = _get_first_layer(model, name)
    positions = stack.embedding.positions if stack.embedding else None
    scales = [attention.similarity for attention in _list_attentions(stack)]
    return {
        "n_embd": stack.model,
        "n_head": spec.heads.q,
        "n_layer": len(stack.layers),
        "n_inner": feed.hidden,
        "activation_function": activation_to_config(feed.activation),
        "vocab_size": stack.embedding.tokens if stack.embedding else 0,
        "n_positions": (positions and positions.length) or 1024,
        "layer_norm_epsilon": stack.layers[0].norm.eps,
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
        "scale_attn_weights": scales[0] != DotProduct(scale=1.0),
        "tie_word_embeddings": any(head.table for head in model.heads),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _list_attentions(stack: StackSpec) -> list[AttentionSpec]:
    attentions = [block.attention for block in stack.layers]
    return [spec for spec in attentions if isinstance(spec, AttentionSpec)]


WRITERS = {"gpt2": write_gpt2, **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), write_llama)}
