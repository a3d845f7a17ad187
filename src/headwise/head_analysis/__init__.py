"""What every head does: measures, classes, importance, redundancy.

`annotated_examples` and `objectives` say what is measured on; `weight_bands` streams attention weights in bounded
memory; `head_metrics` and `head_measurement` compute measures with intervals, `head_classes` names heads by them;
`head_importance`, `importance_methods`, `partial_forward` and `lrp` rate heads; `head_redundancy` and
`head_similarity` compare them; `dependency_syntax`, `syntax_probe` and `word_alignment` test linguistic roles;
`head_circuits` and `rank_analysis` read weights alone; `resampling` has bootstrap intervals and permutation tests;
`head_table`, `head_figures`, `head_report` show results.
"""
