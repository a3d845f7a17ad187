"""`headwise --version --json`: versions of headwise, Python and every dependency, by extra, for a report of a fault."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata, resources
from typing import Any

from .. import __version__

REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[([\w,-]+)\])?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?")
OWN_NAME = "headwise"


def describe_environment() -> dict[str, Any]:
    """Versions, platform and built parts of this installation; nothing that takes long to import is imported.

    >>> describe_environment()["headwise"] == __version__
    True
    """
    return {
        "headwise": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": _package_versions(),
        "page": resources.files("headwise.viewer").joinpath("static").is_dir(),
    }


def _package_versions() -> dict[str, dict[str, str | None]]:
    """The installed version of each dependency, None if it is missing; those of no extra are under "base"."""
    versions: dict[str, dict[str, str | None]] = {}
    for name, extra in parse_requirements(metadata.requires(OWN_NAME) or ()):
        versions.setdefault(extra, {})[name] = _installed_version(name)
    return versions


def parse_requirements(lines: Iterable[str]) -> list[tuple[str, str]]:
    """The name and the extra ("base" for none) of each requirement; requirements on headwise itself are left out.

    >>> parse_requirements(["torch>=2.10", "transformers>=5.3; extra == 'hf'", "headwise[mt]; extra == 'dev'"])
    [('torch', 'base'), ('transformers', 'hf')]
    """
    matches = [match for line in lines if (match := REQUIREMENT.match(line))]
    return [(match[1], match[3] or "base") for match in matches if match[1] != OWN_NAME]


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
