"""GLM-4: gates and ups lie in one matrix; the newer has norms on either side."""

from __future__ import annotations

from .llama import LLAMA_WEIGHTS as LLAMA
from .phi3 import FUSED_GATE_UP_NAMES

GLM_WEIGHTS = LLAMA._replace(families=("glm",), locations={**LLAMA.locations, **FUSED_GATE_UP_NAMES})
