"""Writes docs/img: every screen of `headwise view` with the bundled sample, light and dark, as WebP
without loss.

    python tools/make_screenshots.py [--out docs/img]

It needs a built page (`make web`), Playwright, Debian's chromium, fonts with Chinese signs, and
Pillow.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1280, 800
THEMES = ("light", "dark")
MAX_BYTES = 2_000_000  # of all pictures together
WAIT_MS = 60_000
CHROMIUM = "chromium"


class Shot(NamedTuple):
    """One picture: its name, the address of the screen, labels of buttons to press, and a key to
    press at the end.
    """

    name: str
    address: str
    buttons: tuple[str, ...] = ()
    key: str = ""
    ready: str = "h1"  # an element that is there when the screen is complete


SHOTS = (
    Shot("map", "map?site=6&head=1"),
    Shot("head", "head?site=6&head=1&position=9"),
    Shot("lines", "head?site=6&head=1&form=lines"),
    Shot("text", "text?site=6&head=1&position=9", ready=".chip"),
    Shot("class", "classify?site=1&head=2"),
    Shot("similar", "similarity?site=6&head=1", ready="svg.plot"),
    Shot(
        "lab", "lab?site=6&head=1", ("Ablate", "Compute the effect"), ready="[data-testid=effect]"
    ),
    Shot(
        "diff", "diff?site=7&head=1&with=ablated", ("Compare",), ready="[data-testid=diff-change]"
    ),
    Shot("points", "head?site=1&head=3&form=points&position=4", ready=".query-point"),
    Shot("prune", "prune?site=6&head=1", ready=".switch"),
    Shot("steps", "steps?site=3&head=4&position=9&key=2", ready=".step"),
    Shot("cost", "cost", ("Compute the cost",), ready="main table"),
    Shot("open", "open", ready="main table"),
    Shot("export", "head?site=6&head=1", key="e", ready=".drawer"),
)


@contextmanager
def serve_sample() -> Iterator[str]:
    """Serve the bundled sample in a thread; gives the address."""
    from headwise.viewer.server import serve
    from headwise.viewer.view import Target, open_target

    started, addresses = threading.Event(), list[str]()

    def on_start(address: Any) -> None:
        addresses.append(address.url)
        started.set()

    opened = open_target(Target())
    threading.Thread(
        target=serve, args=(opened,), kwargs={"on_start": on_start}, daemon=True
    ).start()
    if not started.wait(30):
        raise SystemExit("the server did not start; run `headwise view` to see why")
    yield addresses[0]


def take_pictures(folder: Path) -> Iterator[Path]:
    """Write every picture and yield its path."""
    from playwright.sync_api import sync_playwright

    check_fonts()
    path = shutil.which(CHROMIUM)
    if path is None:
        raise SystemExit(
            f"there is no {CHROMIUM}; install it with: sudo apt-get install -y chromium"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for theme in THEMES:
            with serve_sample() as address:  # of its own, because the Lab changes what is open
                page = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT}, locale="en", color_scheme=theme
                ).new_page()
                page.set_default_timeout(WAIT_MS)
                page.goto(address)
                page.get_by_role("gridcell").first.wait_for()
                for shot in SHOTS:
                    yield take_picture(page, shot, folder / f"{shot.name}-{theme}.webp")
        browser.close()


def check_fonts() -> None:
    """Stop where no font has the Chinese tokens of the sample, which would be shown as boxes."""
    fonts = subprocess.run(
        ["fc-list", ":lang=zh"], capture_output=True, text=True, check=True
    ).stdout
    if not fonts.strip():
        raise SystemExit(
            "no font has Chinese signs; install one with: sudo apt-get install -y fonts-noto-cjk"
        )


def take_picture(page: Any, shot: Shot, path: Path) -> Path:
    """Open a screen, do what the shot asks for, and write the picture."""
    page.mouse.move(0, 0)
    page.evaluate("address => { location.hash = address; scrollTo(0, 0); }", f"#/{shot.address}")
    page.locator("h1").first.wait_for()
    for label in shot.buttons:
        page.get_by_role("button", name=label).first.click()
    if shot.key:
        page.keyboard.press(shot.key)
    page.locator(shot.ready).first.wait_for()
    while page.locator(".jobs .note:not(.bad)").count():
        page.wait_for_timeout(100)
    page.wait_for_timeout(400)  # canvases are drawn in the next frames
    write_webp(page.screenshot(animations="disabled"), path)
    if shot.key:
        page.keyboard.press("Escape")
    return path


def write_webp(screenshot: bytes, path: Path) -> None:
    """Write a PNG as WebP without loss, which makes a picture of a page a third as large."""
    from PIL import Image

    Image.open(io.BytesIO(screenshot)).convert("RGB").save(
        path, lossless=True, quality=100, method=6
    )


def main(argv: list[str] | None = None) -> int:
    """Write all pictures and print their sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", metavar="DIR")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    total = 0
    for path in take_pictures(args.out):
        total += path.stat().st_size
        print(f"{path.stat().st_size / 1000:8.1f} kB  {path.name}")
    print(f"{total / 1000:8.1f} kB in all")
    if total > MAX_BYTES:
        print(
            f"the pictures are larger than {MAX_BYTES / 1e6:g} MB; take fewer, or smaller ones",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
