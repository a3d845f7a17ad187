"""GLM-4: gates and ups lie in one matrix; the newer has norms on either side."""

from __future__ import annotations

from .llama import MAP as LLAMA
from .phi3 import FEED

MAP = LLAMA._replace(families=("glm",), slots={**LLAMA.slots, **FEED})
