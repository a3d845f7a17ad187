"""headwise: a PyTorch library for building, measuring and changing attention heads.

A layer is described by an `AttentionSpec`, which `design` builds from a few arguments. From the
spec follow the layer (`Attention`), its costs (`cost`), the backends that can run it (`why`) and
its text form (`to_toml`). `build`, `train` and `generate` are for whole models; `load`, `sites`,
`ablate`, `heads` and `importance` analyse trained ones; `prune`, `convert` and `uptrain` change
them. Public names are imported when they are first used.

Packages of a layer: `spec`, `interfaces`, `parts` and `presets` describe it, `masking` and `cache`
hold positions and past tokens, `nn` runs it through `backends`, `ops` and `kernels`, and `costs`
counts it. Of models: `model_spec`, `families`, `models` and `hub`; `data`, `training`,
`distributed` and `studies`; `generation`. Of heads: `inspect`, `traces`,
`head_analysis` and `surgery`. To look at and compare: `viewer`, `learn`, `demo`,
`part_checks` and `cli`. Helpers: `errors`, `escaping`, `files`, `output_paths`, `progress`,
`size_limits`, `report` and `machine`.

>>> import headwise as hw
>>> hw.design(model=512, heads=8, kv=2).heads
Heads.grouped(q=8, kv=2, dim=64)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors only; at run time names are imported on first use
    from .backends.backend_report import why
    from .cache import KVCache
    from .costs.activations import layer_activation_memory
    from .costs.cost_report import Workload, cost
    from .costs.formula_checks import check_formulas
    from .costs.roofline import Device
    from .costs.size_matching import match_size
    from .costs.training_memory import ActivationSettings, activation_memory
    from .distributed import Parallelism
    from .errors import CacheFull, NoBackend, SpecError, TrainingDiverged
    from .generation import BatchingConfig, Engine
    from .generation.decoding_config import DecodingConfig
    from .generation.decoding_strategies import greedy_decode
    from .generation.generate import generate, stream
    from .head_analysis.annotated_examples import Example, ExampleReader
    from .head_analysis.attention_maps import compute_attention_maps
    from .head_analysis.head_circuits import get_circuits
    from .head_analysis.head_classes import classify_heads
    from .head_analysis.head_importance import estimate_importance
    from .head_analysis.head_measurement import measure_heads
    from .head_analysis.head_redundancy import measure_redundancy
    from .head_analysis.logit_attribution import attribute_logit
    from .head_analysis.random_baseline import make_random_baseline
    from .head_analysis.rank_analysis import measure_qk_spectra
    from .head_analysis.text_analysis import heads, importance
    from .hub import export, load
    from .inspect.ablation import Noise, Resample, ablate, patch
    from .inspect.adapters.declarations import AttentionSite, declare
    from .inspect.attention_sites import sites
    from .inspect.dataset_means import head_means, head_noise, head_outputs
    from .inspect.model_inputs import run_model
    from .inspect.trace_capture import Capture, trace
    from .interfaces.core_types import AuxLosses, CallSize, Probe
    from .masking.patterns import (
        BigBird,
        Blocks,
        Causal,
        Dilated,
        Edges,
        First,
        Full,
        Global,
        Pattern,
        PerHead,
        Prefix,
        Window,
    )
    from .masking.sequence_info import AttentionMask, SequenceInfo
    from .model_spec import ProcessorSpec
    from .models import Transformer, build, save
    from .nn import LongformerAttention, MergedAttention, depth_scaled_init, redraw_features
    from .nn.attention import Attention
    from .nn.op_trace import walk
    from .nn.position_embeddings import LearnedPositions, SinusoidalPositions
    from .nn.tensor_attention import attend
    from .part_checks import check_part
    from .parts import REGISTRY
    from .parts.collaborative import Collaborative, convert_to_collaborative
    from .parts.continuous_bias import ContinuousBias
    from .parts.differential import Differential, DifferentialV2
    from .parts.dot_product import Dot
    from .parts.dynamic_composition import Dynamic
    from .parts.entmax import Entmax
    from .parts.feature_map import FeatureMap, Sum
    from .parts.gated_attention import HeadGate, OutputGate
    from .parts.hard_concrete_gate import Concrete
    from .parts.knocking_heads import Knocking
    from .parts.latent_attention import Latent, convert_to_latent
    from .parts.linear_projection import Direct, Values
    from .parts.mean_attention import Average
    from .parts.merges import Concat, SumHeads
    from .parts.mixture_of_heads import Routed, convert_to_mixture_of_heads
    from .parts.overlapping_heads import Overlapping
    from .parts.pairwise_similarity import Additive, Gaussian
    from .parts.relative_position_bias import Alibi, T5Bias
    from .parts.rms_norms import HeadNorm, QKNorm
    from .parts.rotary_embedding import NTK, PI, Llama3, Plain, Rotary, YaRN
    from .parts.shaw_relative_position import Shaw, ShawValues
    from .parts.sigmoid import Sigmoid
    from .parts.softcap import Softcap
    from .parts.softmax import SinkSoftmax, Softmax
    from .parts.synthesizer import Learned
    from .parts.talking_heads import TalkingHeads
    from .parts.weight_dropout import WeightDropout
    from .presets import PRESETS, design, from_json, from_toml
    from .spec.attention_spec import AttentionSpec
    from .spec.heads import Heads
    from .spec.serialization import to_json, to_toml
    from .surgery.conversion import convert
    from .surgery.distillation import uptrain
    from .surgery.module_surgery import convert_module, prune_module
    from .surgery.pruning import prune
    from .surgery.verification.proof import prove
    from .surgery.weight_folding import fold_bias, fold_qk_transforms
    from .traces import Trace, compare_traces, load_trace
    from .training import Evaluation, Recipe, TrainingResult, evaluate, train
    from .viewer.view import view, view_attention

__version__ = "0.1.0"

# The module of each public name. Modules, and torch, are only imported when a name is used.
_MODULE_OF_NAME = {
    "CacheFull": "errors",
    "TrainingDiverged": "errors",
    "NoBackend": "errors",
    "SpecError": "errors",
    "Heads": "spec.heads",
    "BigBird": "masking.patterns",
    "Blocks": "masking.patterns",
    "Causal": "masking.patterns",
    "Dilated": "masking.patterns",
    "Edges": "masking.patterns",
    "First": "masking.patterns",
    "Full": "masking.patterns",
    "Global": "masking.patterns",
    "Pattern": "masking.patterns",
    "PerHead": "masking.patterns",
    "Prefix": "masking.patterns",
    "Window": "masking.patterns",
    "AuxLosses": "interfaces.core_types",
    "CallSize": "interfaces.core_types",
    "AttentionSpec": "spec.attention_spec",
    "AttentionMask": "masking.sequence_info",
    "SequenceInfo": "masking.sequence_info",
    "KVCache": "cache",
    "Probe": "interfaces.core_types",
    "PRESETS": "presets",
    "design": "presets",
    "from_json": "presets",
    "from_toml": "presets",
    "to_json": "spec.serialization",
    "to_toml": "spec.serialization",
    "Attention": "nn.attention",
    "LongformerAttention": "nn",
    "MergedAttention": "nn",
    "depth_scaled_init": "nn",
    "redraw_features": "nn",
    "attend": "nn.tensor_attention",
    "build": "models",
    "DecodingConfig": "generation.decoding_config",
    "ProcessorSpec": "model_spec",
    "generate": "generation.generate",
    "stream": "generation.generate",
    "greedy_decode": "generation.decoding_strategies",
    "export": "hub",
    "sites": "inspect.attention_sites",
    "AttentionSite": "inspect.adapters.declarations",
    "declare": "inspect.adapters.declarations",
    "ablate": "inspect.ablation",
    "patch": "inspect.ablation",
    "Resample": "inspect.ablation",
    "Noise": "inspect.ablation",
    "head_means": "inspect.dataset_means",
    "head_noise": "inspect.dataset_means",
    "head_outputs": "inspect.dataset_means",
    "load": "hub",
    "run_model": "inspect.model_inputs",
    "trace": "inspect.trace_capture",
    "Capture": "inspect.trace_capture",
    "Trace": "traces",
    "ExampleReader": "head_analysis.annotated_examples",
    "Example": "head_analysis.annotated_examples",
    "measure_heads": "head_analysis.head_measurement",
    "heads": "head_analysis.text_analysis",
    "importance": "head_analysis.text_analysis",
    "classify_heads": "head_analysis.head_classes",
    "estimate_importance": "head_analysis.head_importance",
    "measure_redundancy": "head_analysis.head_redundancy",
    "get_circuits": "head_analysis.head_circuits",
    "compute_attention_maps": "head_analysis.attention_maps",
    "attribute_logit": "head_analysis.logit_attribution",
    "measure_qk_spectra": "head_analysis.rank_analysis",
    "make_random_baseline": "head_analysis.random_baseline",
    "prune": "surgery.pruning",
    "convert_module": "surgery.module_surgery",
    "prune_module": "surgery.module_surgery",
    "prove": "surgery.verification.proof",
    "convert": "surgery.conversion",
    "uptrain": "surgery.distillation",
    "convert_to_latent": "parts.latent_attention",
    "convert_to_mixture_of_heads": "parts.mixture_of_heads",
    "load_trace": "traces",
    "compare_traces": "traces",
    "save": "models",
    "Transformer": "models",
    "BatchingConfig": "generation",
    "Engine": "generation",
    "convert_to_collaborative": "parts.collaborative",
    "Workload": "costs.cost_report",
    "cost": "costs.cost_report",
    "match_size": "costs.size_matching",
    "Device": "costs.roofline",
    "ActivationSettings": "costs.training_memory",
    "layer_activation_memory": "costs.activations",
    "activation_memory": "costs.training_memory",
    "check_formulas": "costs.formula_checks",
    "check_part": "part_checks",
    "fold_bias": "surgery.weight_folding",
    "fold_qk_transforms": "surgery.weight_folding",
    "LearnedPositions": "nn.position_embeddings",
    "SinusoidalPositions": "nn.position_embeddings",
    "Recipe": "training",
    "TrainingResult": "training",
    "train": "training",
    "Evaluation": "training",
    "evaluate": "training",
    "Parallelism": "distributed",
    "view": "viewer.view",
    "view_attention": "viewer.view",
    "walk": "nn.op_trace",
    "why": "backends.backend_report",
    "REGISTRY": "parts",
}
# Names that occur in the repr of a spec, besides parts.
_REPR_NAMES = {
    name: home
    for name, home in _MODULE_OF_NAME.items()
    if home in ("spec.heads", "spec.attention_spec", "masking.patterns")
}
_MODULES = (
    "backends",
    "costs",
    "data",
    "distributed",
    "errors",
    "families",
    "generation",
    "head_analysis",
    "hub",
    "inspect",
    "interfaces",
    "masking",
    "model_spec",
    "models",
    "nn",
    "part_checks",
    "parts",
    "presets",
    "spec",
    "surgery",
    "traces",
    "training",
    "viewer",
)

__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    """Import a public name, a module, or a part from the registry (so new parts need no entry
    here).
    """
    if name in _MODULE_OF_NAME:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    elif name[:1].isupper() and name in (registry := import_module(f"{__name__}.parts").REGISTRY):
        value = registry[name]
    else:
        raise AttributeError(f"headwise has no {name!r}")
    globals()[name] = value
    if (
        f"{__name__}.parts" in sys.modules
    ):  # specs may exist now: make all names available that their repr may contain
        globals().update(import_module(f"{__name__}.parts").REGISTRY)
        globals().update(
            {
                key: getattr(import_module(f"{__name__}.{home}"), key)
                for key, home in _REPR_NAMES.items()
            }
        )
    return value


def __dir__() -> list[str]:
    return [*_MODULE_OF_NAME, *_MODULES, *import_module(f"{__name__}.parts").REGISTRY]
