"""headwise: the workbench for attention heads.

>>> import headwise as hw
>>> hw.design(model=512, heads=8, kv=2).heads
Heads.grouped(q=8, kv=2, dim=64)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; at run time a name is imported when it is first used
    from .auditing import audit as audit
    from .benching.running import bench as bench
    from .blocks import (
        LongformerAttention as LongformerAttention,
    )
    from .blocks import (
        MergedAttention as MergedAttention,
    )
    from .blocks import (
        depth_scaled_init as depth_scaled_init,
    )
    from .blueprint import Usage as Usage
    from .cache import Cache as Cache
    from .counting.allocators import Rows as Rows
    from .counting.allocators import cached as cached
    from .counting.breakeven import break_even as break_even
    from .counting.capacity import Demand as Demand
    from .counting.costs import cost as cost
    from .counting.devices import Device as Device
    from .counting.devices import Formats as Formats
    from .counting.keeping import activations as activations
    from .counting.matching import match as match
    from .counting.nets import Way as Way
    from .counting.nets import kept_by as kept_by
    from .counting.pricing import Load as Load
    from .counting.serving import Serving as Serving
    from .counting.verdict import judge as judge
    from .engine import Batching as Batching
    from .engine import Engine as Engine
    from .errors import CacheFull as CacheFull
    from .errors import Diverged as Diverged
    from .errors import NoBackend as NoBackend
    from .errors import SpecError as SpecError
    from .folding import fold_bias as fold_bias
    from .folding import fold_turns as fold_turns
    from .grouping import Heads as Heads
    from .heads.circuits import circuits as circuits
    from .heads.classes import classified as classified
    from .heads.measuring import measure as measure
    from .heads.redundancy import redundancy as redundancy
    from .heads.scene import Scene as Scene
    from .heads.sources import Sources as Sources
    from .heads.spectra import spectra as spectra
    from .heads.twins import twin as twin
    from .heads.weighing import importance as importance
    from .hub import export as export
    from .hub import load as load
    from .hub.capturing import trace as trace
    from .hub.editing import patch as patch
    from .hub.editing import silence as silence
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
    from .parts.collaborative import collaborate as collaborate
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
    from .parts.latent import as_latent as as_latent
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
    from .parts.routed import as_routed as as_routed
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
    from .positions import Sinusoidal as Sinusoidal
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
    from .surgery.sharing import share as share
    from .surgery.uptraining import uptrain as uptrain
    from .terms import Ledger as Ledger
    from .terms import Work as Work
    from .text import to_json as to_json
    from .text import to_toml as to_toml
    from .tokens import Sight as Sight
    from .tokens import Tokens as Tokens
    from .traces import Trace as Trace
    from .traces import load_trace as load_trace
    from .training import Recipe as Recipe
    from .training import Result as Result
    from .training import train as train

__version__ = "0.1.0"

# Where each public name lives. Nothing is imported, and torch stays untouched, until a name is used.
_HOMES = {
    "CacheFull": "errors",
    "Diverged": "errors",
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
    "Ledger": "terms",
    "Work": "terms",
    "AttentionSpec": "spec",
    "Sight": "tokens",
    "Tokens": "tokens",
    "Cache": "cache",
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
    "Usage": "blueprint",
    "generate": "models",
    "stream": "models",
    "greedy": "models",
    "export": "hub",
    "sites": "hub.finding",
    "declare": "hub.routes.projection",
    "silence": "hub.editing",
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
    "Sources": "heads.sources",
    "Scene": "heads.scene",
    "measure": "heads.measuring",
    "classified": "heads.classes",
    "importance": "heads.weighing",
    "redundancy": "heads.redundancy",
    "circuits": "heads.circuits",
    "spectra": "heads.spectra",
    "twin": "heads.twins",
    "prune": "surgery.pruning",
    "prove": "surgery.proving",
    "share": "surgery.sharing",
    "uptrain": "surgery.uptraining",
    "as_latent": "parts.latent",
    "as_routed": "parts.routed",
    "load_trace": "traces",
    "save": "models",
    "Transformer": "models",
    "Batching": "engine",
    "Engine": "engine",
    "collaborate": "parts.collaborative",
    "Load": "counting.pricing",
    "cost": "counting.costs",
    "break_even": "counting.breakeven",
    "match": "counting.matching",
    "Device": "counting.devices",
    "Formats": "counting.devices",
    "Rows": "counting.allocators",
    "cached": "counting.allocators",
    "Serving": "counting.serving",
    "Demand": "counting.capacity",
    "judge": "counting.verdict",
    "Way": "counting.nets",
    "activations": "counting.keeping",
    "kept_by": "counting.nets",
    "audit": "auditing",
    "fold_bias": "folding",
    "fold_turns": "folding",
    "LearnedPositions": "positions",
    "Sinusoidal": "positions",
    "Recipe": "training",
    "Result": "training",
    "train": "training",
    "Spread": "spread",
    "walk": "steps",
    "bench": "benching.running",
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
