"""Helpers without knowledge of attention.

- `lazy_names`: public names that are imported when they are first used
- `errors`: the errors of headwise, and suggestions of similar names
- `files`: files that appear complete or not at all
- `output_paths`: which paths may be written
- `escaping`: names and texts of models as text of a terminal, HTML, SVG or Markdown
- `model_names`: what a model may be called
- `size_limits`: the largest sizes that a document may ask for, and readers of its values
- `python_processes`: starts of Python that import nothing from the working folder
"""
