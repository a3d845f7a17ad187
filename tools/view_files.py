"""Files of `headwise view`.

python tools/view_files.py sample [--run FOLDER]
    The bundled sample, in about six minutes on one core: trains a small encoder-decoder on the task
    dates (seeded, no data from elsewhere), measures and classifies its heads over held-out examples,
    traces one translation, and writes all of it to src/headwise/observe/sample. --run keeps the
    training run in a folder, from which a second call continues.
python tools/view_files.py screenshots
    The pictures of the page in docs/img, and those of the Chinese pages in docs/img/zh.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import headwise as hw
from headwise.models import Transformer
from headwise.observe.bundled_sample import FOLDER, MEASURES, MODEL, SOURCE, TRACE
from headwise.observe.head_analysis.annotated_examples import ExampleReader
from headwise.observe.head_analysis.word_alignment import AlignmentScores
from headwise.observe.traces import save_trace
from headwise.training import ConsoleLogger, Recipe, train
from headwise.training.data.date_translation import VOCABULARY, DateTranslation
from headwise.training.data.synthetic_task import ModelShape, make_small_translator
from headwise.util.files import write_atomically

# --- Sample --------------------------------------------------------------------------------------

TASK = DateTranslation(digits=8)
SHAPE = ModelShape(width=96, heads=6, layers=3, feed=256)
RECIPE = Recipe(
    steps=1600,
    batch=96,
    lr=3e-3,
    evaluate_every=400,
    checkpoint_every=400,
    precision="fp32",
    compile="off",
    rows="padded",
    attention="fused",
)
NUM_EXAMPLES = 256  # held-out examples over which the heads are measured
README = (
    "Translates dates and amounts of money between English, ISO notation and Chinese; made "
    "for headwise view."
)


def measure_sample(net: Transformer) -> hw.head_analysis.head_table.HeadTable:
    """Measures and classes of all heads over held-out examples with their known alignments."""
    reader = ExampleReader(net)
    reader.add_task_examples(TASK, NUM_EXAMPLES)
    table = hw.measure_heads(
        net,
        reader.examples_with_frequencies(),
        collectors=[AlignmentScores()],
        name="dates translator",
    )
    return hw.head_analysis.classify_heads(table)


def capture(net: Transformer) -> hw.Trace:
    """Trace of one translation, with values, so that the page can show what heads write."""
    target = hw.generate(net, SOURCE)
    print(f"{SOURCE} -> {target}")
    return hw.trace(
        net, {"source": SOURCE, "text": target}, capture=hw.Capture(extra=("v",))
    ).with_thumbnails()


def make_sample(argv: list[str]) -> int:
    """Train, measure_sample, trace, write."""
    parser = argparse.ArgumentParser(prog="view_files.py sample")
    parser.add_argument("--run", type=Path, help="folder of the training run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder = args.run or Path(tempfile.mkdtemp(prefix="view-sample-"))
    spec = make_small_translator("dates", len(VOCABULARY), SHAPE)
    result = train(TASK, spec, RECIPE, out=folder, resume="allowed", loggers=[ConsoleLogger()])
    print(f"exact match over held-out examples: {result.metrics['exact_match']:.1%}")
    net = result.net.eval()
    table, trace = measure_sample(net), capture(net)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    hw.save(net, MODEL, readme=README)
    save_trace(trace, TRACE, overwrite=True)
    data = {**table.data, "heads": [{"site": head.site, **head.data} for head in table.heads]}
    write_atomically(MEASURES, json.dumps(data, separators=(",", ":")).encode())
    for path in sorted(path for path in FOLDER.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size:10,} bytes  {path.relative_to(FOLDER)}")
    print(table)
    return 0


# --- Screenshots ---------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1280, 800
THEMES = ("light", "dark")
MAX_BYTES = 2_500_000  # of all pictures together
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
    Shot("similar", "similarity?site=6&head=1", ("Compare the heads",), ready="svg.plot"),
    Shot("lab", "lab?site=6&head=1", ("Ablate",), ready="[data-testid=check]"),
    Shot(
        "diff", "diff?site=7&head=1&with=ablated", ("Compare",), ready="[data-testid=diff-change]"
    ),
    Shot("points", "head?site=1&head=3&form=points&position=4", ready=".query-point"),
    Shot("prune", "prune?site=6&head=1", ready=".switch"),
    Shot("steps", "steps?site=3&head=4&position=9&key=2", ready=".step"),
    Shot("cost", "cost", ready="main table"),
    Shot("open", "open", ready="main table"),
    Shot("export", "head?site=6&head=1", key="e", ready=".drawer"),
)


CHINESE = "zh"  # the folder of the pictures in Chinese
CHINESE_LABELS = {"Compare the heads": "比较各头", "Ablate": "消融", "Compare": "比较"}


def chinese_pictures() -> set[str]:
    """The names of the pictures that the Chinese pages show."""
    pages = [ROOT / "README.zh-CN.md", *(ROOT / "docs").glob("*.zh.md")]
    text = "".join(page.read_text("utf-8") for page in pages)
    return set(re.findall(rf"img/{CHINESE}/([\w-]+\.webp)", text))


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
                page = open_page(browser, address, "en", theme)
                for shot in SHOTS:
                    yield take_picture(page, shot, folder / f"{shot.name}-{theme}.webp")
            with serve_sample() as address:
                page = open_page(browser, address, "zh-CN", theme)
                for shot in SHOTS:
                    name = f"{shot.name}-{theme}.webp"
                    labels = [CHINESE_LABELS[label] for label in shot.buttons]
                    if name in chinese_pictures():
                        translated = shot._replace(buttons=tuple(labels))
                        yield take_picture(page, translated, folder / CHINESE / name)
        browser.close()


def open_page(browser: Any, address: str, locale: str, theme: str) -> Any:
    """Open the page in the language of a locale and wait for the first screen."""
    page = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT}, locale=locale, color_scheme=theme
    ).new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(address)
    page.get_by_role("gridcell").first.wait_for()
    return page


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


def make_screenshots(argv: list[str]) -> int:
    """Write all pictures and print their sizes."""
    parser = argparse.ArgumentParser(prog="view_files.py screenshots")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", metavar="DIR")
    args = parser.parse_args(argv)
    (args.out / CHINESE).mkdir(parents=True, exist_ok=True)
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


# --- Command --------------------------------------------------------------------------------------

COMMANDS = {
    "sample": make_sample,
    "screenshots": make_screenshots,
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
