"""The page of `headwise view`: every head of a model or of a trace in the browser, live or as one
HTML file.

In reading order:

- `open_model`: `OpenModel`, the content of the page: a trace, its measures, and the model if there
  is one; and the other models and traces that it may open.
- `weight_summaries`: data for the page: a description of the open model, pooled tiles, marginals,
  masks of thumbnails, and messages of arrays behind a JSON header.
- `model_worker`: `ModelWorker`, one thread that runs jobs on the model, with progress and
  cancellation, and one table of fields for each job.
- `model_actions`, `lab_actions`, `circuit_actions`, `comparison_actions`, `surgery_actions`: the
  jobs: capture a text, measure and compare heads, ablate them and continue the text, score the
  edges of a circuit, compare two runs, compute the cost, prune and convert.
- `targets`: what is shown first, by name, and the job that shows another model or trace of the same
  folders.
- `answers`: requests answered immediately, by address: pictures, exact rows, marginals, and the
  computation of one head for one query, step by step.
- `export_files`: weights, measures and the trace as files, and a single HTML file of what is open.
- `server`: which requests are answered, the routes of the HTTP interface, and `serve`.
- `view`: `hw.view` and `hw.view_attention`, and what they show in a notebook.

Torch is imported when a model is opened, so that a trace opens without it.
"""
