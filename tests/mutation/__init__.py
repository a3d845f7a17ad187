"""Mutation testing: make one small change in a copy of headwise and see whether the tests fail.

`python -m mutation` (with tests/ on PYTHONPATH, as `make mutate` sets it) tests a seeded sample of
changes; `--guards` tests the changes listed in guards.toml.
"""
