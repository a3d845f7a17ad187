"""Published models by name (published_models.toml): the keys of their config.json that differ from
the defaults of their family.

Their names can be given where a model folder is expected, as in ``headwise cost gpt3``. Weights are
not part of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class PublishedModel(NamedTuple):
    """Where a model is described, the number of its parameters there, and its config."""

    source: str
    parameters: str
    config: Mapping[str, Any]


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PUBLISHED_MODELS = {name: PublishedModel(**table) for name, table in _TABLES.items()}
