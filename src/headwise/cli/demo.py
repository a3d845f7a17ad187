"""`headwise demo`: a look around, and a translator that learns, is made smaller, and is held to what it was."""

from __future__ import annotations

from pathlib import Path

from ..files import FolderLock
from .arguments import CommandParser, add_json_argument, print_page, print_title, to_json


def main(argv: list[str]) -> int:
    """Show the demo, page by page as it is computed."""
    parser = CommandParser(
        "demo",
        "A look around: soft look-up, one spec and all that follows from it, and a translator of dates and amounts "
        "that is trained as you watch. Then half of its heads go, or its keys and values are shared, and it learns "
        "again: before and after side by side, with proofs and a report, in about three minutes on two idle cores.",
        "headwise demo",
    )
    parser.add_argument(
        "--out", default="runs/demo", metavar="DIR", help="where translators and the report are left (runs/demo)"
    )
    parser.add_argument("--steps", type=int, metavar="COUNT", help="how long it is trained")
    parser.add_argument("--quick", action="store_true", help="train nothing: a few seconds")
    add_json_argument(parser)
    given = parser.parse_args(argv)
    from .. import demo

    out = None if given.quick else Path(given.out)
    recipe = None if given.quick or given.steps is None else demo.recipe_with_steps(given.steps)
    if out is not None:
        with FolderLock(
            out
        ):  # a folder that nobody can write, or that another run has, is refused before the first page
            pass
    if given.json:
        print_page(to_json(demo.demo_data(out, recipe)))
    else:
        demo.run_demo(print_page, print_title, out, recipe)
    return 0
