"""Public names of a package that are imported when they are first used.

Descriptions of layers and models so do without torch, and `headwise --help` without both.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def import_lazily(
    package: str, module_of_name: Mapping[str, str], searched: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    `module_of_name` gives the module of each name, relative to `package`. A module "a.b:" is itself
    the value. The error for an unknown name says which of the `searched` names has it.
    """

    def get(name: str) -> Any:
        if name not in module_of_name:
            raise AttributeError(f"{package} has no {name!r}{find_elsewhere(name)}")
        module, is_module, _ = module_of_name[name].partition(":")
        value = import_module(f"{package}.{module}")
        if not is_module:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def find_elsewhere(name: str) -> str:
        if not name.startswith("_"):
            for other in searched:
                module = get(other)
                if name in getattr(module, "__all__", dir(module)):
                    return f"; did you mean {package}.{other}.{name}?"
        return ""

    return get
