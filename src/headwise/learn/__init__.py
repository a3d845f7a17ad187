"""`headwise learn`: five documents on attention, walked in order; every statement is quoted, run
and judged.

`catalogue` holds `Entry`, `Outcome` and `Verdict`; it reads the texts, joins them with the runs and
finds topics. `entry_text` writes them for a terminal and as the table of errata, with the claims of
stored studies. `document_sections` reads the sections of the documents in our words.
`document_page` writes both as HTML, and `inline_figures` their figures, which `matrix_figures`
makes. `sliders` are inputs on the pages beside entries, and `slider_values` computes what they
show.

The runs of each document are in one or more modules, with texts in a .toml file next to each:
`self_attention_basics` (000), `parameters_and_scaling` (001), `multi_head_idea`,
`multi_head_analysis`, `multi_head_code`, `head_variants` and `cited_papers` (002),
`attention_mechanism`, `attention_comparison` and `misconceptions` (003), and `kernel_lookup` (004).
`stored_findings` reads the stored results of studies and of measured models: claims, strip
pictures, and runs of entries of all documents; `layer_experiments` has further runs on layers, and
`attention_positions` those on positions. `view_links` has links to screens of `headwise view`.
`language` holds the language of the texts. `measured_layers` makes the random inputs and layers of
the runs, and the layers of the comparison tables of 000 and 003; `translator_runs` runs the bundled
translator over held-out texts. `sample_tour` is `headwise demo`, and `language_model_tour` the same
of SmolLM2 where its package is installed.
"""
