"""headwise: the workbench for attention heads.

>>> import headwise as hw
>>> hw.design(model=512, heads=8, kv=2).heads
Heads.grouped(q=8, kv=2, dim=64)
"""

import sys
from importlib import import_module
from typing import Any

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
