"""Heads cut and shared, and what is left proven to work."""
