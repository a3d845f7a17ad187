"""`headwise demo`: a look around in a few seconds."""

from __future__ import annotations

from .screen import Arguments, document, show, take_form, title


def main(argv: list[str]) -> int:
    """Show the demo, page by page as it is computed."""
    parser = Arguments("demo", "A look around: soft look-up, one spec and all that follows from it.", "headwise demo")
    take_form(parser)
    given = parser.parse_args(argv)
    from .. import demo

    if given.json:
        show(document(demo.data()))
    else:
        demo.run(show, title)
    return 0
