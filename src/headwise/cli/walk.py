"""`headwise walk`: every tensor operation of a layer, with shape, strides, copy or view."""

from __future__ import annotations

from .arguments import CommandParser, add_json_argument, add_spec_arguments, parse_spec, print_page, to_json


def main(argv: list[str]) -> int:
    """Run a layer once and show what it did."""
    parser = CommandParser(
        "walk",
        "Every tensor operation of a real layer on a random input, by seam, with shape, strides, copy or view.",
        "headwise walk mha --batch 5 --tokens 10",
    )
    add_spec_arguments(parser)
    parser.add_argument("--batch", type=int, default=5, help="rows of the input (5)")
    parser.add_argument("--tokens", type=int, default=10, help="tokens in each row (10)")
    parser.add_argument("--source", type=int, default=None, help="tokens of another sequence to read, if any")
    add_json_argument(parser)
    given = parser.parse_args(argv)
    spec = parse_spec(given)
    from ..nn.op_trace import walk

    walked = walk(spec, given.batch, given.tokens, given.source)
    print_page(to_json(walked.to_dict) if given.json else str(walked))
    return 0
