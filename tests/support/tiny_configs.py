"""Keys of config.json files of small models."""

from __future__ import annotations

from typing import Any


def model_config(model_type: str, **keys: Any) -> dict[str, Any]:
    """The keys of a config.json."""
    return {"model_type": model_type} | keys
