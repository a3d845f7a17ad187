"""The published attention variants, one part or family of parts per file; importing this package registers them all.

Projections: `linear_projection`, `latent_attention`, `overlapping_heads`, `collaborative`, `value_projection`.
Queries and keys: `rotary_embedding`, `qk_norm`, `knocking_heads`. Similarity: `dot_product`, `additive_attention`,
`gaussian_kernel`, `feature_map`. Scores: `alibi`, `t5_bias`, `continuous_bias`, `shaw_relative_position`, `softcap`,
`talking_heads`, `dynamic_composition`, `synthesizer`. Normalisers: `softmax`, `sink_softmax`, `sigmoid`, `entmax`,
`mean_attention`, `sum_normaliser`. Outputs and gates: `differential`, `head_norm`, `gated_attention`,
`mixture_of_heads`, `hard_concrete_gate`. Dropout: `weight_dropout`. Merges: `concat`, `sum_heads`. Shared by parts:
`initialisers` of parameters, and `precision` for computations that may not run in 16 bits.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..interfaces.part import REGISTRY

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY"]
