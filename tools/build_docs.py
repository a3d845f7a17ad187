"""Write the generated parts of the READMEs and docs/*.md; with --check, only report which are
stale, and fail.

A generated part is between `<!-- generated: NAME -->` and `<!-- /generated -->`; the function of
this name in this file returns its text. Every fact about the code in the documents is generated, so
that it stays true.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HEADWISE_MACHINE_CLASS"] = (
    "x86-avx512-bf16"  # the documents show the choices of the machine that was measured
)
ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /generated -->)", re.DOTALL
)
MARK = re.compile(r"<!-- (?:generated: [\w-]+|/generated) -->")

Generator = Callable[[], str]
GENERATORS: dict[str, Generator] = {}


def generates(make: Generator) -> Generator:
    """Register a generator under its own name, underscores as hyphens."""
    GENERATORS[make.__name__.replace("_", "-")] = make
    return make


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


# --- generators -----------------------------------------------------------------------------------


@generates
def layers() -> str:
    """The import map, as import-linter enforces it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    package = ROOT / "src" / "headwise"
    lines = []
    for row in rows:
        modules = [module for module in re.findall(r"\w+", row) if is_module(package / module)]
        lines += ["    " + "  ".join(modules)] if modules else []
    return "\n".join(lines)


@generates
def divided() -> str:
    """Every preset with 8 heads on two ranks: tensor parallelism and context parallelism."""
    from headwise import PRESETS, SpecError, costs, design
    from headwise.models.distributed.head_partition import partition_heads

    rows = []
    for name in PRESETS:
        spec = design(preset=name, model=512, heads=8)
        try:
            share = costs.count_parameters(
                partition_heads(name, spec, 2)[0].spec
            ) / costs.count_parameters(spec)
            cell = f"{share:.0%}"
        except SpecError as refused:
            cell = f"not divisible: {str(refused).partition(': ')[2].partition(',')[0]}"
        rows.append(
            [
                f"`{name}`",
                cell,
                f"{sum(math.prod(shape) for shape in spec.kv_entry_shapes().values()):,}",
            ]
        )
    return table(
        [
            "preset",
            "`tensor=2`: share of the parameters per rank",
            "`context=2`: numbers sent per token",
        ],
        rows,
    )


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@generates
def parts() -> str:
    """Every registered part: its interface, definition and paper."""
    rows = [
        (f"`{cls.__name__}`", phase(cls), summary(cls), cls.paper or "-")
        for cls in registered_parts()
    ]
    return table(["part", "interface", "definition", "paper"], rows)


@generates
def part_conflicts() -> str:
    """Every part and pair of parts that conflicts, with the message; all other pairs can be
    combined.
    """
    single_conflicts, pairs, rows = conflicts_with_defaults(), 0, []
    parts = registered_parts()
    for n, one in enumerate(parts):
        for other in parts[n + 1 :]:
            if phase(one) == phase(other) and phase(one) in slots():
                continue  # a slot holds one part
            pairs += 1
            reasons = [
                text
                for text in conflicts(one, other)
                if text not in single_conflicts[one] + single_conflicts[other]
            ]
            rows += (
                [(f"`{one.__name__}`", f"`{other.__name__}`", "; ".join(reasons))]
                if reasons
                else []
            )
    single = [
        (f"`{cls.__name__}`", "-", "; ".join(texts))
        for cls, texts in single_conflicts.items()
        if texts
    ]
    summary_line = (
        f"Of {pairs} pairs of parts, {len(rows)} conflict. Both parts have default fields, and "
        "the layer has default "
        "choices."
    )
    return f"{summary_line}\n\n{table(['part', 'with', 'reason'], [*single, *rows])}"


@generates
def variants() -> str:
    """Every preset: formula, paper, costs, backends, and disagreements of its sources."""
    import reference_pages

    return reference_pages.variants_page()


@generates
def recipe() -> str:
    """The defaults of a recipe."""
    from headwise.training.recipe import Recipe, to_toml

    return f"```toml\n{to_toml(Recipe())}```"


@generates
def tasks() -> str:
    """Every synthetic task: definition, options, an example, metrics and chance level."""
    import reference_pages

    return reference_pages.tasks_page()


@generates
def served() -> str:
    """Measurements of serving many requests."""
    import measured_pages

    return measured_pages.engine_page()


