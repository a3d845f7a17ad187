"""Bugs that the tests must catch. `make mutate` plants all of them, `python tests/planted.py NAME...` some.

A test that has never been seen red proves nothing. Each bug here is one that could really be written: an
off-by-one at an edge, a transposed axis, a forgotten scale. It names the tests that must turn red.
"""

from __future__ import annotations

import sys

from mutate import Bug, main

BUGS: list[Bug] = [
    Bug(
        "nearest-forgets-the-close-word",
        "errors.py",
        old="if close else",
        new="if not close else",
        tests=("house/test_house.py::test_doctests[headwise.errors]",),
    ),
]

if __name__ == "__main__":
    sys.exit(main(BUGS))
