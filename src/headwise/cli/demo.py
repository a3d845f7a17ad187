"""`headwise demo`: the heads of a trained translator; with --train, a translator that is trained
and compressed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..files import FolderLock
from ..output_paths import check_output
from .arguments import add_json_argument, print_page, print_title, to_json
from .command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    import argparse


def main(argv: list[str]) -> int:
    """Print the demo page by page, each as soon as it is computed."""
    parser = CommandParser(
        "demo",
        "A tour of a small trained translator: what its heads attend to, one head ablated, half "
        "of them pruned and "
        "proved, in the terminal and as a page with pictures; about a minute. With --train the "
        "translator is trained "
        "as you watch, after pages on one attention layer: about three minutes on two idle cores.",
        "headwise demo",
        "headwise demo --train --out runs/first",
    )
    parser.add_argument(
        "--out", default="runs/demo", metavar="DIR", help="folder for the models and the report"
    )
    parser.add_argument(
        "--train", action="store_true", help="train a translator, then compress it in two ways"
    )
    parser.add_argument(
        "--steps", type=int, metavar="COUNT", help="with --train, training steps (default: 800)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only the pages on one attention layer; a few seconds"
    )
    add_json_argument(parser)
    args = parser.parse_args(argv)
    _check_arguments(args)
    return _show_layer_and_training(args) if args.train or args.quick else _show_sample(args)


def _check_arguments(args: argparse.Namespace) -> None:
    if args.train and args.quick:
        raise UsageError("--train and --quick exclude each other; leave one out")
    if args.steps is not None and not args.train:
        raise UsageError("--steps is for training; add --train")
    if not args.quick:
        from ..models.save_load import MODEL_FOLDER

        # Report a folder that is not writable or in use by another run before the first page.
        with FolderLock(check_output(args.out, MODEL_FOLDER, "continue")):
            pass


def _show_sample(args: argparse.Namespace) -> int:
    import torch

    from ..demo import sample_tour

    torch.set_num_threads(1)  # the model is so small that a second thread costs more than it saves
    if args.json:
        print_page(to_json(sample_tour.run_sample_tour(_ignore, _ignore, Path(args.out)).data))
    else:
        sample_tour.run_sample_tour(print_page, print_title, Path(args.out))
    return 0


def _ignore(text: str) -> None:
    """Print nothing, because --json prints one document."""


def _show_layer_and_training(args: argparse.Namespace) -> int:
    from .. import demo

    out = Path(args.out) if args.train else None
    recipe = None if args.steps is None else demo.recipe_with_steps(args.steps)
    if args.json:
        print_page(to_json(demo.demo_data(out, recipe)))
    else:
        demo.run_demo(print_page, print_title, out, recipe)
    return 0
