"""The house rules that a machine can check, on every file of the source, the tests and the docs.

The number after each heading is the rule in docs/architecture.md.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
import tomllib
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.shape_checks import ShapeError, install_shape_checks, letters, with_shape_checks
from support.syntax_trees import syntax_nodes

ROOT = Path(__file__).resolve().parents[2]


SOURCE = ROOT / "src" / "headwise"


FILES = sorted(SOURCE.rglob("*.py"))


TESTS = sorted((ROOT / "tests").rglob("*.py"))


OUTSIDE = {".venv", ".git", "node_modules", "runs", "build", "dist", ".pytest_cache", ".ruff_cache"}


LINES_OF_A_FILE = 850


COLUMNS = 100


LINES_OF_A_FUNCTION = 83


ARGUMENTS = 8  # without self and cls


# of methods that replace one of torch's
SIGNATURES_OF_TORCH = {("multihead_attention.py", "forward")}


LINES_OF_MOST_FUNCTIONS = 48  # 95 of 100


NESTING = 4


LAYERS = 29  # of the import map


LINES_OF_THE_ARCHITECTURE = 160


Function = ast.FunctionDef | ast.AsyncFunctionDef


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return syntax_nodes(path.read_text())


@functools.cache
def functions(path: Path) -> list[Function]:
    return [node for node in nodes(path) if isinstance(node, Function)]


def comments(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """The line and text of each comment in which the pattern is found: strings that look like one
    are not one.
    """
    if not pattern.search(text := path.read_text()):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and pattern.search(token.string):
            yield token.start[0], token.string


def at(path: Path, node: ast.AST | int, what: str = "") -> str:
    line = node if isinstance(node, int) else node.lineno
    return f"{named(path)}:{line} {what}".rstrip()


def check_none(found: list[str]) -> None:
    """Nothing was found; else all of it is said, one a line."""
    assert not found, "\n" + "\n".join(found)


def modules() -> list[str]:
    """Every module of the package by its dotted name, except those that run when imported."""
    inside = [
        path.relative_to(SOURCE.parent).with_suffix("") for path in FILES if path.stem != "__main__"
    ]
    return [".".join(path.parts).removesuffix(".__init__") for path in inside]


def test_there_is_a_source():
    assert FILES, f"no Python file under {SOURCE}"


def test_files_are_short():
    check_none([named(p) for p in FILES if len(p.read_text().splitlines()) > LINES_OF_A_FILE])


def test_lines_are_short():
    wide = [
        at(path, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    check_none(wide)


def test_functions_are_short():
    long = [
        at(path, f, f"{f.name} has {f.end_lineno - f.lineno + 1} lines")
        for path in FILES
        for f in functions(path)
        if f.end_lineno - f.lineno + 1 > LINES_OF_A_FUNCTION
    ]
    check_none(long)


def percentile_95(numbers: list[int]) -> int:
    """The smallest number that at least 95 of 100 do not exceed."""
    return sorted(numbers)[-(-95 * len(numbers) // 100) - 1]


def test_most_functions_are_shorter():
    lengths = [f.end_lineno - f.lineno + 1 for path in FILES for f in functions(path)]
    assert percentile_95(lengths) <= LINES_OF_MOST_FUNCTIONS
    assert percentile_95([*range(1, 101)]) == 95


def test_the_import_map_has_few_layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = [layer for contract in contracts for layer in contract["layers"]]
    assert 1 < len(layers) <= LAYERS


def arguments(f: Function) -> list[str]:
    """The names a caller may fill, without the receiver."""
    inputs = [*f.args.posonlyargs, *f.args.args]
    positional = inputs[1:] if inputs and inputs[0].arg in ("self", "cls") else inputs
    return [argument.arg for argument in (*positional, *f.args.kwonlyargs)]


def test_functions_take_few_arguments():
    many = [
        at(path, f, f"{f.name} takes {len(arguments(f))} arguments")
        for path in FILES
        for f in functions(path)
        if len(arguments(f)) > ARGUMENTS and (path.name, f.name) not in SIGNATURES_OF_TORCH
    ]
    check_none(many)


NESTS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match)


def depth(node: ast.AST) -> int:
    """How many control statements stand inside each other; `elif` is no deeper than its `if`.

    A function or class inside starts again at zero: it is measured on its own.
    """
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        elif_branch = (
            isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        )
        deepest = max(deepest, depth(child) + (isinstance(child, NESTS) and not elif_branch))
    return deepest


def test_control_flow_is_flat():
    nests = ((path, f, depth(f)) for path in FILES for f in functions(path))
    deep = [
        at(path, f, f"{f.name} is {levels} deep") for path, f, levels in nests if levels > NESTING
    ]
    check_none(deep)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f():\n  return 1", 0),
        (
            "def f(x):\n  if x:\n    pass\n  elif 1:\n    pass\n  elif 2:\n    pass\n  else:\n    "
            "pass",
            1,
        ),
        ("def f(x):\n  for y in x:\n    if y:\n      while 1:\n        with y:\n          pass", 4),
        ("def f(x):\n  if x:\n    def g():\n      if x:\n        pass", 1),
    ],
)
def test_depth_counts_nested_control_flow(code: str, expected: int):
    assert depth(ast.parse(code).body[0]) == expected


# Participles, verbs alone and words without a thing: as the name of a module they tell no reader
# what is inside.
OPAQUE_NAME = re.compile(
    r"""
    told|held|heard|said|made|kept|known|given|gone|left|drawn|taken|around|along|anywhere|alike|apart|again|
    beside|within|together|every|few|thin|more|way|ways|telling|saying|sayings|speaking|reading|rereading|
    looking|asking|living|trying|passing|feeding|finding|keeping|hindering|watching|wording|running|opening|
    judging|learning|learned|gathering|arranging|measuring|weighing|rating|growing|thinning|texting|texts|
    sifting|normalising|composing|decomposing|decoding|answering|writing|marks|lessons|worths|claims|course|
    stepping|choosing|picking|filling|whole|nets|imagined|published|residues|folds|lines|rows|here|others|plain|
    fits|turns|story|lookup|smaller|sources|received|methods|words|page|pages|pieces|ends|wires|path|inside|
    portions|holding
    """,
    re.VERBOSE,
)


def test_modules_are_named_after_what_is_inside():
    check_none([named(path) for path in FILES if OPAQUE_NAME.fullmatch(path.stem)])


def test_opaque_names_are_found():
    names = ("told", "held", "holding", "withheld", "kv_cache", "path", "output_paths", "words")
    assert [name for name in names if OPAQUE_NAME.fullmatch(name)] == [
        *("told", "held", "holding", "path", "words"),
    ]


def test_no_module_name_stands_in_more_than_two_packages():
    stems = Counter(path.stem for path in FILES if path.stem not in ("__init__", "__main__"))
    check_none(
        [f"{stem}.py stands in {count} packages" for stem, count in stems.items() if count > 2]
    )


def without_a_place(package: Path) -> list[str]:
    """Modules and packages in this folder that its docstring, the map of the package, does not
    name.
    """
    named_words = set(
        re.findall(
            r"`(\w+)`", ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
        )
    )
    modules = [path.stem for path in package.glob("*.py") if not path.stem.startswith("__")]
    return sorted(
        {*modules, *(path.parent.name for path in package.glob("*/__init__.py"))} - named_words
    )


def test_every_package_has_a_map():
    """The docstring of a package names every module inside."""
    packages = [path.parent for path in FILES if path.stem == "__init__"]
    check_none(
        [f"{named(package)}: {name}" for package in packages for name in without_a_place(package)]
    )


def test_a_module_that_a_map_leaves_out_is_found(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    for name in ("rope.py", "kv_cache.py", "__main__.py", "inner/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "__init__.py").write_text('"""Parts: `rope` and kv_cache."""')
    assert without_a_place(tmp_path) == ["inner", "kv_cache"]


def test_no_check_is_silenced_without_a_reason():
    """`# noqa: RULE - why` and `# pyright: ignore[rule] - why`; `type: ignore` never."""
    never, silencing = r"type:\s*ignore", re.compile(r"type:\s*ignore|#\s*(ruff:\s*)?noqa|pyright:")
    excused = re.compile(
        r"(noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*|pyright: ignore\[[\w, ]+\]) +[-:(] *\w+ \w+"
    )
    silent = [
        at(path, line, text)
        for path in (*FILES, *TESTS)
        for line, text in comments(path, silencing)
        if re.search(never, text) or not excused.search(text)
    ]
    check_none(silent)


def test_nothing_is_left_to_do():
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    left = [at(p, line, text) for p in (*FILES, *TESTS) for line, text in comments(p, words)]
    check_none(left)


def calls(path: Path, *names: str) -> Iterator[ast.Call]:
    """Calls of these builtins, outside a module's own command: `main` and `if __name__ ==
    "__main__"`.
    """
    pending: list[ast.AST] = [
        node
        for node in nodes(path)[0].body
        if not (isinstance(node, Function) and node.name == "main")
    ]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node
        pending.extend(ast.iter_child_nodes(node))


def test_only_the_command_line_prints():
    rooms = ("cli", "__main__.py")
    quiet = [path for path in FILES if path.relative_to(SOURCE).parts[0] not in rooms]
    check_none([at(path, call) for path in quiet for call in calls(path, "print")])


def test_hasattr_is_not_used():
    check_none([at(path, call) for path in FILES for call in calls(path, "hasattr")])


def test_interfaces_name_their_arguments():
    """No method of an interface, a part or a backend takes **kwargs."""
    files = [
        path
        for path in FILES
        if path.relative_to(SOURCE).parts[:2]
        in (("attention", "interfaces"), ("attention", "parts"), ("attention", "backends"))
        and path.stem != "core_types"
    ]
    classes = [
        (path, cls) for path in files for cls in nodes(path) if isinstance(cls, ast.ClassDef)
    ]
    loose = [
        at(path, method, method.name)
        for path, cls in classes
        for method in cls.body
        if isinstance(method, Function) and method.args.kwarg
    ]
    check_none(loose)


def test_nothing_is_cached_behind_the_back_of_the_compiler():
    """lru_cache, cache and cached_property break torch.compile(fullgraph=True) under
    warnings-as-errors, so rooms that run in a layer do not use them.
    """
    banned = {"lru_cache", "cached_property", "cache"}
    outside = ("cli", "costs", "learn", "observe")  # hooks of observe run eagerly
    found = []
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] in outside:
            continue
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                found += [at(path, node, name.name) for name in node.names if name.name in banned]
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "functools":
                found += [at(path, node, node.attr)] if node.attr in banned else []
    check_none(found)


def test_no_path_of_one_machine():
    machine = re.compile(
        r"(?<![\w.])/(home|root|work|mnt|opt|tmp|Users|usr|var)/\w|[A-Z]:\\\\Users"
    )
    found = [
        at(path, number, line.strip())
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if machine.search(line)
    ]
    check_none(found)


REGISTERS = {"part", "named"}  # decorators that put a class into the registry


def registered(path: Path) -> set[str]:
    """Classes that a register decorates, called or bare."""
    found = set()
    for cls in nodes(path):
        if isinstance(cls, ast.ClassDef):
            marks = [
                mark.func if isinstance(mark, ast.Call) else mark for mark in cls.decorator_list
            ]
            if REGISTERS & {ast.unparse(mark).split(".")[-1] for mark in marks}:
                found.add(cls.name)
    return found


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Every name in the code and every identifier that is imported; strings and docstrings do not
    count.
    """
    for node in nodes(path):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_only_parts_backends_and_presets_name_a_part():
    inside = tuple(
        SOURCE / place
        for place in (
            "attention/parts",
            "attention/backends",
            "attention/presets.py",
            "attention/spec_builder.py",
            "models/families",
            "__init__.py",  # hands names on
        )
    )
    parts = set().union(
        *(registered(path) for path in (SOURCE / "attention" / "parts").rglob("*.py"))
    )
    outside = [p for p in FILES if not {p, *p.parents} & set(inside)]
    values = [
        at(path, line, name)
        for path in outside
        for line, name in identifiers(path)
        if name in parts
    ]
    check_none(values)


def test_every_public_name_has_a_docstring():
    import headwise

    public = {name: getattr(headwise, name) for name in getattr(headwise, "__all__", [])}
    described = (type, types.FunctionType, types.ModuleType)  # a constant cannot carry a docstring
    check_none(
        [
            name
            for name, thing in public.items()
            if isinstance(thing, described) and not thing.__doc__
        ]
    )


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str):
    """Every example in a docstring says what really comes out."""
    module = importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()) as recorded:
        result = doctest.testmod(
            module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
    assert result.failed == 0, recorded.getvalue()


def test_import_headwise_is_light():
    """Neither torch nor numpy comes in before something needs it."""
    code = "import sys, headwise; print(*{'torch', 'numpy', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def pages() -> list[Path]:
    found = (path for path in ROOT.rglob("*.md") if not OUTSIDE & set(path.relative_to(ROOT).parts))
    return sorted(found)


def anchors(page: Path) -> set[str]:
    """The fragment each heading of a page answers to."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(<?([^)\s>]+)>?(?: +\"[^\"]*\")?\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            fragment and target.suffix == ".md" and fragment not in anchors(target)
        ):
            broken.append(f"{named(page)}: {link}")
    return broken


def test_relative_links_resolve():
    check_none([link for page in pages() for link in broken_links(page)])


def test_the_architecture_is_read_in_one_sitting():
    assert (
        100
        < len((ROOT / "docs" / "architecture.md").read_text().splitlines())
        <= LINES_OF_THE_ARCHITECTURE
    )


def test_a_broken_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text(
        "# One two\n[x](b.md) [y](#one-two) [z](a.md#three) [w](https://example.org) `[v](c.md)`"
    )
    assert broken_links(page) == ["a.md: b.md", "a.md: a.md#three"]


def judges(node: ast.AST) -> bool:
    """An assert, a pytest.raises or .fail, a call whose name starts with check_ or assert_."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return last in ("raises", "fail") or last.startswith(("check_", "assert_"))


def test_folders_of_tests_mirror_the_packages():
    """Tests of src/headwise/attention/cache are in tests/attention/cache; eight folders concern more than one."""
    whole = {
        "anchors",
        "benchmarks",
        "contract",
        "crashes",
        "hostile",
        "house",
        "mutation",
        "support",
    }
    folders = {path.relative_to(ROOT / "tests").parent.as_posix() for path in TESTS} - whole - {"."}
    check_none(
        sorted(folder for folder in folders if not (SOURCE / folder / "__init__.py").is_file())
    )


def test_test_files_import_helpers_from_support():
    """A name imported from another test file ties the two together, and runs that file twice."""
    imported = re.compile(r"\s*(from|import) ([\w.]+\.)?test_\w+")
    lines = (
        (path, n, line) for path in TESTS for n, line in enumerate(path.read_text().splitlines(), 1)
    )
    check_none([at(path, n, line) for path, n, line in lines if imported.match(line)])


def test_every_test_asserts_something():
    silent = [
        at(path, f, f.name)
        for path in TESTS
        for f in functions(path)
        if f.name.startswith("test_") and not any(judges(node) for node in ast.walk(f))
    ]
    check_none(silent)


# --- the shape checker itself sees what it should ---


def pair(q_BTK, k_BSK, place_BT):
    return q_BTK, k_BSK, place_BT


def test_letters_are_read_off_names():
    assert [letters(n) for n in ("q_BTHK", "o_B1HV", "rows", "kv_down")] == ["BTHK", "B1HV", "", ""]


@pytest.mark.parametrize(
    ("shapes", "fault"),
    [
        (((3, 7, 5), (3, 11, 5), (1, 7)), ""),
        (((3, 7, 5), (3, 11, 4), (1, 7)), "K=4"),
        (((3, 7, 5), (3, 11, 5), (3, 6)), "T=6"),
        (((3, 7), (3, 11, 5), (3, 7)), "not one axis for each"),
    ],
)
def test_a_wrong_shape_is_caught(shapes, fault):
    tensors = [torch.zeros(shape) for shape in shapes]
    if not fault:
        assert with_shape_checks(pair)(*tensors) == tuple(tensors)
        return
    with pytest.raises(ShapeError, match=fault):
        with_shape_checks(pair)(*tensors)


def test_the_package_carries_its_shapes_in_names(request):
    if not request.config.getoption("--shapes"):
        pytest.skip("runs where shapes are checked")
    assert install_shape_checks() >= 0
    import headwise as hw

    with pytest.raises(ShapeError, match="q_BHTK"):
        hw.parts.DotProduct().scores(torch.zeros(2, 3), torch.zeros(2, 3, 5, 7), 1.0, None)
