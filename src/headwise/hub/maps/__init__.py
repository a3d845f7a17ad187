"""The names that files give our tensors: one file for each architecture, a table and nothing else."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ...errors import SpecError
from ..plan import WeightNames

WEIGHT_NAMES: dict[str, WeightNames] = {}
for _module in iter_modules(__path__):
    for _map in vars(import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_map, WeightNames):
            WEIGHT_NAMES |= dict.fromkeys(_map.families, _map)


def get_weight_names(family: str) -> WeightNames:
    """The names in files of a family.

    >>> get_weight_names("qwen3") is get_weight_names("llama")
    True
    """
    if family not in WEIGHT_NAMES:
        raise SpecError(f"weights of {family!r} are not read yet; those of {', '.join(sorted(WEIGHT_NAMES))} are")
    return WEIGHT_NAMES[family]
