"""Every point of SECURITY.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_point_has_a_test():
    rows = [
        line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("|")
    ]
    points = [row for row in rows if not re.match(r"\| point |\|---", row)]
    assert len(points) >= 5
    assert [row for row in points if not TEST.search(row)] == []
    for path, name in TEST.findall("\n".join(points)):
        tree = ast.parse((ROOT / path).read_text())
        assert name in {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }, (path, name)
