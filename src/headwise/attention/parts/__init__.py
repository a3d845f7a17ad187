"""The published attention variants, one part or a few siblings per file; importing this package
registers them all.

Projections: `linear_projection`, `factored_queries`, `latent_attention`, `grouped_latent`,
`tied_projections`, `tensor_product`, `composed_heads`, `interleaved_heads` (with their softmax and
outputs), `switch_heads` (with outputs), `overlapping_heads`, `collaborative`. Queries and keys:
`rotary_embedding`, `rms_norms`. Similarity: `dot_product` with additive and Gaussian ones and the
soft cap, `feature_map` with its normaliser. Scores: `relative_position_bias` (tables, Shaw,
continuous), `talking_heads` (and knocking heads), `dynamic_composition`, `synthesizer` (and average
attention); of all keys of a query together: `forgetting_attention`, `contextual_positions`,
`selective_attention`, `multi_token_attention`. Normalisers: `softmax` (with sinks, by length,
softpick, sigmoid; dropout on weights), `entmax`, `stick_breaking`. Outputs and gates: `row_groups`
(sums), `differential`, `gated_attention` (and hard-concrete gates), `mixture_of_heads`. Merges:
`merges`. Shared by parts: `initialisers` of parameters.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..interfaces.part import REGISTRY

if TYPE_CHECKING:
    from .collaborative import Collaborative, convert_to_collaborative
    from .composed_heads import ComposedHeads, convert_to_composed
    from .contextual_positions import ContextualPositions
    from .differential import Differential, DifferentialV2
    from .dot_product import Additive, DotProduct, Gaussian, Softcap
    from .dynamic_composition import DynamicComposition
    from .entmax import Entmax
    from .factored_queries import FactoredQueries
    from .feature_map import FeatureMap, SumNormaliser
    from .forgetting_attention import ForgetGate
    from .gated_attention import HardConcreteGate, HeadGate, OutputGate
    from .grouped_latent import GroupedLatent
    from .interleaved_heads import (
        HeadCollapse,
        JointSoftmax,
        PseudoHeads,
        PseudoOrder,
        PseudoRotary,
    )
    from .latent_attention import MLAProjection, convert_to_latent
    from .linear_projection import LinearProjection, ValueProjection
    from .merges import ConcatMerge, SumMerge
    from .mixture_of_heads import MixtureOfHeads, convert_to_mixture_of_heads
    from .multi_token_attention import KeyQueryConvolution
    from .overlapping_heads import Overlapping
    from .relative_position_bias import Alibi, ContinuousBias, Shaw, ShawValues, T5Bias
    from .rms_norms import HeadNorm, QKNorm
    from .rotary_embedding import (
        Llama3Scaling,
        NoScaling,
        NTKScaling,
        PositionInterpolation,
        Rotary,
        YaRN,
    )
    from .row_groups import SumRows
    from .selective_attention import SelectiveAttention
    from .softmax import ScalableSoftmax, Sigmoid, SinkSoftmax, Softmax, Softpick, WeightDropout
    from .stick_breaking import StickBreaking
    from .switch_heads import SwitchOutputs, SwitchValues
    from .synthesizer import AverageNormaliser, LearnedScores
    from .talking_heads import KnockingHeads, TalkingHeads
    from .tensor_product import TensorProduct
    from .tied_projections import TiedProjection

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

_MODULE_OF_CONVERTER = {
    "convert_to_collaborative": "collaborative",
    "convert_to_composed": "composed_heads",
    "convert_to_latent": "latent_attention",
    "convert_to_mixture_of_heads": "mixture_of_heads",
}


def __getattr__(name: str) -> Any:
    """Return a part by its class name, also one of your own, or a converter."""
    if name in REGISTRY:
        return REGISTRY[name]
    if name in _MODULE_OF_CONVERTER:
        return getattr(import_module(f"{__name__}.{_MODULE_OF_CONVERTER[name]}"), name)
    raise AttributeError(f"headwise.parts has no {name!r}")


def __dir__() -> list[str]:
    return ["REGISTRY", *REGISTRY, *_MODULE_OF_CONVERTER]
