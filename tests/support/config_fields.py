"""Cases of config.json for each family, and their comparison with transformers: equal, or refused
with a reason.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

import headwise as hw
from headwise.hub.checkpoint_weights import build_from_weights, wrap_tensors
from headwise.models.families import get_weight_names
from headwise.models.families.config_writer import find_differences
from support.transformers_models import (
    BART,
    BERT,
    HEADS,
    LLAMA,
    MLA,
    T5 as SMALL_T5,
    VIT,
    WIDE,
    WORDS,
    transformers,
)

MAX_RELATIVE_ERROR = 1e-4
LAYERS = 2
FULL = LLAMA | {"num_hidden_layers": LAYERS}
FLAT = {key: value for key, value in FULL.items() if key != "head_dim"}
LOCAL = {"sliding_window": 5}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = FLAT | MLA | EXPERTS | {"num_key_value_heads": HEADS, "n_routed_experts": 16}
LATENT |= {"first_k_dense_replace": 1}
GPT = {"n_embd": WIDE, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": WORDS}
GPT |= {"n_positions": 64}
OPT = {"hidden_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
OPT |= {"ffn_dim": 48, "vocab_size": WORDS, "max_position_embeddings": 64}
NEOX = BERT | {"rotary_pct": 0.5}
T5 = SMALL_T5 | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}
BLOOM = {"hidden_size": WIDE, "vocab_size": WORDS, "n_layer": LAYERS, "n_head": HEADS}


class ConfigBase(NamedTuple):
    """A class of transformers, the keys of a tiny config.json, and the kind of its inputs."""

    model_class: str
    model_type: str
    keys: dict[str, Any]
    inputs: str = "ids"

    @property
    def config_json(self) -> dict[str, Any]:
        """The keys of config.json."""
        return self.keys | {"model_type": self.model_type, "architectures": [self.model_class]}


def _decoder(prefix: str, model_type: str, keys: dict[str, Any], **more: Any) -> ConfigBase:
    return ConfigBase(f"{prefix}ForCausalLM", model_type, keys | more)


BASES = {
    base.model_type: base
    for base in [
        _decoder("Llama", "llama", FULL),
        _decoder("Mistral", "mistral", FULL, **LOCAL),
        _decoder("Qwen2", "qwen2", FLAT, **LOCAL, use_sliding_window=True, max_window_layers=1),
        _decoder("Qwen3", "qwen3", FULL, **LOCAL, use_sliding_window=True, max_window_layers=1),
        _decoder("Gemma", "gemma", FULL),
        _decoder("Gemma2", "gemma2", FULL, **LOCAL, query_pre_attn_scalar=5),
        _decoder(
            "Gemma3", "gemma3_text", FULL, **LOCAL, query_pre_attn_scalar=5, num_hidden_layers=6
        ),
        _decoder("Granite", "granite", FLAT),
        _decoder("SmolLM3", "smollm3", FLAT, num_hidden_layers=4),
        _decoder("Olmo", "olmo", FLAT),
        _decoder("Olmo2", "olmo2", FLAT),
        _decoder("Olmo3", "olmo3", FLAT, **LOCAL, num_hidden_layers=4),
        _decoder("Olmoe", "olmoe", FLAT, num_experts=4, num_experts_per_tok=2),
        _decoder("Phi", "phi", FLAT),
        _decoder("Phi3", "phi3", FLAT, **LOCAL),
        _decoder("Glm", "glm", FULL),
        _decoder("StableLm", "stablelm", FLAT, num_key_value_heads=HEADS),
        _decoder("Cohere", "cohere", FLAT),
        _decoder("Cohere2", "cohere2", FLAT, **LOCAL, num_hidden_layers=4),
        _decoder("Starcoder2", "starcoder2", FLAT, **LOCAL),
        _decoder("Mixtral", "mixtral", FULL, num_local_experts=4, **LOCAL),
        _decoder("Qwen3Moe", "qwen3_moe", FULL, **EXPERTS, num_experts=4, **LOCAL),
        _decoder("DeepseekV2", "deepseek_v2", LATENT),
        _decoder("DeepseekV3", "deepseek_v3", LATENT),
        _decoder("GptOss", "gpt_oss", FULL, **LOCAL, num_local_experts=4, num_experts_per_tok=2),
        ConfigBase("GPT2LMHeadModel", "gpt2", GPT),
        _decoder("GPTJ", "gptj", GPT, rotary_dim=4),
        _decoder("GPTNeoX", "gpt_neox", NEOX),
        _decoder("OPT", "opt", OPT),
        _decoder("Bloom", "bloom", BLOOM),
        ConfigBase("BertForMaskedLM", "bert", BERT),
        ConfigBase("RobertaForMaskedLM", "roberta", BERT),
        ConfigBase("XLMRobertaForMaskedLM", "xlm-roberta", BERT),
        ConfigBase("CamembertForMaskedLM", "camembert", BERT),
        ConfigBase("T5ForConditionalGeneration", "t5", T5, "both"),
        ConfigBase("BartForConditionalGeneration", "bart", BART, "both"),
        ConfigBase("MBartForConditionalGeneration", "mbart", BART, "both"),
        ConfigBase("MarianMTModel", "marian", BART, "both"),
        ConfigBase("PegasusForConditionalGeneration", "pegasus", BART, "both"),
        ConfigBase("ViTForImageClassification", "vit", VIT, "pixels"),
    ]
}
# The classes of some families: how their names begin, and what their models are for.
_DECODERS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification")
_CLASSIFIERS = ("Model", "ForSequenceClassification", "ForTokenClassification")
TASKS = {
    "gpt2": ("GPT2", ("LMHeadModel", *_CLASSIFIERS)),
    "llama": ("Llama", (*_DECODERS, "ForQuestionAnswering")),
    **{stem.lower(): (stem, _DECODERS) for stem in ("Mistral", "Qwen2", "Qwen3", "Gemma2")},
    "gpt_oss": ("GptOss", _DECODERS),
    "deepseek_v2": ("DeepseekV2", ("ForCausalLM", "Model")),
    "deepseek_v3": ("DeepseekV3", ("ForCausalLM", "Model")),
    "bert": (
        "Bert",
        (
            *("ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction", "ForMultipleChoice"),
            *("ForQuestionAnswering", *_CLASSIFIERS),
        ),
    ),
    "t5": ("T5", ("ForConditionalGeneration", "Model", "EncoderModel", "ForTokenClassification")),
    "bart": ("Bart", ("ForConditionalGeneration", "Model", "ForSequenceClassification")),
    "vit": ("ViT", ("ForImageClassification", "Model")),
}
TINY = [(family, stem + task) for family, (stem, tasks) in TASKS.items() for task in tasks]


def tiny_config(family: str, architecture: str) -> dict[str, Any]:
    """The config.json of a tiny model of a class, with five labels."""
    return BASES[family].config_json | {"architectures": [architecture], "num_labels": 5}


EXPERT_FAMILIES = (
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmoe",
)

# --- Values of fields -----------------------------------------------------------------------------

TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
# Values to try, by the fields that take them; sizes are those of the tiny models.
FIELD_VALUES: dict[str, list[Any]] = {
    name: values for names, values in TABLE["values"].items() for name in names.split()
}
ROPES, RATES = FIELD_VALUES["rope_parameters"], [0.4]
# Keys that some family of headwise or an older version of transformers reads, tried in every
# family.
FOREIGN_FIELDS: list[str] = TABLE["foreign"]
NOT_FIELDS: list[str] = TABLE["ignored"]


def list_fields(model_type: str) -> dict[str, str]:
    """Return the type of each field of the config class, of its aliases, and of further keys that
    headwise reads.
    """
    config_class = transformers.CONFIG_MAPPING[model_type]
    keys = RecordedKeys(BASES[model_type].config_json)
    hw.families.read_model_spec(keys)
    fields = dict.fromkeys(sorted(keys.names) + list(FOREIGN_FIELDS), "bool")
    fields |= dict.fromkeys(config_class.attribute_map, "int")
    fields |= {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    return {name: kind for name, kind in fields.items() if name not in NOT_FIELDS}


def list_values(base: ConfigBase, name: str, kind: str) -> list[Any]:
    """Return values that are plausible for a field."""
    layers = base.keys.get("num_hidden_layers", LAYERS)
    if name == "rope_scaling" or (
        name == "rope_parameters" and "Rope" not in kind and "dict" not in kind
    ):
        return ROPES[2:12:3]  # an older name of rope_parameters, or a family without RoPE
    if name in ("layer_types", "no_rope_layers"):
        return [(value * layers)[:layers] for value in FIELD_VALUES[name]]
    if name in FIELD_VALUES:
        return FIELD_VALUES[name]
    alias = transformers.CONFIG_MAPPING[base.model_type].attribute_map.get(name)
    if alias in FIELD_VALUES:
        return FIELD_VALUES[alias]
    if any(word in name for word in ("dropout", "pdrop", "layerdrop", "aux_loss", "init")):
        return RATES
    if "bool" in kind:
        return [True, False]
    if "eps" in name:
        return [0.3]
    if "float" in kind:
        return [0.4, 3.0]
    usual = base.keys.get(name, base.keys.get(alias or "", 4))
    return [usual * 2, max(1, usual - 2)] if isinstance(usual, int) else []


def list_cases(model_type: str, num_pairs: int = 0, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield every value of every field alone, then random pairs of them."""
    base = BASES[model_type]
    fields = list_fields(model_type)
    singles = [
        {name: value} for name, kind in fields.items() for value in list_values(base, name, kind)
    ]
    yield from singles
    draw = random.Random(f"{model_type} {seed}")
    for _ in range(num_pairs):
        first, second = draw.sample(singles, 2)
        yield first | second


