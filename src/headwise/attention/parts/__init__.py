"""The published attention variants, one part or a few siblings per file; importing this package
registers them all.

Projections: `linear_projection`, `latent_attention`, `overlapping_heads`, `collaborative`. Queries
and keys: `rotary_embedding`, `rms_norms`, `knocking_heads`. Similarity: `dot_product`,
`pairwise_similarity`, `feature_map` with its normaliser. Scores: `relative_position_bias`,
`continuous_bias`, `shaw_relative_position`, `softcap`, `talking_heads`, `dynamic_composition`,
`synthesizer`. Normalisers: `softmax`, `sigmoid`, `entmax`, `mean_attention`. Outputs and gates:
`differential`, `gated_attention`, `mixture_of_heads`, `hard_concrete_gate`. Dropout:
`weight_dropout`. Merges: `merges`. Shared by parts: `initialisers` of parameters.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..interfaces.part import REGISTRY

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY"]
