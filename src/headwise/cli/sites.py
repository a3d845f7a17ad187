"""`headwise sites`: list every attention layer of a model and the operations it supports."""

from __future__ import annotations

from .arguments import CommandParser, add_json_argument, print_page, to_json


def main(argv: list[str]) -> int:
    """Print the table of attention layers."""
    parser = CommandParser(
        "sites",
        "List every attention layer of a model: its path, number of heads and attention pattern, and whether its heads "
        "can be traced, ablated, pruned and converted, with the reason if not. A folder with only a config.json works.",
        "headwise sites runs/dates",
        "headwise sites path/to/model --json",
    )
    parser.add_argument("model", metavar="MODEL", help="a headwise or transformers folder")
    add_json_argument(parser)
    args = parser.parse_args(argv)
    from ..hub.model_import import load_original
    from ..inspect.attention_sites import sites

    table = sites(load_original(args.model))
    print_page(to_json(table.to_dict) if args.json else str(table))
    return 0
