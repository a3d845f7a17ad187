"""The page of `headwise view`: every head of a model in the browser, live or as one HTML file.

- `view`: `hw.view` and `hw.view_attention`, and what they show in a notebook.
- `html_export`: a single HTML file of what is open.
- `bundled_sample`: the small translator that `headwise view` opens without arguments, its trace and its measures.
"""