# Sections of the API reference, with the packages and modules whose public names they list.
API_SECTIONS = {
    "Parts": ("attention.parts",),
    "Layers": ("attention", "util"),
    "Checks": ("costs.part_checks",),
    "Costs": ("costs",),
    "Models, training, generation": ("models", "hub", "training"),
    "Heads": ("observe", "viewer"),
    "Surgery": ("surgery",),
}


@generates
def api() -> str:
    """Every public name as a directive of mkdocstrings, by section."""
    from headwise import _MODULE_OF_NAME

    rest = {name: home for name, home in _MODULE_OF_NAME.items() if not home.endswith(":")}
    lines = []
    for title, packages in API_SECTIONS.items():
        prefixes = tuple(f"{package}." for package in packages)
        names = [name for name, module in rest.items() if f"{module}.".startswith(prefixes)]
        lines += [
            f"## {title}",
            "",
            *(f"::: headwise.{rest.pop(name)}.{name}" for name in sorted(names)),
            "",
        ]
    if rest:
        raise SystemExit(f"API_SECTIONS lacks the modules of {sorted(rest)}; add them")
    return "\n\n".join(line for line in lines if line)


ERRATA_HEADS = {
    "en": ("id", "claim", "correction", "reference", "command"),
    "zh": ("编号", "原文的说法", "更正", "参考", "命令"),
}
errata_rows: list[tuple[str, Any, Any]] = []  # filled once: each entry is run


def read_errata() -> list[tuple[str, Any, Any]]:
    """Rows such as C1.4 with entry and result, by document and number. Entries may share a row."""
    from headwise.learn.catalogue import load_entries

    if not errata_rows:
        for entry in load_entries():
            rows = [row for row in entry.rows if row[0] == "C"]
            result = entry.check() if rows else None
            errata_rows.extend((row, entry, result) for row in rows)
        errata_rows.sort(key=lambda one: [int(part) for part in one[0][1:].split(".")])
    return errata_rows


def erratum_cells(row: str, entry: Any, result: Any, language: str) -> list[str]:
    """Id, claim, correction, reference and command; lines of a correction are joined by `<br>`."""
    from headwise.learn.entry_text import Words
    from headwise.learn.language import use_language

    with use_language(language):
        lines = map(table_as_sentence, result.reason(language).splitlines())
        reason = "<br>".join(lines)
    reference = Words(language).reference(entry) or "-"
    claim = entry.line.fill(language, {})
    return [row, claim, reason, reference, f"`headwise learn {row}`"]


def table_as_sentence(line: str) -> str:
    """A row of cells between bars as `first: second, third`; other lines as they are."""
    from headwise.learn.language import join_clauses, join_items

    label, *values = [cell.strip() for cell in line.split(" | ")]
    if not join_items(values):
        return line
    return join_clauses([*filter(None, [label]), join_items(values)], ": ")


def errata_table(document: str, language: str) -> str:
    """The errata of one document in one language, with the numbers of their runs."""
    prefix = f"C{int(document)}."
    rows = [erratum_cells(*one, language) for one in read_errata() if one[0].startswith(prefix)]
    return table(ERRATA_HEADS[language], rows)


for document in ("000", "001", "002", "003", "004"):
    for language, suffix in (("en", ""), ("zh", "-zh")):
        GENERATORS[f"errata-{document}{suffix}"] = partial(errata_table, document, language)


LEARN_HEADS = {
    "en": ("document", "title", "holds", "holds if", "wrong", "not resolved", "not run", "topics"),
    "zh": ("文档", "标题", "成立", "有条件成立", "有误", "未有定论", "未运行", "主题"),
}


def learn_documents(language: str) -> str:
    """The documents of `headwise learn`: entries by verdict, and topics."""
    from headwise.learn.catalogue import Verdict, list_topics, load_documents

    rows = []
    for document in load_documents():
        verdicts = [entry.verdict for entry in document.entries]
        expected = (verdict for verdict in Verdict if verdict is not Verdict.FAULT)
        counts = [str(verdicts.count(verdict)) for verdict in expected]
        topics = ", ".join(f"`{topic}`" for topic in list_topics(document.entries))
        title = document.title.fill(language, {})
        rows.append([f"`{document.id}`", title, *counts, topics])
    return table(LEARN_HEADS[language], rows)


NOT_COVERED_HEADS = {
    "en": ("document", "sentence", "not covered, because"),
    "zh": ("文档", "原句", "未涵盖的原因"),
}


def not_covered(language: str) -> str:
    """The sentences of the documents without an entry, and why."""
    from headwise.learn.catalogue import read_toml

    rows = [
        [f"`{one['document']}`", one["quote"], one[language]]
        for one in read_toml("not_covered")["sentence"]
    ]
    return table(NOT_COVERED_HEADS[language], rows)


