"""The names that files give our tensors: one file for each architecture, a table and nothing else."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ...errors import SpecError
from ..plan import Map

MAPS: dict[str, Map] = {}
for _module in iter_modules(__path__):
    for _map in vars(import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_map, Map):
            MAPS |= dict.fromkeys(_map.families, _map)


def map_of(family: str) -> Map:
    """The names in files of a family.

    >>> map_of("qwen3") is map_of("llama")
    True
    """
    if family not in MAPS:
        raise SpecError(f"weights of {family!r} are not read yet; those of {', '.join(sorted(MAPS))} are")
    return MAPS[family]
