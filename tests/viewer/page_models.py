"""Small models and jobs for tests of the page."""

from __future__ import annotations

from headwise.viewer.model_worker import Job, JobProgress
from support.tiny_configs import model_config

GPT = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=40, n_positions=64)  # fmt: skip


def progress() -> JobProgress:
    """Return the progress of a job that nobody follows."""
    return JobProgress(Job("test", {}))
