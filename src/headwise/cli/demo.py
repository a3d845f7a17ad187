"""`headwise demo`: the heads of a trained translator, one ablated, half of them pruned."""

from __future__ import annotations

from pathlib import Path

from ..report.progress import ProgressReporter
from .arguments import print_page, print_title, terminal_language, to_json
from .options import Options, options


@options
class DemoOptions(Options):
    """Show a small trained translator: what its heads do, one head ablated, half of them pruned and
    verified, in the terminal and as a page with pictures; about a minute.

    --out DIR  folder for the pruned model and the report
    --quick  prune nothing; a few seconds
    --lang {en,zh}  language of the texts (default: the locale's)
    --json  print one JSON document instead of text

    examples:
    headwise demo
    headwise demo --quick --out runs/first
    """

    command = "demo"
    imports_parts = False
    choices = {"lang": "en zh"}
    outputs = {"out": "models.save_load:MODEL_FOLDER"}
    out: str = "runs/demo"
    quick: bool = False
    lang: str | None = None
    json: bool = False


def main(argv: list[str]) -> int:
    """Show the tour."""
    args = DemoOptions.parse(argv)
    import torch

    from ..learn.sample_tour import run_sample_tour

    torch.set_num_threads(1)  # the model is so small that a second thread costs more than it saves
    report = ProgressReporter()
    tour = run_sample_tour(
        str if args.json else print_page,
        str if args.json else print_title,
        Path(args.out),
        language=terminal_language(args.lang),
        quick=args.quick,
        progress=report,
    )
    if args.json:
        print_page(to_json(tour.data))
    return 0
