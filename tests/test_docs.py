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
from headwise import costs
from headwise.nn import head_axis_ops, reference
from headwise.parts import REGISTRY
from support import layer_cases as cases

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {p.name: p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(p.read_text())}
VARIANT = "adding-a-variant.md"


@contextlib.contextmanager
def ran(page: Path) -> Iterator[ModuleType]:
    """A module made of the page's blocks, in order; the parts it adds are forgotten afterwards."""
    module = ModuleType("page_" + re.sub(r"\W", "_", page.stem))
    known = dict(REGISTRY)
    sys.modules[module.__name__] = module  # a dataclass looks its own module up
    text = page.read_text()
    try:
        for block in BLOCK.finditer(text):
            # Blank lines in front, so that an error names the line of the page.
            code = "\n" * text[: block.start(1)].count("\n") + block[1]
            exec(compile(code, str(page), "exec", dont_inherit=True), vars(module))
        yield module
    finally:
        for name in set(REGISTRY) - set(known):
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


def test_the_part_of_the_page_equals_the_reference(temperature: ModuleType):
    for spec in specs(temperature):
        layer = cases.layer(spec)
        x, z = cases.tensors(spec)
        for backend in cases.supporting_backends(spec):
            fast = cases.layer(spec, backend=backend)
            fast.load_state_dict(layer.state_dict())
            cases.check_close(fast(x, source=z), reference.reference_attention(layer, x, source=z))


def test_the_part_of_the_page_decodes(temperature: ModuleType):
    for spec in map(cases.as_causal, specs(temperature)):
        layer = cases.layer(spec)
        x, _ = cases.tensors(spec)
        cache = layer.cache(batch=cases.BATCH, capacity=cases.TOKENS)
        steps = [layer(x[:, t : t + 1], cache=cache) for t in range(cases.TOKENS)]
        cases.check_close(torch.cat(steps, 1), layer(x))


def test_the_part_of_the_page_is_pruned_exactly(temperature: ModuleType):
    for spec in specs(temperature):
        layer = cases.layer(spec)
        x, z = cases.tensors(spec)
        keep = [1, 4]
        loud = torch.zeros(len(spec.score_head_of_output), 1, dtype=x.dtype)
        loud[keep] = 1
        silenced = layer(x, source=z, probe=hw.Probe("heads", callback=lambda _, o, loud=loud: o * loud))
        small, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), keep)
        cut = hw.Attention(small).double()
        cut.load_state_dict(weights)
        cases.check_close(cut(x, source=z), silenced)
        assert weights["temperature.log"].shape == (2,)


def test_the_part_of_the_page_is_counted_and_serialized(temperature: ModuleType):
    for spec in specs(temperature):
        layer = hw.Attention(spec)
        assert costs.count_parameters(spec) == sum(p.numel() for p in layer.parameters())
        assert hw.from_toml(hw.to_toml(spec)) == spec
        assert hw.from_json(hw.to_json(spec)) == spec
        assert eval(repr(spec), vars(hw) | {"Temperature": temperature.Temperature}) == spec


def test_generated_pages_are_fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_docs

    stale = [page.name for page in build_docs.pages() if build_docs.generate(page) != page.read_text()]
    assert stale == []
