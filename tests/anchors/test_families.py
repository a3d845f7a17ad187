"""Families against transformers: the same config.json builds a model there, on no device, and a
description here.

Equal are the learned numbers in all and in every group: embedding, head, and each layer's
attention, cross-attention, feed-forward and norms. Nothing here reads a shape out of our
description but through `Weight.role` and its name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import headwise as hw
from anchors import hf_models, test_transformers
from anchors.hf import projections
from headwise import costs
from headwise.models import families
from headwise.models.model_spec import ModelSpec
from support.config_fields import TINY, tiny_config
from support.model_configs import PUBLIC

Group = tuple[str, int | None, str]


LAYER = re.compile(r"\.?(h|layers|layer|block)\.(\d+)\.")
OURS = re.compile(r"(\w+?)\.(\d+)\.")
HEAD = re.compile(r"^(lm_head|score|classifier|qa_outputs|cls|classification_head)\b|pooler")
OWN_NORM = re.compile(r"\.(q_norm|k_norm|q_a_layernorm|kv_a_layernorm)\.")
NORM = re.compile(r"norm|\bln_|LayerNorm", re.IGNORECASE)


def theirs(name: str, alone: str) -> Group:
    """Where a parameter of transformers stands, by its name."""
    stack = next(
        (value for value in ("encoder", "decoder") if f"{value}." in name and not alone), alone
    )
    if not (layer := LAYER.search(name)):
        if HEAD.search(name):
            return "head", None, "head"
        embeds = (
            "embed" in name or name.split(".")[-2] in ("wte", "wpe", "shared") or "_token" in name
        )
        return (stack or "encoder", None, "embedding" if embeds else "norm")
    rest = name[layer.end() - 1 :]
    if NORM.search(rest) and not OWN_NORM.search(rest):
        role = "norm"
    elif "EncDecAttention" in rest or "encoder_attn" in rest:
        role = "cross"
    else:
        role = "attention" if re.search("attn|attention", rest, re.IGNORECASE) else "feed"
    return stack, int(layer[2]), role


def groups_of_theirs(model: torch.nn.Module, ours: ModelSpec) -> Counter[Group]:
    alone = ours.stacks[0].name if len(ours.stacks) == 1 else ""
    counts: Counter[Group] = Counter()
    for name, parameter in model.named_parameters():
        counts[theirs(name, alone)] += parameter.numel()
    return counts


def groups_of_ours(model: ModelSpec) -> Counter[Group]:
    counts: Counter[Group] = Counter()
    for w in model.weights():
        layer = OURS.match(w.name)
        stack = w.name.split(".")[0]
        counts[stack, int(layer[2]) if layer else None, w.role] += w.numel if w.trainable else 0
    return counts


def built(folder: Path) -> torch.nn.Module:
    """What transformers makes of a folder, as the class that its config names, without memory."""
    config, empty = tf.AutoConfig.from_pretrained(folder), torch.empty

    def nowhere(*sizes: Any, **options: Any) -> torch.Tensor:
        return empty(*sizes, **(options | {"device": options.get("device") or "meta"}))

    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        # the tests' own, which fills with NaN, is not known to the device
        patch.setattr(torch, "empty", nowhere)
        return getattr(tf, config.architectures[0])._from_config(config)


def folder_of(folder: Path, options: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(options))
    return folder


def check_groups(folder: Path) -> ModelSpec:
    """Every group has as many numbers as there."""
    ours, model = families.read_model_spec(folder), built(folder)
    assert groups_of_ours(ours) == +groups_of_theirs(model, ours)
    assert costs.count_parameters(ours) == sum(p.numel() for p in model.parameters())
    return ours


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_have_the_numbers_they_are_known_for(name: str, tmp_path: Path):
    result, expected = PUBLIC[name]
    ours = check_groups(folder_of(tmp_path, result))
    assert expected is None or costs.count_parameters(ours) == expected


@pytest.mark.parametrize(("family", "architecture"), TINY)
def test_small_models_have_the_same_numbers(family: str, architecture: str, tmp_path: Path):
    check_groups(folder_of(tmp_path, tiny_config(family, architecture)))


# --- attention, part by part ----------------------------------------------------------------------

# Layers of these are run against transformers' in test_transformers.py, with specs written there by
# hand.
RUN = [
    name for name in test_transformers.MODELS if name not in ("stablelm", "olmo2", "llama-dynamic")
]
STACKS = {
    "encoder_attentions": ("encoder", "attention"),
    "decoder_attentions": ("decoder", "attention"),
}
STACKS |= {"cross_attentions": ("decoder", "cross")}


def plainly(spec: hw.AttentionSpec) -> hw.AttentionSpec:
    """The same spec, a scale that is written out left out where it is the usual one."""
    usual = spec.similarity.score_scale(spec.core) == spec.core.scale
    return replace(spec, similarity=hw.parts.DotProduct()) if usual else spec


def saved(model: hf_models.Model, folder: Path) -> ModelSpec:
    """Our reading of what transformers writes for this model."""
    model.model.config.save_pretrained(folder)
    return families.read_model_spec(folder)


@pytest.mark.parametrize("name", RUN)
def test_the_spec_is_the_one_that_computes_the_same(name: str, tmp_path: Path):
    theirs = test_transformers.MODELS[name]()
    ours = saved(theirs, tmp_path)
    specs = dict(ours.attention_specs())
    assert len(specs) == len(theirs.sites)
    for site in theirs.sites:
        stack, what = STACKS.get(site.attends[0], (ours.stacks[0].name, "attention"))
        assert plainly(specs[f"{stack}.{site.attends[1]}.{what}"]) == plainly(site.spec)


def test_angles_that_follow_the_text_have_no_spec(tmp_path: Path):
    with pytest.raises(hw.SpecError, match="rope_type 'dynamic' rescales the base"):
        saved(test_transformers.MODELS["llama-dynamic"](), tmp_path)


def check_computes(
    theirs: torch.nn.Module, spec: hw.AttentionSpec, output: str, *sources: torch.Tensor
) -> None:
    """An attention of transformers, alone, against the layer that our spec builds, with its
    weights.
    """
    theirs, ours = theirs.double().eval(), hw.Attention(spec).double().eval()
    ours.load_state_dict(projections(theirs, ("q_proj", "k_proj", "v_proj", output)))
    x = torch.randn(2, 5, spec.model, dtype=torch.float64)
    torch.testing.assert_close(
        ours(x, source=sources[0] if sources else None), theirs(x, *sources)[0]
    )


def test_attention_of_bart_and_vit_computes_the_same():
    """Neither stands among the models above; both are Vaswani's attention."""
    options = {
        "d_model": 42,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 3,
        "encoder_layers": 1,
    }
    options |= {"decoder_layers": 1, "vocab_size": 11}
    specs = dict(
        families.read_model_spec(
            options | {"model_type": "bart", "architectures": ["BartModel"]}
        ).attention_specs()
    )
    bart = tf.BartModel(tf.BartConfig(**options, attn_implementation="eager"))
    check_computes(bart.encoder.layers[0].self_attn, specs["encoder.0.attention"], "out_proj")
    source = torch.randn(2, 7, 42, dtype=torch.float64)
    check_computes(
        bart.decoder.layers[0].encoder_attn, specs["decoder.0.cross"], "out_proj", source
    )
    assert specs["decoder.0.attention"] == replace(
        specs["decoder.0.cross"], pattern=hw.patterns.Causal()
    )

    options = {
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_hidden_layers": 1,
        "qkv_bias": False,
    }
    vit = tf.ViTModel(
        tf.ViTConfig(**options, image_size=4, patch_size=2, attn_implementation="eager")
    )
    ((_, spec),) = families.read_model_spec(options | {"model_type": "vit"}).attention_specs()
    check_computes(vit.layers[0].attention, spec, "o_proj")


