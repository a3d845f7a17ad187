"""The published attention variants, one part or a few siblings per file; importing this package
registers them all.

Projections: `linear_projection`, `latent_attention`, `overlapping_heads`, `collaborative`. Queries
and keys: `rotary_embedding`, `rms_norms`. Similarity: `dot_product` with additive and Gaussian ones
and the soft cap, `feature_map` with its normaliser. Scores: `relative_position_bias` (tables, Shaw,
continuous), `talking_heads` (and knocking heads), `dynamic_composition`, `synthesizer` (and average
attention). Normalisers: `softmax` (and sigmoid, dropout on weights), `entmax`. Outputs and gates:
`differential`, `gated_attention` (and hard-concrete gates), `mixture_of_heads`. Merges: `merges`.
Shared by parts: `initialisers` of parameters.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..interfaces.part import REGISTRY

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY"]
