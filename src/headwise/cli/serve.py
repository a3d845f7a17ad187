"""`headwise serve`: a model behind the HTTP interface of OpenAI's completions."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .argument_checks import check_minimum, check_model_path, check_tokenizer
from .arguments import print_page
from .command_parser import CommandParser, UsageError
from .text_arguments import add_tokenizer_argument
from .view import LARGEST_PORT, LOOPBACK_HOSTS

if TYPE_CHECKING:
    from ..api_server.server import ServedModel

KEY_VARIABLE = "HEADWISE_API_KEY"
DEFAULT_BUDGET = "1 GiB"


def main(argv: list[str]) -> int:
    """Serve a model until interrupted."""
    args = _parser().parse_args(argv)
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    _check_arguments(args, key)
    from ..api_server.server import ServeOptions, serve

    model = _load(args)
    with suppress(KeyboardInterrupt):  # the usual end of a server
        serve(
            model,
            ServeOptions(args.host, args.port, key),
            on_start=lambda address: print_page(f"{model.name}: {address}  (Ctrl+C stops it)"),
        )
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "serve",
        "Serve a language model or a translator over HTTP, with the interface of OpenAI's completions and chat, so "
        "that clients and evaluation harnesses can use it. Requests of many clients run together in the engine. Only "
        "this machine can reach the server, unless you open it to others.",
        "headwise serve path/to/model",
        "headwise serve path/to/model --port 8080 --budget '4 GiB'",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a model")
    parser.add_argument("--port", type=int, default=8000, metavar="PORT", help="port; 0 takes a free one")
    parser.add_argument("--name", metavar="NAME", help="name of the model in requests (default: that of its folder)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"key that requests have to carry (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument("--budget", default=DEFAULT_BUDGET, metavar="MEMORY", help="memory of the KV cache")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")
    engine = parser.add_expert_group("the engine")
    engine.add_argument("--rows", type=int, metavar="COUNT", help="most concurrent requests (default: 64)")
    engine.add_argument("--chunk", type=int, metavar="TOKENS", help="most prompt tokens per step (default: 256)")
    add_tokenizer_argument(engine)
    remote = parser.add_expert_group("access from other computers")
    remote.add_argument("--host", default=LOOPBACK_HOSTS[0], metavar="ADDRESS", help="address to listen on")
    remote.add_argument(
        "--allow-remote", action="store_true", help="let --host be an address that others can reach; needs a key"
    )
    return parser


def _check_arguments(args: argparse.Namespace, key: str | None) -> None:
    """Refuse what cannot work before a model is loaded."""
    if not 0 <= args.port <= LARGEST_PORT:
        raise UsageError(f"--port {args.port} is not a port; give 1 to {LARGEST_PORT}, or 0 for a free one")
    if args.host not in LOOPBACK_HOSTS and not args.allow_remote:
        raise UsageError(
            f"--host {args.host} can be reached from other computers; add --allow-remote if they may use it"
        )
    if args.host not in LOOPBACK_HOSTS and key is None:
        raise UsageError(f"--host {args.host} needs a key, or anyone could use the model; add --api-key KEY")
    if args.name is not None and not args.name.strip():
        raise UsageError("--name is empty; give a name, or leave it out")
    check_model_path(args.model)
    if not Path(args.model).is_dir():
        raise UsageError(f"{args.model} is a file; give a folder with a model")
    for name in ("rows", "chunk"):
        check_minimum(f"--{name}", getattr(args, name), 1)
    check_tokenizer(args.tokenizer)
    from ..costs.serving_capacity import parse_bytes

    parse_bytes(args.budget)


def _load(args: argparse.Namespace) -> ServedModel:
    from ..api_server.request_fields import read_chat_template
    from ..api_server.server import ServedModel
    from ..costs.serving_capacity import parse_bytes
    from ..serving import BatchingConfig, Engine
    from .run import load_model

    folder = Path(args.model)
    template = read_chat_template(folder)
    chosen = {name: value for name in ("rows", "chunk") if (value := getattr(args, name)) is not None}
    engine = Engine(load_model(args), budget=parse_bytes(args.budget), batching=BatchingConfig(**chosen))
    return ServedModel(args.name or folder.resolve().name, engine, template)
