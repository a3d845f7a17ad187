"""Names that users know, recorded before the package is made smaller; none may disappear without a line.

`python -m goldens.ledger` (with `tests` on the path) writes ledger.json. ledger.toml has a line for
each name that was renamed, replaced or deleted: what became of it. All other names are kept.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import headwise as hw
from headwise.attention.parts import REGISTRY
from headwise.attention.presets import PRESETS
from headwise.learn.catalogue import load_entries
from support.command_help import list_commands, printed

HERE = Path(__file__).parent
NAMES = HERE / "ledger.json"
CHANGES = HERE / "ledger.toml"
FEATURES = HERE.parents[1] / "docs" / "feature-comparison.toml"


def list_options() -> list[str]:
    names: set[str] = set()
    for command in list_commands():
        text = printed([command, "--help-all"])
        for option in re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]*)", text, re.MULTILINE):
            names.add(f"{command} {option}")
    return sorted(names)


def list_features() -> list[str]:
    names: list[str] = []
    for group in tomllib.loads(FEATURES.read_text(encoding="utf-8"))["groups"]:
        names += [f"{row['number']}: {row['ours']}" for row in group["rows"]]
    return names


CATEGORIES: dict[str, Callable[[], list[str]]] = {
    "commands": list_commands,
    "options": list_options,
    "public names": lambda: sorted(dir(hw)),
    "presets": lambda: sorted(PRESETS),
    "parts": lambda: sorted(REGISTRY),
    "learn": lambda: sorted(entry.id for entry in load_entries()),
    "comparison": list_features,
}


def main() -> None:
    names = {category: names() for category, names in CATEGORIES.items()}
    NAMES.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
