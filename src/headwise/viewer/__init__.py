"""The page of `headwise view`: every head of a model or of a trace in the browser, live or as one
HTML file.

In reading order:

- `open_model`: `OpenModel`, what the page shows: a trace, its measures, and the model if there is
  one.
- `view_document`: the JSON description of what is open: model, tokens, attention layers, measures.
- `weight_summaries`: pooled tiles, marginals, the largest weight of a part, and the masks of
  thumbnails.
- `model_targets`: what can be opened by name: the sample, a trace, a folder, FILE.py:FACTORY, or a
  Hub model.
- `binary_answers`: messages of arrays behind a JSON header, and the computation of one head for one
  query, step by step.
- `model_worker`: `ModelWorker`, one thread that runs jobs on the model, with progress and
  cancellation.
- `action_fields`: what jobs are asked for, one table of fields for each.
- `model_actions`, `lab_actions`, `head_actions`, `comparison_actions`,
  `surgery_actions`: the jobs: capture a text, measure and compare heads, ablate them and continue
  the text, compare two runs, compute the cost, prune and convert.
- `lab_runs`: runs of the open text with some heads ablated.
- `answers`: what is answered at once, by address: pictures, exact rows, marginals, steps.
- `export_files`: weights, measures and the trace as files, and a single HTML file of what is open.
- `http_security`: which requests are answered, and the headers of every answer.
- `server`: the routes of the HTTP interface, and `serve`.
- `bundled_sample`: the small translator that `headwise view` opens without arguments, its trace and
  its measures.
- `view`: `hw.view` and `hw.view_attention`, and what they show in a notebook.

Torch is imported when a model is opened, so that a trace opens without it.
"""
