"""`headwise view`: every head of a model or a trace in the browser, or in one HTML file."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..output_paths import check_output
from .argument_checks import check_input_file, check_model_path
from .arguments import (
    DESCRIPTION_SUFFIXES,
    PRESETS,
    add_overwrite_argument,
    existing_mode,
    print_note,
    print_page,
)
from .command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ..viewer.view import ServerOptions, Target

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
LARGEST_PORT = 65535
TRACE_SUFFIX = ".trace"
HTML_SUFFIXES = (".html", ".htm")


def main(argv: list[str]) -> int:
    """Open the page in the browser and serve it until interrupted, or write it to a file."""
    args = _parser().parse_args(argv)
    _check_arguments(args)
    from ..viewer import view

    opened = view.open_target(_target(args), _print_note)
    if args.export is not None:
        view.write_export(opened, args.export, existing_mode(args))
        print_page(f"{args.export} shows {opened.name}; it opens in any browser, without a network")
        return 0
    with suppress(KeyboardInterrupt):  # the usual end of a server
        view.serve_page(opened, _server_options(args), announce=print_page)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "view",
        "Show every head of a model in the browser: what each one attends to, its class, what "
        "changes without it, and "
        "what can be pruned. Without an argument it opens a small trained translator. Everything "
        "stays on this "
        "machine: the page is served to this computer only and loads nothing from elsewhere.",
        "headwise view path/to/model --text 'The cat sat on the mat.'",
        "headwise view dates.trace --export dates.html",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL|TRACE",
        help=(
            "a headwise or transformers folder, a .trace file, FILE.py:FACTORY, or a model of "
            "the Hugging Face Hub"
        ),
    )
    parser.add_argument(
        "--text", metavar="TEXT", help="the text that the model reads; the page can change it"
    )
    parser.add_argument(
        "--source",
        metavar="TEXT",
        help="source text of an encoder-decoder; --text is then the target it writes",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        help="the image that a vision model reads: a file, a folder, or an .npy",
    )
    parser.add_argument(
        "--compare", metavar="MODEL|TRACE", help="another model or trace, for the screen Diff"
    )
    parser.add_argument(
        "--export", metavar="FILE", help="write the page to one .html file instead of serving it"
    )
    add_overwrite_argument(parser)
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    parser.add_argument(
        "--port", type=int, default=0, metavar="PORT", help="port of the page; 0 takes a free one"
    )
    parser.add_argument("--read-only", action="store_true", help="the page writes no files")
    parser.add_argument(
        "--out",
        default="runs/view",
        metavar="DIR",
        help="folder for models that are pruned on the page",
    )
    expert = parser.add_expert_group("access from other computers")
    expert.add_argument(
        "--host", default=LOOPBACK_HOSTS[0], metavar="ADDRESS", help="address to listen on"
    )
    expert.add_argument(
        "--allow-remote",
        action="store_true",
        help=(
            "let --host be an address that others can reach; the token in the address is the "
            "only protection"
        ),
    )
    return parser


def _check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded."""
    if not 0 <= args.port <= LARGEST_PORT:
        raise UsageError(
            f"--port {args.port} is not a port; give 1 to {LARGEST_PORT}, or 0 for a free one"
        )
    if args.host not in LOOPBACK_HOSTS and not args.allow_remote:
        raise UsageError(
            f"--host {args.host} can be reached from other computers; add --allow-remote if they "
            "may see the model"
        )
    if args.text is not None and not args.text.strip():
        raise UsageError("--text is empty; give at least one word")
    if (
        args.target is not None
        and args.target.endswith(TRACE_SUFFIX)
        and (args.text or args.source)
    ):
        option = "--text" if args.text else "--source"
        raise UsageError(
            f"{option} needs a model, and {args.target} is a trace of one run; give the model "
            "instead"
        )
    from ..viewer.view import HTML_PAGE, MODELS_FOLDER

    if args.export is not None:
        path = Path(args.export)
        if path.suffix.lower() not in HTML_SUFFIXES:
            raise UsageError(f"--export {args.export} is not an HTML file; end the name in .html")
        check_output(path, HTML_PAGE, existing_mode(args))
    elif args.overwrite:
        raise UsageError(
            "--overwrite is for --export; give --export FILE, or leave --overwrite out"
        )
    if args.image is not None:
        _check_image(args)
    if args.compare is not None and not Path(args.compare).exists():
        raise UsageError(
            f"--compare {args.compare} does not exist; give a model folder or a .trace file"
        )
    if args.compare is not None and args.export is not None:
        raise UsageError("--compare needs the live page; leave it out, or leave out --export")
    if not args.read_only:
        check_output(args.out, MODELS_FOLDER, "continue")
    if args.target is not None:
        _check_target(args.target)


def _check_image(args: argparse.Namespace) -> None:
    if not Path(args.image).exists():
        raise UsageError(
            f"--image {args.image} does not exist; give an image, a folder of images, or an .npy"
        )
    if args.text or args.source:
        raise UsageError(
            "--image is for a model that reads no text; give --image, or --text and --source"
        )
    if args.target is None or args.target.endswith(TRACE_SUFFIX):
        raise UsageError("--image needs a vision model; give its folder")


def _check_target(name: str) -> None:
    """Refuse names that cannot be opened; what is neither a file nor a folder may be a model of the
    Hub.
    """
    path, colon, _ = name.rpartition(":")
    if name.endswith(TRACE_SUFFIX) or (colon and path.endswith(".py")):
        check_input_file("MODEL", path if path.endswith(".py") else name)
    elif Path(name).exists() or name in PRESETS or Path(name).suffix in DESCRIPTION_SUFFIXES:
        check_model_path(name)


def _print_note(line: str) -> None:
    print_note(f"headwise: {line}")


def _target(args: argparse.Namespace) -> Target:
    from ..viewer.view import Target

    out = None if args.read_only else Path(args.out)
    return Target(args.target, args.text, args.source, out, args.compare or "", args.image or "")


def _server_options(args: argparse.Namespace) -> ServerOptions:
    from ..viewer.view import ServerOptions

    if args.host not in LOOPBACK_HOSTS:
        _print_note(f"anyone who can reach {args.host} and has the address can see this model")
    return ServerOptions(args.host, args.port, not args.no_browser)
