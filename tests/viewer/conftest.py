"""The browser and the page that the tests of the page share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from viewer.page_browser import require_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One chromium for all tests. The event loop of Playwright runs in this thread from then on."""
    path = require_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        assert int(started.version.split(".")[0]) >= 120, started.version
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose console must stay empty."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en")
    opened = context.new_page()
    messages: list[str] = []
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.on("dialog", lambda dialog: messages.append(dialog.message))
    opened.set_default_timeout(20_000)
    yield opened
    context.close()
    # a test ends its server while the page may still ask it for something, and a request may come
    # after another text was opened
    allowed = ("ERR_CONNECTION_REFUSED", "409 (Conflict)")
    assert [text for text in messages if not any(part in text for part in allowed)] == []
