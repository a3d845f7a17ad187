"""Observation of any model: its attention sites, traces of runs, and what heads do."""