# --- what is remembered of a token ----------------------------------------------------------------

REMEMBERED = {
    "llama-3-8b": 131_072,
    "deepseek-v3": 70_272,
    "llama-2-7b": 524_288,
    "deepseek-v2-lite": 31_104,
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_bytes_remembered_of_a_token(name: str):
    """At two bytes a number, over all layers; that of V2-Lite is 27 x 576 x 2."""
    model = families.read_model_spec(PUBLIC[name][0])
    assert (
        2 * sum(costs.cached_numbers_per_token(spec) for _, spec in model.attention_specs())
        == REMEMBERED[name]
    )


# --- windows, layer by layer ----------------------------------------------------------------------


def seen_by_transformers(model: tf.PreTrainedModel, tokens: int) -> list[torch.Tensor]:
    """Which keys get any weight at all, layer by layer."""
    ids = torch.arange(tokens)[None] % 7 + 2
    with torch.no_grad():
        return [weights[0, 0] > 0 for weights in model(ids, output_attentions=True).attentions]


def test_windows_begin_at_the_layer_in_the_qwen_config():
    """A config that names no layer types has them by a rule; what transformers' own layers read
    decides.
    """
    options = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 8,
        "intermediate_size": 5,
    }
    options |= {
        "num_hidden_layers": 5,
        "vocab_size": 11,
        "use_sliding_window": True,
        "sliding_window": 3,
    }
    options |= {"max_window_layers": 2}
    theirs = tf.Qwen2Model(tf.Qwen2Config(**options, attn_implementation="eager")).eval()
    ours = [
        spec.pattern
        for _, spec in families.read_model_spec(options | {"model_type": "qwen2"}).attention_specs()
    ]
    for pattern, value in zip(ours, seen_by_transformers(theirs, 9), strict=True):
        assert torch.equal(
            value,
            hw.attention.AttentionMask(
                *[hw.SequenceInfo.from_batch(torch.zeros(1, 9))] * 2, pattern
            ).allowed[0, 0],
        )
    assert ours == [hw.patterns.Causal()] * 2 + [hw.patterns.Window(3)] * 3
