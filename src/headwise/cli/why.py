"""`headwise why`: which backend would run a spec, and why each other one refuses."""

from __future__ import annotations

from .arguments import CommandParser, add_json_argument, add_spec_arguments, parse_spec, print_page, to_json


def main(argv: list[str]) -> int:
    """Say what each backend would say."""
    parser = CommandParser(
        "why",
        "Which backend would run a spec, and why each other one refuses. Nothing is run, no device is needed.",
        "headwise why gqa --device cuda --dtype bf16 --want weights",
    )
    add_spec_arguments(parser)
    parser.add_argument(
        "--want", action="append", default=[], metavar="PLACE", help="what must be seen, such as weights"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (cpu unless given)")
    parser.add_argument("--dtype", default="float32", help="float32, bf16, fp16 or float64")
    parser.add_argument(
        "--tokens", default="many", help="many queries per row, how many, or one (decoding from a cache)"
    )
    parser.add_argument(
        "--when",
        action="append",
        default=[],
        metavar="STATE",
        help="grad, training, mask (a mask of the caller's own), or paged (as an engine remembers); may be repeated",
    )
    add_json_argument(parser)
    given = parser.parse_args(argv)
    spec = parse_spec(given)
    from ..backends.backend_report import why

    said = why(
        spec,
        want=_split_options(given.want),
        device=given.device,
        dtype=given.dtype,
        tokens=given.tokens,
        when=_split_options(given.when),
    )
    print_page(to_json(said.data) if given.json else str(said))
    return 0


def _split_options(given: list[str]) -> list[str]:
    """Options that may be repeated or joined by commas."""
    return [word for option in given for word in option.split(",") if word]