# --- Comparison -----------------------------------------------------------------------------------


class RecordedKeys(dict[str, Any]):
    """A config that records which keys are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names = set[str]()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as `dict.get` does."""
        self.names.add(name)
        return super().get(name, default)


class Outcome(NamedTuple):
    """Result of one case: "equal", "refused" by headwise, "invalid" for transformers, or
    "different".
    """

    kind: str
    detail: str = ""
    has_effect: bool = False
    is_read: bool = False
    error: float = 0.0


class FamilyComparison:
    """Comparison of cases of one family; results of equal specs are computed once."""

    def __init__(self, model_type: str) -> None:
        self.base = BASES[model_type]
        self.outputs = dict[str, Tensor]()
        self.usual = self.run_theirs({})[1]

    def compare(self, case: Mapping[str, Any]) -> Outcome:
        """Compare the logits of transformers and headwise for the base config with the keys of a
        case.
        """
        keys = RecordedKeys(self.base.config_json | dict(case))
        try:
            model, theirs = self.run_theirs(case)
        except Exception as error:  # transformers may raise anything
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        if not theirs.isfinite().all():
            return Outcome("invalid", "transformers computes NaN")
        has_effect = theirs.shape != self.usual.shape or not torch.equal(theirs, self.usual)
        try:
            ours = self._run_ours(keys, model)
        except hw.SpecError as error:
            return Outcome("refused", str(error), has_effect, bool(keys.names & set(case)))
        is_read = bool(keys.names & set(case))
        difference = self._find_saved_difference(keys, model.config) if has_effect else ""
        if difference:
            return Outcome("different", f"config.json as saved: {difference}", has_effect, is_read)
        if ours.shape != theirs.shape:
            return Outcome(
                "different",
                f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}",
                has_effect,
                is_read,
            )
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        kind = "equal" if error < MAX_RELATIVE_ERROR else "different"
        return Outcome(kind, f"relative error {error:.2g}", has_effect, is_read, error)

    def run_theirs(self, case: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
        """Return the model of transformers and its logits."""
        options = (
            {"experts_implementation": "eager"} if self.base.model_type in EXPERT_FAMILIES else {}
        )
        keys = json.loads(json.dumps(self.base.keys | dict(case)))
        config = transformers.CONFIG_MAPPING[self.base.model_type].from_dict(keys)
        model_class = getattr(transformers, self.base.model_class)
        model = (
            model_class._from_config(config, attn_implementation="eager", **options).float().eval()
        )
        randomise_weights(model)
        with torch.no_grad():
            outputs = model(**make_inputs(self.base, config), return_dict=True)
        return model, outputs.logits

    def _find_saved_difference(self, keys: RecordedKeys, config: Any) -> str:
        """Return a difference between a config.json and the one that transformers saves of it, or
        "".
        """
        saved = json.loads(config.to_json_string()) | {"architectures": [self.base.model_class]}
        try:
            one, other = (
                replace(hw.families.read_model_spec(values), notes=()) for values in (keys, saved)
            )
        except hw.SpecError:
            return ""
        return "" if one == other else str(next(find_differences(one, other)))

    def _run_ours(self, keys: RecordedKeys, model: nn.Module) -> Tensor:
        spec = hw.families.read_model_spec(keys)
        name = repr(replace(spec, notes=()))
        if name not in self.outputs:
            weights = wrap_tensors(
                self.base.model_class, revert_weight_conversion(model, model.state_dict())
            )
            ours = build_from_weights(spec, get_weight_names(spec.name), weights, 0.0)
            inputs = make_inputs(self.base, model.config)
            x = inputs.get("decoder_input_ids", inputs.get("input_ids", inputs.get("pixel_values")))
            source = {"source": inputs["input_ids"]} if "decoder_input_ids" in inputs else {}
            with torch.no_grad():
                self.outputs[name] = ours(x, **source)
        return self.outputs[name]


def make_inputs(base: ConfigBase, config: Any) -> dict[str, Tensor]:
    """Return two rows without padding tokens."""
    draw = torch.Generator().manual_seed(1)
    if base.inputs == "pixels":
        size, channels = config.image_size, config.num_channels
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.randn(2, channels, height, width, generator=draw)}
    ids = torch.randint(8, 40, (2, 11), generator=draw)
    if base.inputs == "both":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    return {"input_ids": ids}


