"""What the start page explains: how to read the pages, the words, and the tasks of the studies."""

from __future__ import annotations

import re

import pytest

from headwise.learn.catalogue import load_documents, read_toml
from headwise.learn.document_page import DocumentPages
from headwise.learn.document_sections import load_words
from headwise.learn.stored_findings import read_stored

CHINESE = re.compile("[\u4e00-\u9fff]")


@pytest.mark.parametrize("kind", ["guide", "word"])
def test_a_term_is_explained_in_both_languages(kind: str):
    words = load_words(kind)
    names = [name.en for name, _ in words]
    assert len(set(names)) == len(names) >= 6
    for name, text in words:
        assert CHINESE.search(text.zh), name.en
        assert not CHINESE.search(text.en), name.en


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_start_page_explains_them(language: str):
    text = DocumentPages(load_documents(["004"]), language).render_start()
    for kind in ("guide", "word"):
        for name, _ in load_words(kind):
            assert f"<dt>{name.zh if language == 'zh' else name.en}</dt>" in text


def test_every_task_of_a_stored_study_is_explained():
    tasks = {task for study in read_stored("studies").values() for task in study["tasks"]}
    assert {task.partition("-")[0] for task in tasks} <= {*read_toml("reading_guide")["tasks"]}
