"""Anchors compare with other people's code; what it has to say while loading is not about us."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield
