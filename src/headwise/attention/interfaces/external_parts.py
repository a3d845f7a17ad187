"""Parts that are not headwise's own: import the file that defines them, and record which of them a
model needs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...util.errors import SpecError
from .part import REGISTRY, load_entry_point

OWN_PACKAGE = __name__.partition(".")[0]
FILE_NAME = re.compile(r"[\w.-]+\.py")
IMPORTED_FILES: list[Path] = []  # by `import_part_file`, in this order


def import_part_file(name: str | Path) -> None:
    """Import a Python file, which registers the parts it defines; a file that was imported before
    is not run again.

    The folder of the file is added at the end of `sys.path`, so that the file can import its
    neighbours.
    """
    path = Path(name).resolve()
    if path in IMPORTED_FILES:
        return
    if not path.is_file() or path.suffix != ".py":
        raise SpecError(
            f"cannot import {str(name)!r}: it is no Python file; give the .py file that defines "
            "your parts"
        )
    before = set(REGISTRY)
    if not _is_imported(path):
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            _run_file(path)
            if not any(
                map(_is_external, [*_new_classes(before), *vars(sys.modules[path.stem]).values()])
            ):
                raise SpecError(
                    f"{name} registers no part; decorate its class with @part of "
                    "headwise.attention.interfaces.part"
                )
        except BaseException:
            sys.modules.pop(path.stem, None)
            for cls in filter(
                _is_external, _new_classes(before)
            ):  # the file may also be the first to import headwise
                del REGISTRY[cls.__name__]
            raise
    IMPORTED_FILES.append(path)


def imported_part_files() -> tuple[str, ...]:
    """The paths of all files that `import_part_file` has imported, so that another process can
    import them too.
    """
    return tuple(map(str, IMPORTED_FILES))


def _new_classes(before: set[str]) -> list[type]:
    return [cls for name, cls in REGISTRY.items() if name not in before]


def _is_imported(path: Path) -> bool:
    """Whether this file is a module already. Raises if its name is that of another module, which it
    would hide.
    """
    try:
        module = sys.modules.get(path.stem) or importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        module = None
    if module is None:
        return False
    origin = getattr(module, "__file__", None) or getattr(module, "origin", None) or "built in"
    if Path(origin).resolve() != path:
        raise SpecError(
            f"cannot import {path.name}: there is another module {path.stem} ({origin}); rename "
            "the file"
        )
    return path.stem in sys.modules


def _run_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # because the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # a dataclass looks its own module up
    try:
        spec.loader.exec_module(module)
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the file may raise anything, SystemExit included
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line = f", line {lines[-1]}" if lines else ""
        raise SpecError(
            f"cannot import {path.name}{line}: {type(error).__name__}: {error}; correct the file"
        ) from error


def _is_external(value: Any) -> bool:
    """Whether a value is a registered class that is not headwise's own."""
    if not isinstance(value, type) or REGISTRY.get(value.__name__) is not value:
        return False
    return value.__module__.partition(".")[0] != OWN_PACKAGE


# --- Parts that a saved model needs ---------------------------------------------------------------


class ExternalPart(NamedTuple):
    """A part that is not headwise's own: its name, its module, and the name of the file ("" if it
    has none).
    """

    name: str
    module: str
    file: str

    @staticmethod
    def of(kind: type) -> ExternalPart:
        """Return the record of a registered class."""
        path = getattr(sys.modules.get(kind.__module__), "__file__", None)
        return ExternalPart(kind.__name__, kind.__module__, Path(path).name if path else "")

    @staticmethod
    def from_dict(row: Any, source: str) -> ExternalPart:
        """Return the record that `_asdict` wrote; `source` names the file in error messages."""
        table = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        values = [table.get(key) for key in ExternalPart._fields]
        if set(table) != set(ExternalPart._fields) or not all(
            isinstance(value, str) for value in values
        ):
            raise SpecError(
                f"{source}: parts = {row!r} is no table of name, module and file; save the model "
                "again"
            )
        return ExternalPart(*map(str, values))

    def check_registered(self, source: str) -> None:
        """Raise unless this part is registered. Runs no code of a model's folder, only that of
        installed packages.
        """
        if self.name not in REGISTRY:
            load_entry_point(self.name)
        if self.name in REGISTRY and _is_external(REGISTRY[self.name]):
            return
        fact = f"{source} needs the part {self.name} of the module {self.module}"
        if self.name in REGISTRY:
            raise SpecError(
                f"{fact}, but {self.name} is now a part of headwise; use the headwise that saved "
                "the model"
            )
        file = self.file if FILE_NAME.fullmatch(self.file) else "FILE.py"
        raise SpecError(
            f"{fact}, which is not loaded; add --import {file}, or import that module in Python "
            "first"
        )


def find_external_parts(value: Any) -> list[ExternalPart]:
    """Return the parts in a spec, or in any nested dataclasses, that are not headwise's own; each
    once, by name.
    """
    classes: set[type] = {type(item) for item in _iter_dataclasses(value)}
    return sorted(ExternalPart.of(cls) for cls in classes if _is_external(cls))


def _iter_dataclasses(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in cast("list[Any]", value):
            yield from _iter_dataclasses(item)
    elif isinstance(value, Mapping):
        yield from _iter_dataclasses(list(cast("Mapping[str, Any]", value).values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in fields(value):
            yield from _iter_dataclasses(getattr(value, field.name))
