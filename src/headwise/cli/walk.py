"""`headwise walk`: every tensor operation of a layer, with shape, strides, copy or view."""

from __future__ import annotations

from .screen import Arguments, document, show, spec_of, take_form, take_spec


def main(argv: list[str]) -> int:
    """Run a layer once and show what it did."""
    parser = Arguments(
        "walk",
        "Every tensor operation of a real layer on a random input, by seam, with shape, strides, copy or view.",
        "headwise walk mha --batch 5 --tokens 10",
    )
    take_spec(parser)
    parser.add_argument("--batch", type=int, default=5, help="rows of the input (5)")
    parser.add_argument("--tokens", type=int, default=10, help="tokens in each row (10)")
    parser.add_argument("--source", type=int, default=None, help="tokens of another sequence to read, if any")
    take_form(parser)
    given = parser.parse_args(argv)
    spec = spec_of(given)
    from ..steps import walk

    walked = walk(spec, given.batch, given.tokens, given.source)
    show(document(walked.data) if given.json else str(walked))
    return 0
