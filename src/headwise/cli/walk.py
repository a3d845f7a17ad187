"""`headwise walk`: list every tensor operation of a layer, with shapes, strides, copies and views."""

from __future__ import annotations

from .arguments import CommandParser, add_json_argument, add_spec_arguments, parse_spec, print_page, to_json


def main(argv: list[str]) -> int:
    """Run a layer once on random input and print its tensor operations."""
    parser = CommandParser(
        "walk",
        "Run a layer once on random input and list every tensor operation by stage, with shapes, strides, and whether "
        "it copies or makes a view.",
        "headwise walk mha --batch 5 --tokens 10",
        "headwise walk gqa --set heads.kv=4 --json",
    )
    add_spec_arguments(parser)
    parser.add_argument("--batch", type=int, default=5, metavar="COUNT", help="batch size")
    parser.add_argument("--tokens", type=int, default=10, metavar="COUNT", help="tokens per sequence")
    parser.add_argument(
        "--source",
        type=int,
        metavar="COUNT",
        help="cross-attention to a source of this many tokens (default: self-attention)",
    )
    add_json_argument(parser)
    args = parser.parse_args(argv)
    spec = parse_spec(args)
    from ..nn.op_trace import walk

    trace = walk(spec, args.batch, args.tokens, args.source)
    print_page(to_json(trace.to_dict) if args.json else str(trace))
    return 0