for language, suffix in (("en", ""), ("zh", "-zh")):
    GENERATORS[f"learn-documents{suffix}"] = partial(learn_documents, language)
    GENERATORS[f"not-covered{suffix}"] = partial(not_covered, language)


@generates
def benched() -> str:
    """The last measurements of `python -m benchmarks`."""
    import measured_pages

    return measured_pages.benchmarks_page()


@generates
def gpu_runs() -> str:
    """What `make gpu` measured, if it has run on a GPU."""
    path = ROOT / "docs" / "gpu.json"
    if not path.exists():
        return "No GPU has run these calls yet: there is no docs/gpu.json."
    data = json.loads(path.read_text())
    rows = []
    for row in data["rows"]:
        cells = [row["layer"], row["dtype"], f"`{row['backend']}`"]
        if "failed" in row:
            rows.append([*cells, row["failed"], "-", "-"])
        else:
            error = f"{row['error']:.1e}{'' if row['is_right'] else ', wrong'}"
            rows.append(
                [*cells, f"{row['seconds'] * 1e3:.2f} ms", error, "yes" if row["waits"] else "no"]
            )
    head = [
        "layer",
        "dtype",
        "backend",
        f"{data['tokens']:,} tokens, forward",
        "error",
        "waits for the GPU",
    ]
    lines = [f"{data['device']}, torch {data['torch']}", table(head, rows)]
    lines.append(f"Tests marked `gpu`: {data['tests']['result'].strip('= ')}.")
    lines += [f"- {failed}" for failed in data["tests"]["failed"]]
    for name, speed in data.get("decoding", {}).items():
        number = speed if name == "failed" else f"{speed:,.0f} tokens/s"
        lines.append(
            f"- decoding with the shape of GPT-2, bfloat16, one sequence, {name}: {number}"
        )
    return "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:])


@generates
def scaled() -> str:
    """Every backend, and which presets it supports."""
    import measured_pages

    return measured_pages.backends_page()


@generates
def hostile_inputs() -> str:
    """Inputs tried, and faults injected, in sum."""
    import measured_pages

    return measured_pages.summary_line()


@generates
def hostile_input_counts() -> str:
    """Inputs of each parser, route and command."""
    import measured_pages

    return table(
        ["parser, route or command", "inputs", "read", "refused", "failures"],
        measured_pages.input_rows(),
    )


@generates
def injected_faults() -> str:
    """Faults of each kind."""
    import measured_pages

    return table(["fault", "injected", "failures"], measured_pages.fault_rows())


@generates
def compared_tools() -> str:
    """The tools that headwise is compared with."""
    import measured_pages

    return measured_pages.tools_table()


@generates
def compared_features() -> str:
    """Features of headwise and of other tools, by group."""
    import measured_pages

    return measured_pages.feature_tables()


@generates
def compared_tasks() -> str:
    """Lines of code and processor time of two tasks, with headwise and with another tool."""
    import measured_pages

    return measured_pages.tasks_table()


@generates
def compared_evidence() -> str:
    """The tests and commands that show the marks of headwise."""
    import measured_pages

    return measured_pages.evidence_table()


def presets_table(language: str) -> str:
    """Every preset with its paper, parameters and cache."""
    import reference_pages

    return reference_pages.presets_table(language)


for language, suffix in (("en", ""), ("zh", "-zh")):
    GENERATORS["presets-table" + suffix] = partial(presets_table, language)


def concept_part(name: str, language: str) -> str:
    """A list of docs/concepts.md or docs/questions.md."""
    import reference_pages

    return reference_pages.concept_list(name, language)


for name in (
    "look-up",
    "five-steps",
    "queries-keys-values",
    "scale",
    "heads",
    "parameters",
    "masks",
    "cross-attention",
    "positions",
    "recurrence",
    "cost",
    "kv-cache",
    "what-heads-do",
    "circuits",
    "which-heads-can-go",
    "how-variants-differ",
    "training",
    "misconceptions",
    "questions",
):
    for language, suffix in (("en", ""), ("zh", "-zh")):
        GENERATORS[f"concept-{name}{suffix}"] = partial(concept_part, name, language)


def conflicts_with_defaults() -> dict[type, list[str]]:
    """Conflicts of each part with the default choices."""
    return {cls: conflicts(cls) for cls in registered_parts()}


