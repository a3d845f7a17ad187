"""`headwise demo`: a tour of one layer, then a small translator that is trained, compressed and compared."""

from __future__ import annotations

from pathlib import Path

from ..files import FolderLock
from .arguments import add_json_argument, print_page, print_title, to_json
from .command_parser import CommandParser


def main(argv: list[str]) -> int:
    """Print the demo page by page, each as soon as it is computed."""
    parser = CommandParser(
        "demo",
        "A tour: soft look-up, one attention layer in detail, and a translator of dates and amounts that is trained "
        "as you watch. Then half of its heads are removed, or its keys and values are shared, and it is retrained: "
        "before and after side by side, with proofs and a report. Takes about three minutes on two idle cores.",
        "headwise demo",
        "headwise demo --quick",
    )
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="folder for the translators and the report")
    parser.add_argument("--steps", type=int, metavar="COUNT", help="training steps of the translator (default: 800)")
    parser.add_argument("--quick", action="store_true", help="skip training; takes a few seconds")
    add_json_argument(parser)
    args = parser.parse_args(argv)
    from .. import demo

    out = None if args.quick else Path(args.out)
    recipe = None if args.quick or args.steps is None else demo.recipe_with_steps(args.steps)
    if out is not None:
        # Report a folder that is not writable or in use by another run before the first page.
        with FolderLock(out):
            pass
    if args.json:
        print_page(to_json(demo.demo_data(out, recipe)))
    else:
        demo.run_demo(print_page, print_title, out, recipe)
    return 0
