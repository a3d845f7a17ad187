"""Every Python block of the documentation runs, and the part of one page keeps the contract."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise as hw
from headwise.nn import head_axis_ops
from headwise.parts import REGISTRY
from support import layer_cases as cases

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {p.name: p for p in sorted((ROOT / "docs").glob("*.md")) if BLOCK.search(p.read_text())}
VARIANT = "adding-a-variant.md"


@contextlib.contextmanager
def ran(page: Path) -> Iterator[ModuleType]:
    """A module made of the page's blocks, in order; the parts it adds are forgotten afterwards."""
    module = ModuleType("page_" + re.sub(r"\W", "_", page.stem))
    registered = dict(REGISTRY)
    sys.modules[module.__name__] = module  # a dataclass looks its own module up
    text = page.read_text()
    try:
        for block in BLOCK.finditer(text):
            # Blank lines in front, so that an error names the line of the page.
            code = "\n" * text[: block.start(1)].count("\n") + block[1]
            exec(compile(code, str(page), "exec", dont_inherit=True), vars(module))
        yield module
    finally:
        for name in set(REGISTRY) - set(registered):
            del REGISTRY[name]
            vars(hw).pop(name, None)
        del sys.modules[module.__name__]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_runs(name: str):
    before = set(REGISTRY)
    with contextlib.redirect_stdout(io.StringIO()), ran(PAGES[name]) as module:
        assert vars(module)
    assert set(REGISTRY) == before


@pytest.fixture
def temperature() -> Iterator[ModuleType]:
    """The part that the page adds."""
    with ran(PAGES[VARIANT]) as module:
        yield module


def specs(module: ModuleType) -> list[hw.AttentionSpec]:
    found = list(module.Temperature.examples(cases.base))
    assert found
    return found


def test_its_docstring_is_true(temperature: ModuleType):
    source = next(BLOCK.finditer(PAGES[VARIANT].read_text()))[1]
    checks = [
        test for test in doctest.DocTestFinder().find(temperature.Temperature, globs=vars(temperature)) if test.examples
    ]
    assert checks
    assert all(line.want in source for test in checks for line in test.examples)
    runner = doctest.DocTestRunner(verbose=False)
    assert sum(runner.run(test).failed for test in checks) == 0


def test_the_report_of_the_page_is_the_one_it_prints(temperature: ModuleType):
    """All but the errors, which are rounding, and the exact number of comparisons of each check."""
    shown = re.search(r"^```text\n(Temperature\(\): .*?)\n```", PAGES[VARIANT].read_text(), re.DOTALL | re.MULTILINE)
    assert shown is not None
    errors = re.compile(r" +\d\.\de[+-]\d\d")
    assert errors.sub("", shown[1]) == errors.sub("", str(temperature.report))


def test_the_part_of_the_page_is_pruned_and_printed(temperature: ModuleType):
    for spec in specs(temperature):
        layer = cases.layer(spec)
        _, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), [1, 4])
        torch.testing.assert_close(weights["temperature.log"], layer.state_dict()["temperature.log"][[1, 4]])
        assert eval(repr(spec), vars(hw) | {"Temperature": temperature.Temperature}) == spec


CHINESE = [path.name for path in sorted((ROOT / "docs").glob("*.zh.md"))]


@pytest.mark.parametrize("name", CHINESE)
def test_both_languages_have_the_same_sections_pictures_and_commands(name: str):
    """Headings by level, names of pictures and generated parts, and entries of `headwise learn`, in their order."""
    structure = re.compile(r"^#+ |\]\(img/[^)]+|<!-- generated: [a-z0-9-]+|`headwise learn [C\d][^`]+`", re.MULTILINE)
    texts = [(ROOT / "docs" / page).read_text("utf-8") for page in (name, name.replace(".zh.md", ".md"))]
    chinese, english = (structure.findall(text) for text in texts)
    assert len(english) > 3
    assert [found.removesuffix("-zh") for found in chinese] == english
