"""headwise: a PyTorch library for building, measuring and changing attention heads.

A layer is described by an `AttentionSpec`, which `design` builds from a few arguments. From the
spec follow the layer (`Attention`), its costs (`cost`), the backends that can run it (`why`) and
its text form (`to_toml`). `build`, `train` and `generate` are for whole models; `load`, `sites`,
`ablate`, `heads` and `importance` analyse trained ones; `prune`, `convert` and `uptrain` change
them. Public names are imported when they are first used.

The rooms, from the top: `cli`, the commands; `viewer`, `learn` and `studies`; `surgery`; `observe`
and `hub`; `costs` and `training`; `models`; `attention`, the layer; `kernels` and `report`; `util`.

>>> import headwise as hw
>>> hw.design(model=512, heads=8, kv=2).heads
Heads.grouped(q=8, kv=2, dim=64)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors only; at run time names are imported on first use
    from .attention import LongformerAttention, MergedAttention, depth_scaled_init, redraw_features
    from .attention.attention import Attention
    from .attention.backends.backend_report import why
    from .attention.cache import KVCache
    from .attention.interfaces.core_types import AuxLosses, CallSize, Probe
    from .attention.masking.patterns import (
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
    from .attention.masking.sequence_info import AttentionMask, SequenceInfo
    from .attention.op_trace import walk
    from .attention.parts import REGISTRY
    from .attention.parts.collaborative import Collaborative, convert_to_collaborative
    from .attention.parts.differential import Differential, DifferentialV2
    from .attention.parts.dot_product import Additive, Dot, Gaussian, Softcap
    from .attention.parts.dynamic_composition import Dynamic
    from .attention.parts.entmax import Entmax
    from .attention.parts.feature_map import FeatureMap, Sum
    from .attention.parts.gated_attention import Concrete, HeadGate, OutputGate
    from .attention.parts.latent_attention import Latent, convert_to_latent
    from .attention.parts.linear_projection import Direct, Values
    from .attention.parts.merges import Concat, SumHeads
    from .attention.parts.mixture_of_heads import Routed, convert_to_mixture_of_heads
    from .attention.parts.overlapping_heads import Overlapping
    from .attention.parts.relative_position_bias import (
        Alibi,
        ContinuousBias,
        Shaw,
        ShawValues,
        T5Bias,
    )
    from .attention.parts.rms_norms import HeadNorm, QKNorm
    from .attention.parts.rotary_embedding import NTK, PI, Llama3, Plain, Rotary, YaRN
    from .attention.parts.softmax import Sigmoid, SinkSoftmax, Softmax, WeightDropout
    from .attention.parts.synthesizer import Average, Learned
    from .attention.parts.talking_heads import Knocking, TalkingHeads
    from .attention.position_embeddings import LearnedPositions, SinusoidalPositions
    from .attention.presets import PRESETS, design, from_json, from_toml
    from .attention.spec.attention_spec import AttentionSpec
    from .attention.spec.heads import Heads
    from .attention.spec.serialization import to_json, to_toml
    from .attention.tensor_attention import attend
    from .costs.activations import layer_activation_memory
    from .costs.cost_report import Workload, cost
    from .costs.part_checks import check_part
    from .costs.roofline import Device
    from .costs.size_matching import match_size
    from .costs.training_memory import ActivationSettings, activation_memory
    from .hub import export, load
    from .models import Transformer, build, save
    from .models.distributed import Parallelism
    from .models.generation import BatchingConfig, Engine
    from .models.generation.decoding_config import DecodingConfig
    from .models.generation.decoding_state import greedy_decode
    from .models.generation.generate import generate, stream
    from .models.model_spec import ProcessorSpec
    from .observe.head_analysis.annotated_examples import Example, ExampleReader
    from .observe.head_analysis.attention_maps import compute_attention_maps
    from .observe.head_analysis.head_circuits import get_circuits, make_random_baseline
    from .observe.head_analysis.head_classes import classify_heads
    from .observe.head_analysis.head_importance import estimate_importance
    from .observe.head_analysis.head_measurement import measure_heads
    from .observe.head_analysis.head_redundancy import measure_redundancy
    from .observe.head_analysis.logit_attribution import attribute_logit
    from .observe.head_analysis.rank_analysis import measure_qk_spectra
    from .observe.head_analysis.text_analysis import heads, importance
    from .observe.inspect.ablation import Noise, Resample, ablate, patch
    from .observe.inspect.adapters.declarations import AttentionSite, declare
    from .observe.inspect.attention_sites import sites
    from .observe.inspect.dataset_means import head_means, head_noise, head_outputs
    from .observe.inspect.model_inputs import run_model
    from .observe.inspect.trace_capture import Capture, trace
    from .observe.traces import Trace, compare_traces, load_trace
    from .surgery.attention_replacement import fold_bias, fold_qk_transforms
    from .surgery.conversion import convert
    from .surgery.distillation import uptrain
    from .surgery.module_surgery import convert_module, prune_module
    from .surgery.pruning import prune
    from .surgery.verification.proof import prove
    from .training import Evaluation, Recipe, TrainingResult, evaluate, train
    from .util.errors import CacheFull, NoBackend, SpecError, TrainingDiverged
    from .viewer.view import view, view_attention

__version__ = "0.1.0"

# The module of each public name. Modules, and torch, are only imported when a name is used.
_MODULE_OF_NAME = {
    "CacheFull": "util.errors",
    "TrainingDiverged": "util.errors",
    "NoBackend": "util.errors",
    "SpecError": "util.errors",
    "Heads": "attention.spec.heads",
    "BigBird": "attention.masking.patterns",
    "Blocks": "attention.masking.patterns",
    "Causal": "attention.masking.patterns",
    "Dilated": "attention.masking.patterns",
    "Edges": "attention.masking.patterns",
    "First": "attention.masking.patterns",
    "Full": "attention.masking.patterns",
    "Global": "attention.masking.patterns",
    "Pattern": "attention.masking.patterns",
    "PerHead": "attention.masking.patterns",
    "Prefix": "attention.masking.patterns",
    "Window": "attention.masking.patterns",
    "AuxLosses": "attention.interfaces.core_types",
    "CallSize": "attention.interfaces.core_types",
    "AttentionSpec": "attention.spec.attention_spec",
    "AttentionMask": "attention.masking.sequence_info",
    "SequenceInfo": "attention.masking.sequence_info",
    "KVCache": "attention.cache",
    "Probe": "attention.interfaces.core_types",
    "PRESETS": "attention.presets",
    "design": "attention.presets",
    "from_json": "attention.presets",
    "from_toml": "attention.presets",
    "to_json": "attention.spec.serialization",
    "to_toml": "attention.spec.serialization",
    "Attention": "attention.attention",
    "LongformerAttention": "attention",
    "MergedAttention": "attention",
    "depth_scaled_init": "attention",
    "redraw_features": "attention",
    "attend": "attention.tensor_attention",
    "build": "models",
    "DecodingConfig": "models.generation.decoding_config",
    "ProcessorSpec": "models.model_spec",
    "generate": "models.generation.generate",
    "stream": "models.generation.generate",
    "greedy_decode": "models.generation.decoding_state",
    "export": "hub",
    "sites": "observe.inspect.attention_sites",
    "AttentionSite": "observe.inspect.adapters.declarations",
    "declare": "observe.inspect.adapters.declarations",
    "ablate": "observe.inspect.ablation",
    "patch": "observe.inspect.ablation",
    "Resample": "observe.inspect.ablation",
    "Noise": "observe.inspect.ablation",
    "head_means": "observe.inspect.dataset_means",
    "head_noise": "observe.inspect.dataset_means",
    "head_outputs": "observe.inspect.dataset_means",
    "load": "hub",
    "run_model": "observe.inspect.model_inputs",
    "trace": "observe.inspect.trace_capture",
    "Capture": "observe.inspect.trace_capture",
    "Trace": "observe.traces",
    "ExampleReader": "observe.head_analysis.annotated_examples",
    "Example": "observe.head_analysis.annotated_examples",
    "measure_heads": "observe.head_analysis.head_measurement",
    "heads": "observe.head_analysis.text_analysis",
    "importance": "observe.head_analysis.text_analysis",
    "classify_heads": "observe.head_analysis.head_classes",
    "estimate_importance": "observe.head_analysis.head_importance",
    "measure_redundancy": "observe.head_analysis.head_redundancy",
    "get_circuits": "observe.head_analysis.head_circuits",
    "compute_attention_maps": "observe.head_analysis.attention_maps",
    "attribute_logit": "observe.head_analysis.logit_attribution",
    "measure_qk_spectra": "observe.head_analysis.rank_analysis",
    "make_random_baseline": "observe.head_analysis.head_circuits",
    "prune": "surgery.pruning",
    "convert_module": "surgery.module_surgery",
    "prune_module": "surgery.module_surgery",
    "prove": "surgery.verification.proof",
    "convert": "surgery.conversion",
    "uptrain": "surgery.distillation",
    "convert_to_latent": "attention.parts.latent_attention",
    "convert_to_mixture_of_heads": "attention.parts.mixture_of_heads",
    "load_trace": "observe.traces",
    "compare_traces": "observe.traces",
    "save": "models",
    "Transformer": "models",
    "BatchingConfig": "models.generation",
    "Engine": "models.generation",
    "convert_to_collaborative": "attention.parts.collaborative",
    "Workload": "costs.cost_report",
    "cost": "costs.cost_report",
    "match_size": "costs.size_matching",
    "Device": "costs.roofline",
    "ActivationSettings": "costs.training_memory",
    "layer_activation_memory": "costs.activations",
    "activation_memory": "costs.training_memory",
    "check_part": "costs.part_checks",
    "fold_bias": "surgery.attention_replacement",
    "fold_qk_transforms": "surgery.attention_replacement",
    "LearnedPositions": "attention.position_embeddings",
    "SinusoidalPositions": "attention.position_embeddings",
    "Recipe": "training",
    "TrainingResult": "training",
    "train": "training",
    "Evaluation": "training",
    "evaluate": "training",
    "Parallelism": "models.distributed",
    "view": "viewer.view",
    "view_attention": "viewer.view",
    "walk": "attention.op_trace",
    "why": "attention.backends.backend_report",
    "REGISTRY": "attention.parts",
}
# Names that occur in the repr of a spec, besides parts.
_REPR_NAMES = {
    name: home
    for name, home in _MODULE_OF_NAME.items()
    if home
    in ("attention.spec.heads", "attention.spec.attention_spec", "attention.masking.patterns")
}
_PARTS = f"{__name__}.attention.parts"
# The packages and modules that are attributes of this one.
_MODULES = {
    "attention": "attention",
    "backends": "attention.backends",
    "cache": "attention.cache",
    "costs": "costs",
    "data": "training.data",
    "distributed": "models.distributed",
    "errors": "util.errors",
    "families": "models.families",
    "generation": "models.generation",
    "head_analysis": "observe.head_analysis",
    "hub": "hub",
    "inspect": "observe.inspect",
    "interfaces": "attention.interfaces",
    "masking": "attention.masking",
    "model_spec": "models.model_spec",
    "models": "models",
    "part_checks": "costs.part_checks",
    "parts": "attention.parts",
    "presets": "attention.presets",
    "spec": "attention.spec",
    "surgery": "surgery",
    "traces": "observe.traces",
    "training": "training",
    "viewer": "viewer",
}

__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    """Import a public name, a module, or a part from the registry (so new parts need no entry
    here).
    """
    if name in _MODULE_OF_NAME:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{_MODULES[name]}")
    elif name[:1].isupper() and name in (registry := import_module(_PARTS).REGISTRY):
        value = registry[name]
    else:
        raise AttributeError(f"headwise has no {name!r}")
    globals()[name] = value
    if _PARTS in sys.modules:  # specs may exist now: import the names that their repr may contain
        globals().update(import_module(_PARTS).REGISTRY)
        globals().update(
            {
                key: getattr(import_module(f"{__name__}.{home}"), key)
                for key, home in _REPR_NAMES.items()
            }
        )
    return value


def __dir__() -> list[str]:
    return [*_MODULE_OF_NAME, *_MODULES, *import_module(_PARTS).REGISTRY]