RANDOM_BUFFERS = ("final_logits_bias", "e_score_correction_bias")


def randomise_weights(model: nn.Module) -> None:
    """Give every weight numbers that matter, which depend on its name and shape alone."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.requires_grad and not name.endswith(RANDOM_BUFFERS):
                continue
            noise = torch.randn(
                tensor.shape, generator=torch.Generator().manual_seed(crc32(name.encode()))
            )
            if tensor.ndim < 2:
                tensor.copy_(float(name.endswith("weight")) + 0.3 * noise)
            else:
                tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)


# --- Table of fields ------------------------------------------------------------------------------


def list_outcomes(
    model_type: str, num_pairs: int, seed: int = 0
) -> list[tuple[dict[str, Any], Outcome]]:
    """Compare all cases of a family."""
    comparison = FamilyComparison(model_type)
    return [(case, comparison.compare(case)) for case in list_cases(model_type, num_pairs, seed)]


def classify_fields(outcomes: Sequence[tuple[dict[str, Any], Outcome]]) -> dict[str, list[str]]:
    """Return the fields by their effect on a loaded model: read, refused, partly refused, none, or
    never valid.
    """
    by_field = dict[str, list[Outcome]]()
    for case, outcome in outcomes:
        if len(case) == 1:
            by_field.setdefault(next(iter(case)), []).append(outcome)
    table = dict[str, list[str]]()
    for name, field_outcomes in sorted(by_field.items()):
        table.setdefault(_classify_field(field_outcomes), []).append(name)
    return dict(sorted(table.items()))


def _classify_field(outcomes: Sequence[Outcome]) -> str:
    valid = [outcome for outcome in outcomes if outcome.kind != "invalid"]
    if not valid:
        return "refused by transformers"
    refused = [outcome for outcome in valid if outcome.kind == "refused"]
    if refused:
        return "refused" if len(refused) == len(valid) else "partly refused"
    return (
        "read" if any(outcome.is_read or outcome.has_effect for outcome in valid) else "no effect"
    )
