"""Hooks of mkdocs: pages of the repository's root become pages of the site, docstrings become
Markdown, and the pages of `headwise learn` are added.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section

ROOT = Path(__file__).resolve().parents[1]
# Files of the root by their name in the site. The READMEs are the first page in English and in
# Chinese.
ROOT_PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
COURSE = "course"  # folder of the pages of `headwise learn` in the site
COURSE_PAGES = {
    "Concepts": ("The five documents", "index.html"),
    "中文": ("五篇文档", "index.zh.html"),
}
DOCTEST = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]\[]+)\]\(([^)\s]+)\)")
INLINE_CODE = re.compile(r"<pre.*?</pre>|<code>[^<]*</code>", re.DOTALL)
OPTION = re.compile(r"--[a-z][\w-]*")


def on_config(config: Any) -> Any:
    """List every page of docs/findings in the navigation, the Chinese ones
    among the Chinese pages.
    """
    pages = sorted(f"findings/{path.name}" for path in (ROOT / "docs" / "findings").glob("*.md"))
    for section in config.nav:
        if "Findings" in section:
            section["Findings"] = [page for page in pages if not page.endswith(".zh.md")]
        if "中文" in section:
            section["中文"] += [page for page in pages if page.endswith(".zh.md")]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for source, target in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("docs/img/", "img/")
        files.append(File.generated(config, target, content=adapt_links(text)))
    return files


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Add the start pages of the documents, which `on_post_build` makes."""
    for section in nav.items:
        if isinstance(section, Section) and section.title in COURSE_PAGES:
            title, name = COURSE_PAGES[section.title]
            section.children.append(Link(title, f"{COURSE}/{name}"))
    return nav


def on_post_build(config: Any) -> None:
    """Run every entry of `headwise learn`, and write its pages in both languages as one folder
    that also works without a network.
    """
    from headwise.learn.catalogue import load_documents
    from headwise.learn.document_page import DocumentPages

    folder = Path(config.site_dir) / COURSE
    folder.mkdir(parents=True, exist_ok=True)
    pages = DocumentPages(load_documents(), "en")
    for _ in pages.write(folder, in_course=True):
        pass


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt links that lead out of docs/ to pages of the root."""
    return markdown if page.file.src_path in ROOT_PAGES.values() else adapt_links(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep the options of commands in sentences on one line."""
    return INLINE_CODE.sub(
        lambda match: match[0] if match[0].startswith("<pre") else keep_options(match[0]), html
    )


def keep_options(code: str) -> str:
    """Code of a sentence whose options browsers do not break after a hyphen.

    >>> keep_options("<code>demo --quick</code>")
    '<code>demo <span class="option">--quick</span></code>'
    """
    return OPTION.sub(r'<span class="option">\g<0></span>', code)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Mark Chinese pages as such, so that browsers choose Chinese fonts and screen readers a
    Chinese voice.
    """
    if not page.file.src_path.endswith(".zh.md"):
        return output
    return output.replace('<html lang="en"', '<html lang="zh-Hans"', 1).replace(
        "Table of contents", "目录"
    )


def adapt_links(text: str) -> str:
    """Links as the site needs them; those to files that are not pages become plain text.

    >>> adapt_links(
    ...     "[a](docs/heads.md#x) [b](../SECURITY.md) [c](examples/a.ipynb) [d](heads.md) [e](https://e.org)"
    ... )
    '[a](heads.md#x) [b](SECURITY.md) c [d](heads.md) [e](https://e.org)'
    """

    def adapt(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, mark, fragment = target.partition("#")
        name = path.removeprefix("../")
        if name in ROOT_PAGES:
            return f"[{words}]({ROOT_PAGES[name]}{mark}{fragment})"
        if path.startswith("docs/"):
            return f"[{words}]({path.removeprefix('docs/')}{mark}{fragment})"
        is_other_file = (
            not path.endswith((".md", ".svg", ".webp")) and ":" not in path and path != ""
        )
        return words if is_other_file else match[0]

    return LINK.sub(adapt, text)


class DoctestFences(griffe.Extension):
    """Puts the examples of docstrings into blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a loaded object."""
        if obj.docstring:
            obj.docstring.value = fence_examples(obj.docstring.value)


def fence_examples(docstring: str) -> str:
    """A docstring with each group of examples in a block of code.

    >>> fence_examples("Add.\\n\\n>>> 1 + 1\\n2")
    'Add.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    return DOCTEST.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```", docstring)
