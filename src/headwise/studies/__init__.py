"""Train variants of attention on tasks, over several seeds, and test which differences are real.

In reading order:

- `study_file` reads a study from TOML: variants, tasks, seeds, learning rates, matching, scales;
- `study_overrides` sets keys of the file, and refuses values that would have no effect;
- `cells` makes the model of a variant on a task, with its size matched to the baseline, and lists
  the training runs (cells) of a study;
- `run_cell` is one cell on any engine: training, tests, edits of the model, and what its heads do;
- `process_engine` runs cells in a pool of processes, or by Ray on several machines, where it
  measures heads too;
- `study_runner` prices every cell, chooses learning rates, runs the report seeds, and measures
  decoding;
- `seed_statistics` compares variants: paired differences, corrected p values, and figures;
- `study_verdict` compares by rules what a study expects with what was found;
- `study_report` makes tables, claims and the page.
"""
