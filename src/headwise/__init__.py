"""headwise: the workbench for attention heads.

>>> import headwise as hw
>>> hw.design(model=512, heads=8, kv=2).heads
Heads.grouped(q=8, kv=2, dim=64)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; at run time a name is imported when it is first used
    from .auditing import check_formulas as check_formulas
    from .benching.running import run_benchmarks as run_benchmarks
    from .blocks import (
        LongformerAttention as LongformerAttention,
    )
    from .blocks import (
        MergedAttention as MergedAttention,
    )
    from .blocks import (
        depth_scaled_init as depth_scaled_init,
    )
    from .blueprint import ProcessorSpec as ProcessorSpec
    from .cache import KVCache as KVCache
    from .counting.allocators import RequestBatch as RequestBatch
    from .counting.allocators import kv_cache_bytes as kv_cache_bytes
    from .counting.breakeven import find_crossovers as find_crossovers
    from .counting.capacity import MemoryDemand as MemoryDemand
    from .counting.costs import cost as cost
    from .counting.devices import Device as Device
    from .counting.devices import NumberFormats as NumberFormats
    from .counting.keeping import layer_activation_memory as layer_activation_memory
    from .counting.matching import match_size as match_size
    from .counting.nets import ActivationSettings as ActivationSettings
    from .counting.nets import activation_memory as activation_memory
    from .counting.pricing import Workload as Workload
    from .counting.serving import ServingCost as ServingCost
    from .counting.verdict import check_memory_fit as check_memory_fit
    from .engine import Batching as Batching
    from .engine import Engine as Engine
    from .errors import CacheFull as CacheFull
    from .errors import TrainingDiverged as TrainingDiverged
    from .errors import NoBackend as NoBackend
    from .errors import SpecError as SpecError
    from .folding import fold_bias as fold_bias
    from .folding import fold_qk_transforms as fold_qk_transforms
    from .grouping import Heads as Heads
    from .heads.circuits import get_circuits as get_circuits
    from .heads.classes import classify_heads as classify_heads
    from .heads.measuring import measure_heads as measure_heads
    from .heads.redundancy import measure_redundancy as measure_redundancy
    from .heads.scene import Example as Example
    from .heads.sources import ExampleReader as ExampleReader
    from .heads.spectra import measure_qk_spectra as measure_qk_spectra
    from .heads.twins import make_random_baseline as make_random_baseline
    from .heads.weighing import estimate_importance as estimate_importance
    from .hub import export as export
    from .hub import load as load
    from .hub.capturing import trace as trace
    from .hub.editing import patch as patch
    from .hub.editing import ablate as ablate
    from .hub.finding import sites as sites
    from .hub.keeping import Capture as Capture
    from .hub.means import head_means as head_means
    from .hub.means import head_noise as head_noise
    from .hub.means import head_outputs as head_outputs
    from .hub.offsets import offset_means as offset_means
    from .hub.patches import Noise as Noise
    from .hub.patches import Resample as Resample
    from .hub.routes.projection import declare as declare
    from .models import (
        Decoding as Decoding,
    )
    from .models import (
        Transformer as Transformer,
    )
    from .models import (
        build as build,
    )
    from .models import (
        generate as generate,
    )
    from .models import (
        greedy as greedy,
    )
    from .models import (
        save as save,
    )
    from .models import (
        stream as stream,
    )
    from .module import Attention as Attention
    from .parts import REGISTRY as REGISTRY
    from .parts.additive import Additive as Additive
    from .parts.alibi import Alibi as Alibi
    from .parts.average import Average as Average
    from .parts.collaborative import Collaborative as Collaborative
    from .parts.collaborative import convert_to_collaborative as convert_to_collaborative
    from .parts.concat import Concat as Concat
    from .parts.concrete import Concrete as Concrete
    from .parts.differential import Differential as Differential
    from .parts.differential import DifferentialV2 as DifferentialV2
    from .parts.direct import Direct as Direct
    from .parts.dot import Dot as Dot
    from .parts.dynamic import Dynamic as Dynamic
    from .parts.entmax import Entmax as Entmax
    from .parts.feature_map import FeatureMap as FeatureMap
    from .parts.gaussian import Gaussian as Gaussian
    from .parts.head_gate import HeadGate as HeadGate
    from .parts.head_norm import HeadNorm as HeadNorm
    from .parts.knocking import Knocking as Knocking
    from .parts.latent import Latent as Latent
    from .parts.latent import convert_to_latent as convert_to_latent
    from .parts.learned import Learned as Learned
    from .parts.output_gate import OutputGate as OutputGate
    from .parts.overlapping import Overlapping as Overlapping
    from .parts.qk_norm import QKNorm as QKNorm
    from .parts.rotary import Rotary as Rotary
    from .parts.rotary_scaling import NTK as NTK
    from .parts.rotary_scaling import PI as PI
    from .parts.rotary_scaling import Llama3 as Llama3
    from .parts.rotary_scaling import Plain as Plain
    from .parts.rotary_scaling import YaRN as YaRN
    from .parts.routed import Routed as Routed
    from .parts.routed import convert_to_mixture_of_heads as convert_to_mixture_of_heads
    from .parts.shaw import Shaw as Shaw
    from .parts.shaw import ShawValues as ShawValues
    from .parts.sigmoid import Sigmoid as Sigmoid
    from .parts.sink_softmax import SinkSoftmax as SinkSoftmax
    from .parts.softcap import Softcap as Softcap
    from .parts.softmax import Softmax as Softmax
    from .parts.sum import Sum as Sum
    from .parts.sum_heads import SumHeads as SumHeads
    from .parts.t5_bias import T5Bias as T5Bias
    from .parts.talking_heads import TalkingHeads as TalkingHeads
    from .parts.values import Values as Values
    from .parts.weight_dropout import WeightDropout as WeightDropout
    from .pattern import (
        BigBird as BigBird,
    )
    from .pattern import (
        Blocks as Blocks,
    )
    from .pattern import (
        Causal as Causal,
    )
    from .pattern import (
        Dilated as Dilated,
    )
    from .pattern import (
        Edges as Edges,
    )
    from .pattern import (
        First as First,
    )
    from .pattern import (
        Full as Full,
    )
    from .pattern import (
        Global as Global,
    )
    from .pattern import (
        Pattern as Pattern,
    )
    from .pattern import (
        Prefix as Prefix,
    )
    from .pattern import (
        Window as Window,
    )
    from .positions import LearnedPositions as LearnedPositions
    from .positions import SinusoidalPositions as SinusoidalPositions
    from .presets import PRESETS as PRESETS
    from .presets import design as design
    from .presets import from_json as from_json
    from .presets import from_toml as from_toml
    from .probe import Probe as Probe
    from .reasons import why as why
    from .spec import AttentionSpec as AttentionSpec
    from .spread import Spread as Spread
    from .steps import walk as walk
    from .surgery.proving import prove as prove
    from .surgery.pruning import prune as prune
    from .surgery.sharing import convert as convert
    from .surgery.uptraining import uptrain as uptrain
    from .terms import AuxLosses as AuxLosses
    from .terms import CallSize as CallSize
    from .text import to_json as to_json
    from .text import to_toml as to_toml
    from .tokens import AttentionMask as AttentionMask
    from .tokens import SequenceInfo as SequenceInfo
    from .traces import Trace as Trace
    from .traces import load_trace as load_trace
    from .training import Recipe as Recipe
    from .training import TrainingResult as TrainingResult
    from .training import train as train

__version__ = "0.1.0"

# Where each public name lives. Nothing is imported, and torch stays untouched, until a name is used.
_HOMES = {
    "CacheFull": "errors",
    "TrainingDiverged": "errors",
    "NoBackend": "errors",
    "SpecError": "errors",
    "Heads": "grouping",
    "BigBird": "pattern",
    "Blocks": "pattern",
    "Causal": "pattern",
    "Dilated": "pattern",
    "Edges": "pattern",
    "First": "pattern",
    "Full": "pattern",
    "Global": "pattern",
    "Pattern": "pattern",
    "Prefix": "pattern",
    "Window": "pattern",
    "AuxLosses": "terms",
    "CallSize": "terms",
    "AttentionSpec": "spec",
    "AttentionMask": "tokens",
    "SequenceInfo": "tokens",
    "KVCache": "cache",
    "Probe": "probe",
    "PRESETS": "presets",
    "design": "presets",
    "from_json": "presets",
    "from_toml": "presets",
    "to_json": "text",
    "to_toml": "text",
    "Attention": "module",
    "LongformerAttention": "blocks",
    "MergedAttention": "blocks",
    "depth_scaled_init": "blocks",
    "build": "models",
    "Decoding": "models",
    "ProcessorSpec": "blueprint",
    "generate": "models",
    "stream": "models",
    "greedy": "models",
    "export": "hub",
    "sites": "hub.finding",
    "declare": "hub.routes.projection",
    "ablate": "hub.editing",
    "patch": "hub.editing",
    "Resample": "hub.patches",
    "Noise": "hub.patches",
    "head_means": "hub.means",
    "head_noise": "hub.means",
    "head_outputs": "hub.means",
    "offset_means": "hub.offsets",
    "load": "hub",
    "trace": "hub.capturing",
    "Capture": "hub.keeping",
    "Trace": "traces",
    "ExampleReader": "heads.sources",
    "Example": "heads.scene",
    "measure_heads": "heads.measuring",
    "classify_heads": "heads.classes",
    "estimate_importance": "heads.weighing",
    "measure_redundancy": "heads.redundancy",
    "get_circuits": "heads.circuits",
    "measure_qk_spectra": "heads.spectra",
    "make_random_baseline": "heads.twins",
    "prune": "surgery.pruning",
    "prove": "surgery.proving",
    "convert": "surgery.sharing",
    "uptrain": "surgery.uptraining",
    "convert_to_latent": "parts.latent",
    "convert_to_mixture_of_heads": "parts.routed",
    "load_trace": "traces",
    "save": "models",
    "Transformer": "models",
    "Batching": "engine",
    "Engine": "engine",
    "convert_to_collaborative": "parts.collaborative",
    "Workload": "counting.pricing",
    "cost": "counting.costs",
    "find_crossovers": "counting.breakeven",
    "match_size": "counting.matching",
    "Device": "counting.devices",
    "NumberFormats": "counting.devices",
    "RequestBatch": "counting.allocators",
    "kv_cache_bytes": "counting.allocators",
    "ServingCost": "counting.serving",
    "MemoryDemand": "counting.capacity",
    "check_memory_fit": "counting.verdict",
    "ActivationSettings": "counting.nets",
    "layer_activation_memory": "counting.keeping",
    "activation_memory": "counting.nets",
    "check_formulas": "auditing",
    "fold_bias": "folding",
    "fold_qk_transforms": "folding",
    "LearnedPositions": "positions",
    "SinusoidalPositions": "positions",
    "Recipe": "training",
    "TrainingResult": "training",
    "train": "training",
    "Spread": "spread",
    "walk": "steps",
    "run_benchmarks": "benching.running",
    "why": "reasons",
    "REGISTRY": "parts",
}
# What the repr of a spec is made of, besides parts.
_SPOKEN = {name: home for name, home in _HOMES.items() if home in ("grouping", "pattern", "spec")}
_MODULES = (
    "axes",
    "backends",
    "blocks",
    "blueprint",
    "counting",
    "errors",
    "families",
    "heads",
    "surgery",
    "hub",
    "layout",
    "models",
    "parts",
    "pattern",
    "presets",
    "reference",
    "seams",
    "spread",
    "tasks",
    "traces",
)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """A public name, a module, or any part of the registry: a new part needs no line here."""
    if name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _MODULES:
        found = import_module(f"{__name__}.{name}")
    elif name[:1].isupper() and name in (registry := import_module(f"{__name__}.parts").REGISTRY):
        found = registry[name]
    else:
        raise AttributeError(f"headwise has no {name!r}")
    globals()[name] = found
    if f"{__name__}.parts" in sys.modules:  # a spec may exist now, and its repr speaks of any of these
        globals().update(import_module(f"{__name__}.parts").REGISTRY)
        globals().update({word: getattr(import_module(f"{__name__}.{home}"), word) for word, home in _SPOKEN.items()})
    return found


def __dir__() -> list[str]:
    return [*_HOMES, *_MODULES, *import_module(f"{__name__}.parts").REGISTRY]
