"""The documentation site: every page is in it, links of the root are adapted, and it builds without
warnings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (ROOT / "mkdocs.yml").read_text("utf-8")


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w./-]+\.md", SETTINGS.partition("\nnav:\n")[2])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) - pages == {
        "index.md",
        "index.zh.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    }
    assert pages <= set(listed)


def test_the_site_builds_without_warnings(tmp_path: Path):
    mkdocs = Path(sys.executable).parent / "mkdocs"
    if not mkdocs.is_file():
        pytest.skip("mkdocs is not installed; make site installs it")
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [str(mkdocs), "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    front, api = (
        (tmp_path / "site" / name).read_text("utf-8") for name in ("index.html", "api.html")
    )
    assert 'href="heads.html"' in front
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre>.*?</pre>", "", api, flags=re.DOTALL)
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
    assert not re.search(r"(src|href)=\"https?://[^\"]*(googleapis|cdn|unpkg)", front)


@pytest.mark.parametrize(
    "name",
    [
        "README.zh-CN.md",
        *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.zh.md")),
    ],
)
def test_no_line_ends_between_two_chinese_characters(name: str):
    """Browsers show a line break as a space, which Chinese does not have."""
    text = re.sub(
        r"^```.*?^```", "", (ROOT / name).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    assert (
        re.findall(
            r".{0,9}[\u3001-\u303f\u4e00-\u9fff\uff00-\uffef]\n "
            r"*[\u3001-\u9fff\uff00-\uffef].{0,9}",
            text,
        )
        == []
    )
