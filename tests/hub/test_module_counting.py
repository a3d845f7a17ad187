"""Models counted from their modules equal runs with real tensors, and the readers of families."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import cli
from headwise.costs.cost_estimate import CostEstimate, estimate_cost
from headwise.costs.counted_model import CountedModel
from headwise.hub.module_counting import count_model
from headwise.hub.transformers_loading import find_class_of_task
from support.small_configs import SMALL, shrink

transformers = pytest.importorskip("transformers")

# --- The readers of families ----------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "vocab_size": 67, "max_position_embeddings": 2048}
LLAMA = SIZES | {"num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0}
BART: dict[str, Any] = {"d_model": 32, "vocab_size": 67, "pad_token_id": 0}
for stack in ("encoder", "decoder"):
    BART |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 48}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
MLA |= {"v_head_dim": 6, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED = EXPERTS | {
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
T5 = {"d_model": 32, "d_kv": 6, "num_heads": 4, "num_layers": 2, "d_ff": 48, "vocab_size": 67}
IMAGES = {"image_size": 32, "patch_size": 8, "architectures": ["ViTForImageClassification"]}
KNOWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 67},
    "llama": LLAMA,
    "qwen3": LLAMA,
    "mistral": LLAMA | {"sliding_window": 11},
    "gemma2": LLAMA | {"sliding_window": 5},
    "gemma3_text": LLAMA | {"sliding_window": 7},
    "gpt_oss": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "qwen3_moe": LLAMA | EXPERTS | {"num_experts": 8},
    "bert": SIZES,
    "t5": T5,
    "bart": BART,
    "vit": SIZES | IMAGES,
    "deepseek_v3": SIZES | MLA | ROUTED,
}
NUMBERS = ("params", "active_params", "weights_bytes", "flops", "counted_flops")
NUMBERS += ("kv_bytes_per_token", "kv_bytes_per_source_token", "kv_bytes", "kv_reserved_bytes")


def estimate(model: Any, context: int, **options: Any) -> CostEstimate:
    return estimate_cost(model, hw.Workload(context=context, **options), "model")


@pytest.mark.parametrize("family", KNOWN)
def test_counted_numbers_equal_those_of_the_reader(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **KNOWN[family])
    options: dict[str, Any] = {"batch": 3, "dtype": "fp32"}
    if family not in ("bert", "vit"):
        options["generate"] = 10
    if family in ("t5", "bart"):
        options["source"] = 500
    counted = estimate(count_model(config), 1000, **options).data
    read = estimate(
        hw.families.read_model_spec({"model_type": family, **KNOWN[family]}), 1000, **options
    ).data
    assert {name: counted[name] for name in NUMBERS} == {name: read[name] for name in NUMBERS}


# --- Runs with real tensors -----------------------------------------------------------------------


class Truth:
    """FLOPs of a real run, those of pairs that its masks exclude, and its cache."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.excluded = 0

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Compute attention as eager functions do."""
        mask = options.get("attention_mask", mask)
        copies = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(copies, 1).transpose(2, 3)
        allowed = torch.ones_like(scores, dtype=torch.bool)
        if mask is not None:
            scores = scores + mask[..., : k.shape[2]]
            allowed = (mask[..., : k.shape[2]] > -1).expand_as(scores)
        self.excluded += 2 * int((~allowed).sum()) * (q.shape[-1] + v.shape[-1])
        output = scores.softmax(-1) @ v.repeat_interleave(copies, 1)
        return output.transpose(1, 2).contiguous(), None

    def run(self, **arguments: Any) -> tuple[Any, int, int]:
        """Return outputs, and counted and required FLOPs."""
        self.excluded = 0
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            output = self.model(**arguments)
        return output, counter.get_total_flops(), counter.get_total_flops() - self.excluded


def build_truth(config: Any) -> Truth:
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    truth = Truth(nn.Module())
    AttentionInterface.register("truth", truth.attend)
    AttentionMaskInterface.register("truth", eager_mask)
    torch.manual_seed(0)
    model = find_class_of_task(config)._from_config(config, attn_implementation="truth").eval()
    if model._can_set_experts_implementation():  # as many products as tokens have experts
        model.set_experts_implementation("batched_mm")
    truth.model = model
    return truth


def held_bytes(cache: Any, tokens: int) -> int:
    """Count bytes of a cache in float32; that of a window lacks the token of the next query."""
    total = 0
    for layer in getattr(cache, "layers", ()):
        tensors = [one for one in vars(layer).values() if isinstance(one, Tensor) and one.dim() > 2]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += [one for one in states.values() if one is not None]
        window = layer.sliding_window if getattr(layer, "is_sliding", False) else 0
        for one in tensors:
            is_cut = window and one.shape[-2] == window - 1 < tokens
            total += 4 * one.numel() * (window if is_cut else window - 1 or 1) // (window - 1 or 1)
    states = [one for one in getattr(cache, "linear_cache", ()) if isinstance(one, Tensor)]
    return total + sum(4 * one.numel() for one in states)


TEXT = [
    "qwen3_next",
    "qwen3_5_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe",
    "glm_moe_dsa",
    "kimi_linear",
    "minimax",
    "minimax_m2",
    "llama4_text",
    "ministral3",
    "phimoe",
    "granitemoehybrid",
    "nemotron_h",
    "jamba",
    "falcon_h1",
    "lfm2",
    "olmo_hybrid",
    "ernie4_5",
    "hunyuan_v1_dense",
    "exaone4",
    "apertus",
    "modernbert",
]
LATENT = ("deepseek_v32", "glm_moe_dsa", "kimi_linear")
HALF_LOCAL = ["sliding_attention", "full_attention"] * 2
CHANGES: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": HALF_LOCAL,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
}
WINDOW = 20


def small_config(family: str) -> Any:
    """Return a small config, with windows and chunks shorter than the text."""
    config = shrink(transformers.CONFIG_MAPPING[family](), family, SMALL)
    changes = dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW)
    for name, value in (changes | CHANGES.get(family, {})).items():
        if name not in changes or isinstance(getattr(config, name, None), int):
            setattr(config, name, value)
    return config


@pytest.mark.parametrize("family", TEXT)
def test_counted_numbers_equal_those_of_a_run(family: str) -> None:
    config = small_config(family)
    context = 256
    model = count_model(config)
    counted = estimate(model, context, dtype="fp32")
    truth = build_truth(config)
    ids = torch.randint(3, 99, (1, context))
    output, all_pairs, allowed_pairs = truth.run(input_ids=ids)
    cache = output.get("past_key_values")
    held = held_bytes(cache, context)
    assert counted.parameters.total == sum(one.numel() for one in truth.model.parameters())
    assert counted.counted_flops["prefill"] == all_pairs
    assert counted.cache_bytes == held
    if family == "deepseek_v4":
        assert "it is unknown which pairs are allowed" in " ".join(counted.notes)
    else:
        assert counted.required_flops["prefill"] == allowed_pairs
    if cache is not None and family not in LATENT:
        _, _, of_step = truth.run(input_ids=ids[:, :1], past_key_values=cache)
        next_token = estimate(model, context + 1)
        assert next_token.required_flops["decode"] == of_step


def test_layers_that_share_a_cache_and_states_are_listed() -> None:
    gemma = count_model(small_config("gemma3n_text"))
    cached = [one.times for one in gemma.components if getattr(one, "cached", 0)]
    assert sum(cached) == 2  # of 4 layers
    names = [
        term.name for term in estimate(count_model(small_config("jamba")), 64).cache_numbers.terms
    ]
    assert any(name.endswith("state") for name in names)


SIGNALS = [
    "dinov2",
    "dinov3_vit",
    "siglip2",
    "clip",
    "whisper",
    "vit_mae",
    "audio-spectrogram-transformer",
]


@pytest.mark.parametrize("family", SIGNALS)
def test_images_and_sounds(family: str) -> None:
    config = shrink(transformers.CONFIG_MAPPING[family](), family, SMALL)
    model = count_model(config)
    counted = estimate(model, 16)
    truth = build_truth(config)
    assert counted.parameters.total == sum(one.numel() for one in truth.model.parameters())
    if family == "siglip2":  # it also reads the sizes of its images
        assert counted.required_flops["prefill"] is None
        assert "FLOPs and cache are unknown" in counted.notes[-1]
    else:
        assert (counted.required_flops["prefill"] or 0) > 0


# --- What is refused, and what is said ------------------------------------------------------------


def run_cost(tmp_path: Path, config: Any, *options: str) -> int:
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return cli.main(["cost", str(file), *options])


SMALL_ERNIE = {"model_type": "ernie4_5", "hidden_size": 8, "num_hidden_layers": 2}
SMALL_ERNIE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
SMALL_ERNIE |= {"intermediate_size": 8, "vocab_size": 9}
REFUSED: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "deep": (SMALL_ERNIE | {"num_hidden_layers": 10**7}, (), "give 1,024 or less"),
    "wide": (SMALL_ERNIE | {"hidden_size": 10**12}, (), "hidden_size = 1000000000000"),
    "no number": (SMALL_ERNIE | {"hidden_size": "8"}, (), "config.json: transformers"),
    "negative": (SMALL_ERNIE | {"hidden_size": -8}, (), "config.json"),
    "code": ({"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}, (), "auto_map"),
    "kernel": (SMALL_ERNIE | {"attn_implementation": "owner/kernel"}, (), "may run code"),
    "path": ({"model_type": "../ernie4_5"}, (), "is not known"),
    "list": ("[1]", (), ""),
    "broken": ('{"model_type": "ernie4_5"', (), "is not JSON"),
    "large": (" " * (2**24 + 1), (), ""),
    "layer": (SMALL_ERNIE, ("--layer", "0"), "--layer is for models that headwise reads"),
    "set": (SMALL_ERNIE, ("--set", "a=1"), "--set is for models that headwise reads"),
    "activations": (SMALL_ERNIE, ("--activations",), "--activations is for models"),
    "profile": (SMALL_ERNIE, ("--profile", "sdpa"), "--profile is for models"),
    "checkpoint": (SMALL_ERNIE, ("--checkpoint", "block"), "--checkpoint is for models"),
    "dropout": (SMALL_ERNIE, ("--dropout", "0.1"), "--dropout is for models"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_is_printed_for_what_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, options, message = REFUSED[case]
    assert run_cost(tmp_path, config, *options) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


@pytest.mark.parametrize("case", [*REFUSED][-6:])
def test_options_that_need_a_spec_are_refused_before_any_module_is_built(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a module was built")

    monkeypatch.setattr("headwise.hub.module_counting.count_model", fail)
    assert run_cost(tmp_path, *REFUSED[case][:1], *REFUSED[case][1]) == 2


def test_code_of_a_folder_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.py").write_text("raise SystemExit(7)")
    config = SMALL_ERNIE | {"auto_map": {"AutoModelForCausalLM": "b.B"}}
    assert run_cost(tmp_path, config, "--json") == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["params"] == hw.cost(SMALL_ERNIE)["ernie4_5"].parameters.total
    assert "no reader for 'ernie4_5'" in row["notes"][0]


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = shrink(transformers.CONFIG_MAPPING["llava"](), "llava", SMALL)
    model = count_model(config)
    assert "vision_tower" in " ".join(model.notes)
    bark = CountedModel("bark", "BarkModel", (), (), ("it does not run",))
    data = estimate(bark, 16).data
    assert data["flops"] == {"prefill": None, "backward": None}
    assert data["seconds"] == {}


# --- Quantised weights ----------------------------------------------------------------------------

QUANTISED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["mlp"]},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "skipping": {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["model.layers.0"]},
}


@pytest.mark.parametrize("method", QUANTISED)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_quantised_weights_have_the_bytes_of_the_reader(family: str, method: str) -> None:
    keys = {"model_type": family, **KNOWN[family], "quantization_config": QUANTISED[method]}
    read = hw.families.read_model_spec(keys)
    counted = count_model(transformers.CONFIG_MAPPING[family].from_dict(keys))
    # transformers has two matrices of an expert in one tensor, so with one set of scales
    tolerance = 0.0 if family == "llama" else 0.06
    expected = pytest.approx(estimate(read, 64).weights_bytes, rel=tolerance)
    assert estimate(counted, 64).weights_bytes == expected
    assert counted.quantization is not None
    assert set(read.notes) & set(counted.notes)


def test_mxfp4_is_the_format_of_experts_and_other_formats_are_given() -> None:
    keys = {"model_type": "gpt_oss", **KNOWN["gpt_oss"]}
    mxfp4 = keys | {"quantization_config": {"quant_method": "mxfp4"}}
    for settings, options in ((mxfp4, {}), (keys, {"weights": "fp8"}), (keys, {"weights": "nf4"})):
        counted = count_model(transformers.CONFIG_MAPPING["gpt_oss"].from_dict(settings))
        read = hw.families.read_model_spec(settings)
        numbers = [estimate(one, 64, **options).weights_bytes for one in (counted, read)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05)
        assert numbers[0] < 0.7 * estimate(read, 64, weights="bf16").weights_bytes


def test_an_unknown_format_is_said() -> None:
    config = transformers.LlamaConfig(**LLAMA, quantization_config={"quant_method": "quanto"})
    counted = count_model(config)
    assert estimate(counted, 64).weights_bytes == 2 * counted.parameters.total
    assert "'quanto', which is not known here" in counted.notes[-1]


@pytest.mark.parametrize("family", ["ernie4_5", "llava", "qwen3_moe"])
def test_the_config_stays_as_it_was(family: str) -> None:
    config = shrink(transformers.CONFIG_MAPPING[family](), family, SMALL)
    before = copy.deepcopy(vars(config)) | {"text": copy.deepcopy(vars(config.get_text_config()))}
    count_model(config)
    assert vars(config) | {"text": vars(config.get_text_config())} == before


@pytest.mark.slow
def test_every_model_type_of_transformers() -> None:
    counts: Counter[str] = Counter()
    for family in sorted(transformers.CONFIG_MAPPING):
        try:
            config = shrink(transformers.CONFIG_MAPPING[family](), family, SMALL)
            model = count_model(config)
            with torch.device("meta"):
                real = find_class_of_task(config)._from_config(config)
        except Exception as error:  # transformers cannot build it, or needs another package
            counts["not built"] += 1
            print(f"{family}: {' '.join(str(error).split())[:100]}")
            continue
        estimated = estimate(model, 48)
        counts["built"] += 1
        numel = sum(one.numel() for one in real.parameters())
        counts["parameters equal"] += estimated.parameters.total == numel
        counts["with FLOPs"] += estimated.has_flops
        counts["with a cache"] += estimated.has_cache
        if not estimated.has_flops:
            print(f"{family}: {model.notes[-1]}")
    print(dict(counts))
    assert counts["parameters equal"] == counts["built"] > 400
    assert counts["with FLOPs"] > 350
