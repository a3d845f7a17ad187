"""Observation of any model: `inspect` finds its attention sites, and records, ablates and patches
heads; `traces` holds recorded runs, in files that open without torch; `head_analysis` says what
each head does. `head_names` reads and prints the names of heads; `bundled_sample` is the small
trained model of the page and the documents.
"""
