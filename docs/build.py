"""Write the generated parts of README.md and docs/*.md; with --check, say which are stale and fail.

A generated part stands between `<!-- generated: NAME -->` and `<!-- /generated -->`; the function of that
name below says what belongs there. What a reader could take for a fact about the code is written this way.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /generated -->)", re.DOTALL)
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
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# --- generators ----------------------------------------------------------------------------------------


@generates
def layers() -> str:
    """The import map, as import-linter enforces it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    package = ROOT / "src" / "headwise"
    lines = []
    for row in rows:
        rooms = [room for room in re.findall(r"\w+", row) if present(package / room)]
        lines += ["    " + "  ".join(rooms)] if rooms else []
    return "\n".join(lines)


@generates
def traffic() -> str:
    """What a step sends, by how its work is divided."""
    from headwise import families
    from headwise.distributed import Parallelism
    from headwise.distributed.communication_volume import BatchShape, count_communication as sent

    sizes = {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 64, "vocab_size": 65}
    described, rows = families.read_model_spec({"model_type": "gpt2", **sizes}), []
    alone = ("data=2", "data=8", "shards=2", "shards=8", "data=2,shards=4")
    for said in (*alone, "tensor=2", "tensor=4", "context=2", "context=8", "data=2,tensor=2", "context=2,tensor=2"):
        messages = sent(described, Parallelism.parse(said), batch_shape=BatchShape(16, 64))
        moved = sum(message.moved for message in messages) / 1e6
        each = {kind: sum(m.kind == kind for m in messages) for kind in ("sum", "gather", "scatter")}
        rows.append([f"`{said}`", *(str(count) for count in each.values()), f"{moved:.2f} MB"])
    return table(["spread", "sums", "gathered", "scattered", "sent by each rank"], rows)


@generates
def divided() -> str:
    """Every preset of 8 heads between two ranks: by heads, by tokens."""
    from headwise import PRESETS, SpecError, costs, design
    from headwise.distributed.communication_volume import count_kv_entry_numbers
    from headwise.distributed.head_partition import partition_heads as shared

    rows = []
    for name in PRESETS:
        spec = design(preset=name, model=512, heads=8)
        try:
            share = costs.count_parameters(shared(name, spec, 2)[0].spec) / costs.count_parameters(spec)
            said = f"{share:.0%}"
        except SpecError as refused:
            said = f"refused: {str(refused).partition(': ')[2].partition(',')[0]}"
        rows.append([f"`{name}`", said, f"{count_kv_entry_numbers(spec):,}"])
    return table(
        ["preset", "`tensor=2`: of a layer's numbers, a rank has", "`context=2`: numbers sent of a token"], rows
    )


def present(room: Path) -> bool:
    return room.with_suffix(".py").is_file() or (room / "__init__.py").is_file()


@generates
def parts() -> str:
    """Every registered part: when it acts, what it is, where it was published."""
    rows = [(f"`{cls.__name__}`", phase(cls), summary(cls), cls.paper or "-") for cls in registered_parts()]
    return table(["part", "acts on", "what it is", "paper"], rows)


@generates
def clashes() -> str:
    """Every pair of parts that refuse each other, in the words of the refusal; what is not here can be combined."""
    cannot, pairs, rows = alone(), 0, []
    parts = registered_parts()
    for n, one in enumerate(parts):
        for other in parts[n + 1 :]:
            if phase(one) == phase(other) and phase(one) in slots():
                continue  # a slot holds one part
            pairs += 1
            reasons = [said for said in refusals(one, other) if said not in cannot[one] + cannot[other]]
            rows += [(f"`{one.__name__}`", f"`{other.__name__}`", "; ".join(reasons))] if reasons else []
    single = [(f"`{cls.__name__}`", "-", "; ".join(said)) for cls, said in cannot.items() if said]
    told = f"{pairs} pairs of parts were tried as they come, beside the usual choices; {len(rows)} refuse each other."
    return f"{told}\n\n{table(['part', 'with', 'why not'], [*single, *rows])}"


@generates
def variants() -> str:
    """Every preset: formula, paper, price, backends, and where its sources disagree."""
    import variants_page

    return variants_page.page()


@generates
def recipe() -> str:
    """The usual values of a recipe."""
    from headwise.training.recipe import Recipe, to_toml

    return f"```toml\n{to_toml(Recipe())}```"


@generates
def tasks() -> str:
    """Every task that is made in code: what it asks, its knobs, an example, its measures and its chance."""
    import tasks_page

    return tasks_page.page()


@generates
def served() -> str:
    """What was measured of many requests at once."""
    import engine_page

    return engine_page.page()


@generates
def benched() -> str:
    """What `headwise bench` measured last."""
    import bench_pages

    return bench_pages.rows()


@generates
def scaled() -> str:
    """Every backend: what it takes, and what it costs as calls grow."""
    import bench_pages

    return bench_pages.scales()


def alone() -> dict[type, list[str]]:
    """What each part, as it comes, refuses of the usual choices."""
    return {cls: refusals(cls) for cls in registered_parts()}


def refusals(*parts: type) -> list[str]:
    """Why these parts cannot stand together beside the usual choices."""
    import headwise as hw

    slotted = {phase(cls).lower(): cls() for cls in parts if phase(cls) in slots()}
    rest = tuple(cls() for cls in parts if phase(cls) not in slots())
    try:
        hw.design(model=512, heads=8, modifiers=rest, **slotted)
    except hw.SpecError as error:
        return str(error).split("; ")
    return []


def slots() -> set[str]:
    """The seams of which a spec has exactly one."""
    from headwise.spec.attention_spec import SLOTS

    return {kind.__name__ for kind in SLOTS.values()}


def registered_parts() -> list[type]:
    from headwise.interfaces import Part
    from headwise.parts import REGISTRY

    return [cls for _, cls in sorted(REGISTRY.items()) if issubclass(cls, Part)]


def phase(cls: type) -> str:
    """The seam it fills, which says when it acts."""
    from headwise import interfaces

    return next(base.__name__ for base in cls.__mro__ if base.__module__.startswith(interfaces.__name__))


def summary(cls: type) -> str:
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


# --- the files -----------------------------------------------------------------------------------------


def pages() -> list[Path]:
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]


def fresh(path: Path) -> str:
    """The page with every generated part written anew."""
    text = path.read_text()

    def filled(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in GENERATORS:
            known = ", ".join(sorted(GENERATORS))
            raise SystemExit(f"{path.relative_to(ROOT)}: nothing generates {name!r}; known: {known}")
        if MARK.search(block["body"]):
            raise SystemExit(f"{path.relative_to(ROOT)}: the generated part {name!r} is not closed")
        return f"{block[1]}{GENERATORS[name]().strip(chr(10))}\n{block[4]}"

    new, found = BLOCK.subn(filled, text)
    if 2 * found != len(MARK.findall(new)):
        raise SystemExit(f"{path.relative_to(ROOT)}: a generated part is opened or closed alone")
    return new


def write(path: Path, text: str) -> None:
    """Replace a file as a whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, path.stat().st_mode)
    os.replace(file.name, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when something is stale")
    check = parser.parse_args(argv).check
    stale = 0
    for path in pages():
        old, new, name = path.read_text(), fresh(path), path.relative_to(ROOT).as_posix()
        if old == new:
            continue
        stale += 1
        if check:
            diff = difflib.unified_diff(old.splitlines(), new.splitlines(), name, "fresh", lineterm="")
            print(*diff, sep="\n")
        else:
            write(path, new)
            print(f"wrote {name}")
    if check and stale:
        print(f"{stale} page(s) are stale: run `make docs`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
