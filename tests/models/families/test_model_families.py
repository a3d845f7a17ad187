"""Model families against tiny random models of transformers: parameters, outputs, masks, sites and
folders.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import families
from headwise.models.families import WEIGHT_NAMES
from headwise.observe.inspect.attention_sites import find_attention
from headwise.observe.inspect.hooks import AttentionHook, hook_sites
from headwise.observe.inspect.site import ObservedCall
from support.saved_bytes import backend_profile, model_saved_bytes
from support.transformers_models import (
    BART,
    BERT,
    FALLBACK,
    GPT,
    HEADS,
    LLAMA,
    LOCAL,
    PICTURES,
    WIDE,
    WORDS,
    ZOO,
    transformers,
)

FLAT = {key: value for key, value in LLAMA.items() if key != "head_dim"}
ALIKE = FLAT | {"num_key_value_heads": HEADS}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 2,
}
TURNS = {"rope_type": "default", "rope_theta": 100.0}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "sliding_attention": TURNS,
}


class Kind(NamedTuple):
    """A class of transformers, its config, and its inputs."""

    model: str
    config: str
    keys: dict[str, Any]
    reads: str = "ids"

    @property
    def config_of_class(self) -> Any:
        """Its config."""
        return getattr(transformers, self.config)(**self.keys)

    def build(self, **options: Any) -> nn.Module:
        """The model with numbers that matter."""
        torch.manual_seed(0)
        model = getattr(transformers, self.model)._from_config(self.config_of_class, **options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(
                        0.3 * torch.randn_like(parameter)
                    ) if "norm" in name.lower() else parameter.mul_(8)
        return model.eval()

    def inputs(self, tokens: int = 13) -> dict[str, Tensor]:
        """Something to read: two rows."""
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(3, WORDS - 4, (2, tokens), generator=draw)
        return {"input_ids": ids} | (
            {"decoder_input_ids": ids[:, :7]} if self.reads == "both" else {}
        )


def causal(name: str, keys: dict[str, Any] = LLAMA, **more: Any) -> Kind:
    """A decoder."""
    return Kind(f"{name}ForCausalLM", f"{name}Config", keys | more)


def pair(name: str, task: str = "ForConditionalGeneration", **more: Any) -> Kind:
    """An encoder and a decoder."""
    return Kind(f"{name}{task}", f"{name}Config", BART | more, "both")


def reader(name: str, task: str, **more: Any) -> Kind:
    """An encoder."""
    return Kind(f"{name}{task}", f"{name}Config", BERT | more)


NEO = {
    "hidden_size": WIDE,
    "num_heads": HEADS,
    "num_layers": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}
OPT = {
    "hidden_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "ffn_dim": 48,
    "vocab_size": WORDS,
}
OPT |= {"max_position_embeddings": 64}
NEOX = {
    "hidden_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
}
NEOX |= {"vocab_size": WORDS, "max_position_embeddings": 64}
PHI3 = FLAT | {"hidden_size": WIDE, "rope_parameters": TURNS}
G3 = {
    "sliding_window": 5,
    "layer_types": LOCAL,
    "query_pre_attn_scalar": 5,
    "rope_parameters": ROPES,
}

KINDS: dict[str, Kind] = {
    "gemma": causal("Gemma"),
    "gemma3": causal("Gemma3", **G3)._replace(config="Gemma3TextConfig"),
    "gemma3-usual": causal("Gemma3", num_hidden_layers=7, sliding_window=4)._replace(
        config="Gemma3TextConfig"
    ),
    "olmo": causal("Olmo", FLAT),
    "olmo2": causal("Olmo2", FLAT, attention_bias=True),
    "olmo3": causal("Olmo3", FLAT, sliding_window=5, layer_types=LOCAL, rope_parameters=ROPES),
    "olmoe": causal("Olmoe", FLAT, num_experts=4, num_experts_per_tok=2),
    "phi": causal("Phi", FLAT),
    "phi3": causal("Phi3", PHI3, sliding_window=5),
    "granite": causal(
        "Granite", FLAT, attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.5
    ),
    "cohere": causal("Cohere", FLAT, attention_bias=True),
    "cohere2": causal("Cohere2", FLAT, num_hidden_layers=4, sliding_window=5),
    "glm": causal("Glm", LLAMA),
    "smollm3": causal("SmolLM3", FLAT, num_hidden_layers=5),
    "smollm3-local": causal(
        "SmolLM3",
        FLAT,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=5,
        no_rope_layers=[1, 0, 0, 1],
    ),
    "mixtral": causal("Mixtral", num_local_experts=4, sliding_window=5),
    "qwen3-moe": causal("Qwen3Moe", **MOE, norm_topk_prob=True),
    "stablelm": causal("StableLm", ALIKE, use_qkv_bias=True),
    "stablelm-parallel": causal(
        "StableLm", ALIKE, use_parallel_residual=True, partial_rotary_factor=0.5
    ),
    "starcoder2": causal("Starcoder2", FLAT, sliding_window=5),
    "gptj": Kind("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "gpt-neox": causal("GPTNeoX", NEOX),
    "gpt-neox-pre": causal(
        "GPTNeoX", NEOX, use_parallel_residual=False, rotary_pct=0.5, attention_bias=False
    ),
    "gpt-neo": causal("GPTNeo", NEO, window_size=5, attention_types=[[["local", "global"], 1]]),
    "bloom": causal(
        "Bloom", {"hidden_size": WIDE, "vocab_size": WORDS, "n_layer": 2, "n_head": HEADS}
    ),
    "bloom-six": causal(
        "Bloom", {"hidden_size": 48, "vocab_size": WORDS, "n_layer": 2, "n_head": 6}
    ),
    "opt": causal("OPT", OPT),
    "opt-behind": causal("OPT", OPT, do_layer_norm_before=False, enable_bias=False),
    "roberta": reader("Roberta", "ForMaskedLM"),
    "roberta-classes": reader(
        "Roberta", "ForSequenceClassification", num_labels=5, type_vocab_size=1
    ),
    "xlm-roberta": reader("XLMRoberta", "ForTokenClassification", num_labels=3),
    "camembert": reader("Camembert", "Model"),
    "marian": pair("Marian", "MTModel", scale_embedding=True),
    "marian-apart": pair(
        "Marian", "MTModel", decoder_vocab_size=WORDS - 4, share_encoder_decoder_embeddings=False
    ),
    "mbart": pair("MBart"),
    "pegasus": pair("Pegasus"),
}


def read(kind: Kind) -> hw.model_spec.ModelSpec:
    """What its config says."""
    return families.read_model_spec(
        kind.config_of_class.to_dict() | {"architectures": [kind.model]}
    )


@pytest.mark.parametrize("name", KINDS)
def test_parameter_counts_are_those_of_transformers(name: str):
    """Of the whole model, learned ones; what transformers never trains is a constant in either."""
    kind = KINDS[name]
    with torch.device("meta"):
        theirs = getattr(transformers, kind.model)._from_config(kind.config_of_class)
    assert hw.costs.count_parameters(read(kind)) == sum(
        p.numel() for p in theirs.parameters() if p.requires_grad
    )


# --- attention: the layer that our spec builds, with their weights, says what theirs says ---------


class Passing(NamedTuple):
    """Tensors recorded in one attention of transformers: inputs, source, outputs of heads, and
    calls of the core.
    """

    module: nn.Module
    call: int
    inputs: list[tuple[Tensor, Tensor | None]]
    heads: list[Tensor]
    calls: list[ObservedCall]

    def on_call(self, call: ObservedCall) -> None:
        self.calls.append(call)

    def take(self, z: Tensor) -> None:
        self.heads.append(z)

    def enter(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = next(
            (options[key] for key in ("hidden_states", "query_states", "query") if key in options),
            None,
        )
        x = args[0] if args else named
        source = next(
            (
                options[key]
                for key in ("key_value_states", "encoder_hidden_states")
                if key in options
            ),
            None,
        )
        self.inputs.append((x, source))


class Watching(AttentionHook):
    """A watcher that keeps all."""

    def __init__(self, passing: Passing) -> None:
        self.passing = passing

    def on_call(self, call: ObservedCall, /) -> None:
        self.passing.on_call(call)

    def on_head_outputs(self, outputs: Tensor, /) -> None:
        self.passing.take(outputs)


@contextmanager
def watched(model: nn.Module):
    site_modules = find_attention(model)
    passing = {
        one.site.name: Passing(model.get_submodule(one.site.path), one.call_index, [], [], [])
        for one in site_modules
    }
    hooks = [
        one.module.register_forward_pre_hook(one.enter, with_kwargs=True)
        for one in passing.values()
    ]
    with (
        hook_sites(model, site_modules, {name: Watching(one) for name, one in passing.items()}),
        torch.no_grad(),
    ):
        yield passing
    for hook in hooks:
        hook.remove()


EXPERTS = {name: {"experts_implementation": "eager"} for name in ("mixtral", "qwen3-moe", "olmoe")}


def loaded(spec: hw.AttentionSpec, module: nn.Module) -> hw.Attention:
    """Our layer with their numbers; its merge hands on what heads say as it is."""
    layer = hw.Attention(spec).double().eval()
    stored = dict(layer.state_dict())
    for side in "qkv":
        stored[f"project.{side}"] = module.get_submodule(f"{side}_proj").weight
    stored["output.o"] = torch.randn_like(stored["output.o"])
    stored["output.o_bias"] = torch.zeros_like(stored["output.o_bias"])
    layer.load_state_dict(stored)
    return layer


# Models that our loader reads; their logits are compared as a whole.
READ = [name for name, kind in KINDS.items() if kind.config_of_class.model_type in WEIGHT_NAMES]


@pytest.mark.parametrize("name", [name for name in KINDS if name not in READ])
def test_attention_outputs_equal_those_of_transformers(name: str):
    """Every site, in float64."""
    kind = KINDS[name]
    model = kind.build(attn_implementation="eager").double()
    specs = {site.name: site.spec for site in hw.sites(model)}
    assert set(specs.values()) <= {spec for _, spec in read(kind).attention_specs()} | {None}
    with watched(model) as passing:
        model(**kind.inputs())
    assert passing
    for site, one in passing.items():
        layer = loaded(specs[site], one.module)
        (x, source), z = one.inputs[one.call], one.heads[0]
        with torch.no_grad():
            got = layer(x, source=source)
        expected = z.flatten(2) @ layer.weights["output"]["o"].mT
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# --- who reads whom -------------------------------------------------------------------------------


def allowed(pattern: hw.patterns.Pattern, queries: int, keys: int) -> Tensor:
    return torch.tensor([[pattern.allows(i, j) for j in range(keys)] for i in range(queries)])


@pytest.mark.parametrize("name", KINDS)
def test_masks_equal_those_of_transformers(name: str):
    """As their own function is told it, at every site that the interface shows; windows as the
    modules keep them.
    """
    kind = KINDS[name]
    model = kind.build(attn_implementation="eager", **EXPERTS.get(name, {}))
    specs = {
        site.name: spec
        for site in hw.sites(model)
        for spec in [dict(read(kind).attention_specs()).get(site.name)]
        if spec
    }
    with watched(model) as passing:
        model(**kind.inputs())
    for site, spec in specs.items():
        one = passing[site]
        window = getattr(one.module, "sliding_window", None)
        keep = re.search(r"window\((\d+)\)", spec.pattern.text)
        if isinstance(window, int) and window:
            assert keep is not None
            assert int(keep[1]) == window
        elif "sliding_window" in vars(one.module):
            assert keep is None
        for value in one.calls:
            entry = value.allowed_pairs()[0, 0]
            expected = allowed(spec.pattern, *entry.shape)
            assert not (entry & ~expected).any(), site
            # else weights alone are known, of which the least may be zero
            if value.attention_inputs is not None:
                assert torch.equal(entry, expected), site


# --- sites ----------------------------------------------------------------------------------------


OTHER_TYPES = ("whisper", "falcon", "deberta-v2", "longformer")


@pytest.mark.parametrize("name", ZOO | FALLBACK)
def test_every_site_has_a_spec_or_a_reason(name: str):
    sites = hw.sites((ZOO | FALLBACK)[name].build())
    reasons = {site.spec_reason for site in sites if site.spec is None}
    assert sites
    assert len(reasons) == (name in OTHER_TYPES)
    assert all(f"model_type {name!r} is not known" in reason for reason in reasons)


LONG = {"rope_type": "longrope", "short_factor": [1.1] * 4, "long_factor": [2.0] * 4}
LONG |= {"rope_theta": 100.0}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
MLA |= {"v_head_dim": 6, "num_key_value_heads": HEADS, "n_routed_experts": 4, "n_group": 1}
MLA |= {"topk_group": 1, "attention_bias": True, "head_dim": 4, "num_experts_per_tok": 2}
# Settings that no spec describes, with the reason.
UNDESCRIBED = {
    "olmo": (causal("Olmo", FLAT, clip_qkv=0.1), "clip_qkv = 0.1 clips"),
    "phi": (causal("Phi", FLAT, qk_layernorm=True), "qk_layernorm = True subtracts the mean"),
    "phi3": (
        causal("Phi3", PHI3, rope_parameters=LONG, original_max_position_embeddings=32),
        "divides each frequency by its own factor",
    ),
    "cohere": (causal("Cohere", FLAT, use_qk_norm=True), "use_qk_norm = True subtracts the mean"),
    "stablelm": (causal("StableLm", ALIKE, qk_layernorm=True), "subtracts the mean"),
    "bloom": (
        causal(
            "Bloom",
            {"hidden_size": WIDE, "vocab_size": WORDS, "n_layer": 2, "n_head": HEADS},
            apply_residual_connection_post_layernorm=True,
        ),
        "adds to the normalised input",
    ),
    "deepseek_v3": (causal("DeepseekV3", FLAT, **MLA), "adds biases to the latent vectors"),
}


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_settings_without_a_spec_are_refused_and_counted(name: str):
    kind, reason = UNDESCRIBED[name]
    keys = kind.config_of_class.to_dict() | {"architectures": [kind.model]}
    with pytest.raises(hw.SpecError, match=reason) as refused:
        families.read_model_spec(keys)
    assert len(str(refused.value).splitlines()) == 1
    model = kind.build()
    assert all(site.spec is None and reason in site.spec_reason for site in hw.sites(model))
    estimate = hw.cost(keys, hw.Workload(context=20))[name]
    assert estimate.parameters.total == sum(one.numel() for one in model.parameters())
    assert reason in estimate.notes[0]
    assert estimate.has_flops
    assert estimate.has_cache


def test_towers_are_read_from_configs_inside():
    config = transformers.Gemma3Config(
        text_config=LLAMA | G3, vision_config=BERT | PICTURES, mm_tokens_per_image=4
    )
    with torch.device("meta"):
        both = transformers.Gemma3ForConditionalGeneration(config)
    specs = [site.spec for site in hw.sites(both) if site.spec is not None]
    assert [spec.pattern.text for spec in specs] == ["window(5)", "causal()"]


# --- what is new in the words ---------------------------------------------------------------------

PLACED = ("olmo", "olmo2", "gpt-neox", "granite", "stablelm-parallel", "gemma3", "bloom", "marian")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.float32, torch.bfloat16)[n % 2]) for n, name in enumerate(PLACED)],
)
def test_saved_bytes_are_those_of_the_formulas(name: str, dtype: torch.dtype):
    """New placements and norms, for the way back."""
    model = read(KINDS[name])
    load = hw.Workload(2, 11, "fp32" if dtype == torch.float32 else "bf16", "cpu")
    way = hw.costs.ActivationSettings(
        backend_profile(model, load.dtype), source=13 if len(model.stacks) > 1 else None
    )
    assert hw.costs.activation_memory(model, load, way).total == model_saved_bytes(
        model, dtype, way
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_neo": ({"attention_types": 3}, "is not a list of patterns with counts"),
    "gptj": ({"rotary_dim": 5}, "5 of 256 channels; use an even number"),
    "smollm3": ({"no_rope_layers": [1]}, "is not 0 or 1 for each of 36 layers"),
    "gemma3_text": (
        {"rope_parameters": {"rope_theta": 3.0}},
        "rope_parameters has no table for a layer type",
    ),
    "opt": ({"word_embed_proj_dim": 5}, "token embeddings of another width are not described"),
    "roberta": ({"max_position_embeddings": 2}, "leaves no positions after pad_token_id"),
    "marian": ({"decoder_vocab_size": 5}, "differs from vocab_size"),
    "qwen3_moe": ({"mlp_only_layers": "all"}, "is not a list; write it as one"),
    "vit": ({"patch_size": 300}, "is larger than image_size"),
    "gemma": ({"use_bidirectional_attention": True}, "removes the causal mask"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_contradicting_config_is_refused_in_one_line(name: str):
    options, words = BAD[name]
    with pytest.raises(hw.SpecError) as caught:
        families.read_model_spec({"model_type": name} | options)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert "; " in message


def test_keys_missing_in_old_configs_have_the_usual_values():
    """As the first files of each were written: without keys that came later, angles at the top."""
    turns = {
        name: _turn({"model_type": name})
        for name in ("gpt_neox", "phi", "stablelm", "glm", "gptj", "smollm3")
    }
    dims = {name: (turn.dims, turn.base, turn.pairs) for name, turn in turns.items()}
    assert dims == {
        "gpt_neox": (24, 10_000.0, "half"),  # a quarter of 6144 / 64
        "phi": (32, 10_000.0, "half"),
        "stablelm": (20, 10_000.0, "half"),
        "glm": (64, 10_000.0, "interleaved"),
        "gptj": (64, 10_000.0, "interleaved"),
        "smollm3": (None, 2_000_000.0, "half"),
    }
    old = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500}
    assert (_turn(old).dims, _turn(old).base) == (48, 500.0)
    old = {"model_type": "gemma3_text", "rope_theta": 700.0, "rope_local_base_freq": 30.0}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    bent = {
        spec.pattern.text: _turn(old, depth)
        for depth, (_, spec) in enumerate(families.read_model_spec(old).attention_specs())
    }
    assert (bent["window(4096)"].base, bent["window(4096)"].scaling) == (30.0, hw.parts.NoScaling())
    assert (bent["causal()"].base, bent["causal()"].scaling) == (
        700.0,
        hw.parts.PositionInterpolation(8.0),
    )


def _turn(config: dict[str, Any], depth: int = 0) -> hw.parts.Rotary:
    spec = dict(families.read_model_spec(config).attention_specs())[f"decoder.{depth}.attention"]
    return next(part for _, part in spec.parts() if isinstance(part, hw.parts.Rotary))


def _plainly(options: dict[str, Any]) -> dict[str, Any]:
    result = hw.model_spec.to_dict(families.read_model_spec(options))
    result.pop("notes", None)
    return result


@pytest.mark.parametrize("name", KINDS)
def test_missing_keys_have_the_defaults_of_transformers(name: str):
    """Of small models: what transformers writes of one says the same as the few keys that it was
    made of.
    """
    kind = KINDS[name]
    few = kind.keys | {"model_type": kind.config_of_class.model_type}
    assert _plainly(few) == _plainly(kind.config_of_class.to_dict() | {"architectures": None})


# Published by their authors alone; tests/models/families/test_published_variants.py reads their
# checkpoints.
NOT_IN_TRANSFORMERS = {"dcformer", "dcpythia"}


@pytest.mark.parametrize("family", sorted(families.FAMILIES.keys() - NOT_IN_TRANSFORMERS))
def test_a_config_with_only_a_model_type_is_the_default_model(family: str):
    """Every size that is left out, against the defaults of transformers' own configs."""
    usual = transformers.CONFIG_MAPPING[family]().to_dict() | {"architectures": None}
    if family == "deepseek_v2":
        usual["num_experts_per_tok"] = 6  # theirs is None, and their model fails until it is told
    assert _plainly({"model_type": family}) == _plainly(usual)


# --- folders read by our own loader ---------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
def test_a_folder_gives_the_logits_of_transformers(name: str, tmp_path: Path):
    kind = KINDS[name]
    theirs = kind.build(**EXPERTS.get(name, {}))
    for key, buffer in theirs.named_buffers():
        if key.endswith("final_logits_bias"):
            buffer.normal_()
    theirs.save_pretrained(tmp_path)
    ours = hw.load(tmp_path)
    assert ours.spec == read(kind)
    assert sum(p.numel() for p in ours.parameters()) == sum(
        p.numel() for p in theirs.parameters() if p.requires_grad
    )
    inputs = kind.inputs()
    with torch.no_grad():
        outputs = theirs(**inputs)
        expected = outputs.logits if "logits" in outputs else outputs.pooler_output
        x = inputs.get("decoder_input_ids", inputs["input_ids"])
        got = ours(x, source=inputs["input_ids"]) if "decoder_input_ids" in inputs else ours(x)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(
        got, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item())
    )
