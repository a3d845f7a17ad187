"""Pruning and conversion of attention heads, and verification that the result works.

Pruning: `head_selection` chooses the heads to keep, by importance, redundancy or budget; `l0_gates`
learns the choice with a gate per head; `pruning_plan` records it; `pruning` removes the other
heads. `module_surgery` removes heads of any nn.Module, and shares its keys and values:
`head_entries` finds the entries of parameters that belong to heads, by gradients or declared
projections, and `resized_attention` makes the changed copy. `any_model` has `hw.prune` and
`hw.convert`, which choose between specs and modules. Conversion: `conversion` turns MHA into GQA,
MQA, MLA and others. `head_grouping` groups key-value heads that are similar over data, and
`head_alignment` aligns them before they are averaged. Retraining: `distillation` trains the changed
model on batches of texts. Model editing: `attention_replacement` builds the new model, and removes
biases that have no effect. Inputs:
`model_and_texts` reads any model and plain texts, and writes the result as a folder of the same
kind. Results: `hf_export` writes model folders, `verification` compares the model before and after,
`pruning_curves` measures quality against the number of heads removed.
"""

from .conversion import (
    AttentionConversion,
    Pool,
    ToCollaborative,
    ToComposed,
    ToLatent,
    ToMHA,
    ToMixtureOfHeads,
)
from .distillation import UptrainingOptions
from .head_selection import (
    DropHeads,
    HeadRanking,
    HeadSelection,
    KeepOnePerCluster,
    KeepTop,
    PruneToBudget,
    PruningBudget,
)
from .l0_gates import GateTrainingOptions, KeepOpenGates
from .pruning_plan import PruningPlan

__all__ = [
    "AttentionConversion",
    "DropHeads",
    "GateTrainingOptions",
    "HeadRanking",
    "HeadSelection",
    "KeepOnePerCluster",
    "KeepOpenGates",
    "KeepTop",
    "Pool",
    "PruneToBudget",
    "PruningBudget",
    "PruningPlan",
    "ToCollaborative",
    "ToComposed",
    "ToLatent",
    "ToMHA",
    "ToMixtureOfHeads",
    "UptrainingOptions",
]
