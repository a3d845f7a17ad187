"""`headwise why`: which backend would run a spec, and why the others refuse."""

from __future__ import annotations

from .arguments import CommandParser, add_json_argument, add_spec_arguments, parse_spec, print_page, to_json


def main(argv: list[str]) -> int:
    """Print the chosen backend, and for each other one its reasons to refuse."""
    parser = CommandParser(
        "why",
        "Show which backend would run a spec, and why each other backend refuses. Runs nothing and needs no device.",
        "headwise why gqa --device cuda --dtype bf16 --want weights",
        "headwise why mla --tokens one --when paged",
    )
    add_spec_arguments(parser)
    parser.add_argument(
        "--want",
        action="append",
        default=[],
        metavar="PLACE",
        help="intermediate result that must be available, such as weights; repeatable",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, ...")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="float32, bf16, fp16 or float64")
    parser.add_argument(
        "--tokens",
        default="many",
        metavar="COUNT",
        help="queries per sequence: a number, many, or one (decoding from a cache)",
    )
    parser.add_argument(
        "--when",
        action="append",
        default=[],
        metavar="STATE",
        help="assume grad, training, mask (a tensor passed as mask=), or paged (a paged KV cache); repeatable",
    )
    add_json_argument(parser)
    args = parser.parse_args(argv)
    spec = parse_spec(args)
    from ..backends.backend_report import why

    report = why(
        spec,
        want=_split_options(args.want),
        device=args.device,
        dtype=args.dtype,
        tokens=args.tokens,
        when=_split_options(args.when),
    )
    print_page(to_json(report.data) if args.json else str(report))
    return 0


def _split_options(options: list[str]) -> list[str]:
    """Split values joined by commas."""
    return [word for option in options for word in option.split(",") if word]
