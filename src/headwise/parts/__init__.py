"""One file per published idea. Importing this package fills the registry."""

from importlib import import_module
from pkgutil import iter_modules

from ..interfaces.registry import REGISTRY

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY"]
