"""`headwise sites`: every attention layer of a model, and what may be done to it."""

from __future__ import annotations

from .screen import Arguments, document, show, take_form


def main(argv: list[str]) -> int:
    """Show the sites of a model in a folder."""
    parser = Arguments(
        "sites",
        "Every attention layer of a model: where it is, how many heads it has, who reads whom, and whether it can be "
        "seen, silenced, cut and shared, with the reason where not. A folder with a config.json alone will do.",
        "headwise sites runs/dates",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder of headwise, or one of transformers")
    take_form(parser)
    given = parser.parse_args(argv)
    from ..hub.finding import sites
    from ..hub.opening import opened

    found = sites(opened(given.model))
    show(document(found.data) if given.json else str(found))
    return 0
