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

from typing import TYPE_CHECKING

from .util.lazy_names import import_lazily

if TYPE_CHECKING:  # for type checkers and editors only; at run time names are imported on first use
    from . import attention, costs, models, surgery, training
    from .attention import backends, interfaces, parts
    from .attention.attention import Attention
    from .attention.backends.backend_report import why
    from .attention.cache import KVCache
    from .attention.interfaces.core_types import Probe
    from .attention.masking import patterns
    from .attention.masking.sequence_info import SequenceInfo
    from .attention.op_trace import walk
    from .attention.parts.rotary_embedding import Rotary
    from .attention.presets import PRESETS, design, from_json, from_toml
    from .attention.spec.attention_spec import AttentionSpec
    from .attention.spec.heads import Heads
    from .attention.spec.serialization import to_json, to_toml
    from .attention.tensor_attention import attend
    from .costs.cost_report import Workload
    from .costs.part_checks import check_part
    from .costs.size_matching import match_size
    from .hub import export, load
    from .hub.cost_targets import cost
    from .models import Transformer, build, families, generation, model_spec, save
    from .models.distributed import Parallelism
    from .models.generation import Engine
    from .models.generation.decoding_config import DecodingConfig
    from .models.generation.generate import generate, stream
    from .models.model_spec import ProcessorSpec
    from .observe import head_analysis, inspect, traces
    from .observe.head_analysis.annotated_examples import Example, ExampleReader
    from .observe.head_analysis.attention_maps import attribute_logit, compute_attention_maps
    from .observe.head_analysis.head_circuits import get_circuits
    from .observe.head_analysis.head_importance import estimate_importance
    from .observe.head_analysis.head_measurement import measure_heads
    from .observe.head_analysis.head_redundancy import measure_redundancy
    from .observe.head_analysis.text_analysis import heads, importance
    from .observe.inspect.ablation import Noise, Resample, ablate, patch
    from .observe.inspect.adapters.declarations import AttentionSite, declare
    from .observe.inspect.attention_sites import sites
    from .observe.inspect.dataset_means import head_means, head_noise, head_outputs
    from .observe.inspect.model_inputs import run_model
    from .observe.inspect.trace_capture import Capture, trace
    from .observe.traces import Trace, compare_traces, load_trace
    from .surgery.any_model import convert, prune
    from .surgery.attention_replacement import fold_bias, fold_qk_transforms
    from .surgery.distillation import uptrain
    from .surgery.module_surgery import convert_module, prune_module
    from .surgery.verification.verify import verify
    from .training import Recipe, data, evaluate, train
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
    "AttentionSpec": "attention.spec.attention_spec",
    "Rotary": "attention.parts.rotary_embedding",  # the part of most models, also in hw.parts
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
    "attend": "attention.tensor_attention",
    "build": "models",
    "DecodingConfig": "models.generation.decoding_config",
    "ProcessorSpec": "models.model_spec",
    "generate": "models.generation.generate",
    "stream": "models.generation.generate",
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
    "compute_attention_maps": "observe.head_analysis.attention_maps",
    "get_circuits": "observe.head_analysis.head_circuits",
    "measure_heads": "observe.head_analysis.head_measurement",
    "heads": "observe.head_analysis.text_analysis",
    "importance": "observe.head_analysis.text_analysis",
    "estimate_importance": "observe.head_analysis.head_importance",
    "measure_redundancy": "observe.head_analysis.head_redundancy",
    "attribute_logit": "observe.head_analysis.attention_maps",
    "prune": "surgery.any_model",
    "convert_module": "surgery.module_surgery",
    "prune_module": "surgery.module_surgery",
    "verify": "surgery.verification.verify",
    "convert": "surgery.any_model",
    "uptrain": "surgery.distillation",
    "load_trace": "observe.traces",
    "compare_traces": "observe.traces",
    "save": "models",
    "Transformer": "models",
    "Engine": "models.generation",
    "Workload": "costs.cost_report",
    "cost": "hub.cost_targets",
    "match_size": "costs.size_matching",
    "check_part": "costs.part_checks",
    "fold_bias": "surgery.attention_replacement",
    "fold_qk_transforms": "surgery.attention_replacement",
    "Recipe": "training",
    "train": "training",
    "evaluate": "training",
    "Parallelism": "models.distributed",
    "view": "viewer.view",
    "view_attention": "viewer.view",
    "walk": "attention.op_trace",
    "why": "attention.backends.backend_report",
    "attention": "attention:",
    "backends": "attention.backends:",
    "costs": "costs:",
    "data": "training.data:",
    "families": "models.families:",
    "generation": "models.generation:",
    "head_analysis": "observe.head_analysis:",
    "inspect": "observe.inspect:",
    "interfaces": "attention.interfaces:",
    "model_spec": "models.model_spec:",
    "models": "models:",
    "parts": "attention.parts:",
    "patterns": "attention.masking.patterns:",
    "surgery": "surgery:",
    "traces": "observe.traces:",
    "training": "training:",
}
__all__ = sorted(_MODULE_OF_NAME)
_SEARCHED = ("parts", "patterns", "costs", "attention", "generation", "head_analysis", "training")
__getattr__ = import_lazily(__name__, _MODULE_OF_NAME, _SEARCHED)


def __dir__() -> list[str]:
    return __all__
