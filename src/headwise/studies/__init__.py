"""Studies: train variants of attention on tasks, over several seeds, and say which differences are
real.

In reading order:

- `study_file` reads a study from TOML: variants, tasks, seeds, learning rates, matching, scales;
- `variant_models` makes the model of a variant on a task, with its size matched to the baseline;
- `cells` lists the training runs (cells) of a study; `run_cell` is one of them, on any engine;
  `cell_heads` summarises what the heads of its model do, `model_edits` tests the model again
  without some heads or with shared ones;
- `process_engine` runs cells in a pool of processes, `ray_engine` on several machines, where it
  measures heads too; `study_runner` chooses learning rates, then runs the report seeds;
- `study_plan` prices every cell before anything runs;
- `seed_statistics` compares variants: paired differences, intervals, corrected p values, success
  rates;
- `decode_times` measures decoding against the context;
- `study_report` makes tables, claims and the page, `study_figures` its figures.
"""
