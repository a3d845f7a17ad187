"""`headwise sites`: every attention layer of a model, and what may be done to it."""

from __future__ import annotations

from .arguments import CommandParser, add_json_argument, print_page, to_json


def main(argv: list[str]) -> int:
    """Show the sites of a model in a folder."""
    parser = CommandParser(
        "sites",
        "Every attention layer of a model: where it is, how many heads it has, who reads whom, and whether it can be "
        "seen, silenced, cut and shared, with the reason where not. A folder with a config.json alone will do.",
        "headwise sites runs/dates",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder of headwise, or one of transformers")
    add_json_argument(parser)
    given = parser.parse_args(argv)
    from ..hub.model_import import load_original
    from ..inspect.attention_sites import sites

    found = sites(load_original(given.model))
    print_page(to_json(found.to_dict) if given.json else str(found))
    return 0