def conflicts(*parts: type) -> list[str]:
    """Conflicts of these parts, in a layer with default choices."""
    import headwise as hw

    slotted = {phase(cls).lower(): cls() for cls in parts if phase(cls) in slots()}
    rest = tuple(cls() for cls in parts if phase(cls) not in slots())
    try:
        hw.design(model=512, heads=8, modifiers=rest, **slotted)
    except hw.SpecError as error:
        return str(error).split("; ")
    return []


def slots() -> set[str]:
    """Names of the interfaces of which a spec has exactly one part."""
    from headwise.attention.spec.attention_spec import SLOTS

    return {kind.__name__ for kind in SLOTS.values()}


def registered_parts() -> list[type]:
    from headwise.attention.interfaces import Part
    from headwise.attention.parts import REGISTRY

    return [cls for _, cls in sorted(REGISTRY.items()) if issubclass(cls, Part)]


def phase(cls: type) -> str:
    """Name of the interface that the part implements."""
    from headwise.attention import interfaces

    return next(
        base.__name__ for base in cls.__mro__ if base.__module__.startswith(interfaces.__name__)
    )


def summary(cls: type) -> str:
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


@generates
def families() -> str:
    """What works for the families of 2026."""
    import measured_pages

    return measured_pages.format_families()


@generates
def interval_coverage() -> str:
    """Simulated coverage of intervals and rejection rates of tests."""
    import measured_pages

    return measured_pages.format_coverage()


@generates
def interval_coverage_zh() -> str:
    """The same table in Chinese."""
    import measured_pages

    return measured_pages.format_coverage("zh")


# --- the files ------------------------------------------------------------------------------------


def pages() -> list[Path]:
    readmes = (ROOT / "README.md", ROOT / "README.zh-CN.md")
    return [path for path in (*readmes, *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]


def generate(path: Path) -> str:
    """Return the page with every generated part replaced."""
    text = path.read_text()

    def filled(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in GENERATORS:
            names = ", ".join(sorted(GENERATORS))
            raise SystemExit(
                f"{path.relative_to(ROOT)}: there is no generator {name!r}; use one of {names}"
            )
        if MARK.search(block["body"]):
            raise SystemExit(
                f"{path.relative_to(ROOT)}: the generated part {name!r} has no end; add <!-- "
                "/generated -->"
            )
        return f"{block[1]}{GENERATORS[name]().strip(chr(10))}\n{block[4]}"

    new, num_blocks = BLOCK.subn(filled, text)
    if 2 * num_blocks != len(MARK.findall(new)):
        raise SystemExit(
            f"{path.relative_to(ROOT)}: a generated part lacks its start or its end; add the "
            "missing mark"
        )
    return new


def write(path: Path, text: str) -> None:
    """Replace a file as a whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, path.stat().st_mode)
    os.replace(file.name, path)


def stored_files() -> dict[Path, str]:
    """Data files of the package that are read from pages, with their contents."""
    import stored_studies

    files = {stored_studies.OUT: stored_studies.stored_studies()}
    try:
        files[FORMULAS] = stored_formulas()
    except ModuleNotFoundError as error:
        print(f"formulas are not compared: {error}; run `make install`", file=sys.stderr)
    return files


FORMULAS = ROOT / "src/headwise/learn/formulas.json"


def stored_formulas() -> str:
    """MathML of the formulas of the documents, by their LaTeX between dollars."""
    from latex2mathml.converter import convert

    from headwise.learn.document_sections import list_formulas

    displays = {text: "block" if "$$" in text else "inline" for text in list_formulas()}
    mathml = {text: convert(text.strip("$"), display=displays[text]) for text in displays}
    return json.dumps(mathml, indent=0, ensure_ascii=False) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is stale"
    )
    parser.add_argument("pages", nargs="*", type=Path, help="pages to write (default: all)")
    args = parser.parse_args(argv)
    check = args.check
    stale = 0
    data = {} if args.pages else stored_files()
    for path in [*data, *([page.resolve() for page in args.pages] or pages())]:
        old = path.read_text() if path.is_file() else ""
        new = data[path] if path in data else generate(path)
        name = path.relative_to(ROOT).as_posix()
        if old == new:
            continue
        stale += 1
        if check:
            diff = difflib.unified_diff(
                old.splitlines(), new.splitlines(), name, "fresh", lineterm=""
            )
            print(*diff, sep="\n")
        else:
            write(path, new)
            print(f"wrote {name}")
    if check and stale:
        print(f"{stale} page(s) are stale: run `make docs`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
