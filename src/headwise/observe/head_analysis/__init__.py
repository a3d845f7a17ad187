"""Analysis of attention heads: what each head attends to, how much it matters, and which heads are
redundant.

- Data: `annotated_examples` reads texts, parses and aligned pairs as examples with annotated
  tokens, `image_examples` images as examples with patches.
- Entry points: `text_analysis` has `hw.heads` and `hw.importance`, which take any model and plain
  texts.
- Measures: `head_measurement` runs a model over examples and returns a `head_table`.
  `attention_sinks` leaves out repetitions and measures if the first token is a sink,
  `weight_bands` streams the attention weights, `head_metrics` defines the measures, ours and
  published ones, `streamed_statistics` computes them on a GPU without weights, `head_classes`
  names heads by them.
- Data sets: `top_sequences` keeps the texts on which each head is strongest, and some of each
  decile.
- Linguistic roles: `dependency_syntax` (dependency relations, attention probe) and `word_alignment`
  (translation).
- Long texts: `retrieval_heads` finds the heads that copy what is hidden in a text, and those that
  need only the first and latest tokens.
- Importance: `head_importance` runs the methods of `importance_methods` and `lrp` for one of the
  `objectives`, and returns an `ImportanceResult` (`head_table`).
- Redundancy: `head_redundancy` compares heads by the distances of `head_similarity`.
- Weights: `head_circuits` has QK and OV circuits, and untrained models to compare with;
  `rank_analysis` measures spectra and rank collapse.
- One text: `attention_maps` has weights, norm-weighted attention, rollout and aggregates over heads
  and layers, and what each head adds to a logit.
- Causes: `circuit_graph` runs a model with nodes replaced or frozen, `circuit_metrics` has the
  metrics of the logits, `path_patching` and `attribution_patching` the effects of paths and heads,
  `edge_attribution` the graph of all edges and its circuits. `score_attribution` divides one score
  and one value among earlier writers; `logit_lens` has the predictions after each step.
- Numbers: `model_steps` has every step of one head for one query, from the residual stream to the
  residual stream.
- Statistics: `resampling` has intervals, t tests and permutation tests.
- Figures: `head_report` draws all heads, and single ones on the texts that show their classes, and
  writes the report.
"""

from typing import TYPE_CHECKING

from ...util.lazy_names import import_lazily

if TYPE_CHECKING:
    from .attribution_patching import attribute_heads
    from .circuit_metrics import TokenMetric
    from .edge_attribution import attribute_edges
    from .head_circuits import fold_circuits, make_random_baseline
    from .head_classes import classify_heads
    from .logit_lens import logit_lens
    from .path_patching import patch_paths
    from .rank_analysis import measure_qk_spectra
    from .retrieval_heads import measure_retrieval, measure_streaming
    from .score_attribution import attribute_score, attribute_value
    from .top_sequences import find_top_sequences

_MODULE_OF_NAME = {
    "TokenMetric": "circuit_metrics",
    "attribute_edges": "edge_attribution",
    "attribute_heads": "attribution_patching",
    "attribute_score": "score_attribution",
    "attribute_value": "score_attribution",
    "classify_heads": "head_classes",
    "find_top_sequences": "top_sequences",
    "fold_circuits": "head_circuits",
    "logit_lens": "logit_lens",
    "make_random_baseline": "head_circuits",
    "measure_qk_spectra": "rank_analysis",
    "measure_retrieval": "retrieval_heads",
    "measure_streaming": "retrieval_heads",
    "patch_paths": "path_patching",
}
__all__ = sorted(_MODULE_OF_NAME)
__getattr__ = import_lazily(__name__, _MODULE_OF_NAME)
__dir__ = __all__.copy
