"""The Map and the Head screen with large models and long texts: what is drawn, and how long it
takes.

Times are printed (run pytest with -s), not asserted, because they are those of the machine.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from headwise.observe import bundled_sample
from headwise.viewer.lab_actions import sweep_heads
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from viewer.large_traces import make_large_trace, make_table
from viewer.page_browser import served, settled_box, wait_until

FRAMES = """async (kind) => {
  const cells = [...document.querySelectorAll('[role=gridcell]')], scroller = document.querySelector('.grid-scroll');
  const times = [];
  let last = await new Promise(requestAnimationFrame);
  for (let n = 0; n < 40; n++) {
    const key = n % 2 ? 'ArrowRight' : 'ArrowLeft', step = n < 20 ? 40 : -40, cell = cells[(n * 7) % cells.length];
    if (kind === 'keys') window.dispatchEvent(new KeyboardEvent('keydown', { key }));
    if (kind === 'scroll') { window.scrollBy(0, step); scroller.scrollLeft += step / 2; }
    if (kind === 'hover') cell.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
  }
  times.sort((a, b) => a - b);
  return [times[20], times[36]].map((time) => Math.round(time * 10) / 10);
}"""


# Walks a selection by keys. Returns what was drawn on the canvases of the Map, and how many
# elements have changed.
WALK = """async (count) => {
  const drawn = [], changed = new Set();
  const names = ['putImageData', 'drawImage', 'fillRect', 'strokeRect', 'fillText', 'clearRect'];
  for (const name of names) {
    const draw = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...rest) {
      if (this.canvas.closest?.('.band')) drawn.push(name);
      return draw.apply(this, rest);
    };
  }
  const watch = new MutationObserver((list) => {
    for (const one of list) for (const node of [one.target, ...one.addedNodes]) changed.add(node);
  });
  const where = document.querySelector('.grid, .switches, table.data');
  watch.observe(where, { subtree: true, childList: true, attributes: true, characterData: true });
  for (let n = 0; n < count; n++) {
    dispatchEvent(new KeyboardEvent('keydown', { key: n % 4 ? 'ArrowRight' : 'ArrowDown', cancelable: true }));
    await new Promise(requestAnimationFrame);
  }
  await new Promise((done) => setTimeout(done, 100));
  return { drawn: drawn.length, changed: changed.size, nodes: document.querySelectorAll('*').length };
}"""

# Reads a copy of a canvas, because one that is read twice is moved off the GPU, which the console
# reports.
READ_PIXELS = """(canvas, place) => {
  const [x, y, w, h] = place.map(Math.round), copy = new OffscreenCanvas(w, h);
  const c = copy.getContext('2d', { willReadFrequently: true });
  c.drawImage(canvas, x, y, w, h, 0, 0, w, h);
  return [w, ...c.getImageData(0, 0, w, h).data];
}"""
# Moves the pointer over the matrix and waits until the exact number has changed; times in
# milliseconds.
HOVER = """async () => {
  const matrix = document.querySelector('.matrix-canvas'), area = matrix.getBoundingClientRect();
  const exact = document.querySelector('[data-testid=exact]'), times = [];
  for (let n = 1; n < 20; n++) {
    const begin = performance.now(), last = exact.textContent;
    const at = { clientX: area.left + area.width * n / 42, clientY: area.top + area.height * n / 21, bubbles: true };
    matrix.dispatchEvent(new PointerEvent('pointermove', at));
    const isNew = () => exact.textContent !== last && /\\d$/.test(exact.textContent);
    const isOpen = () => !isNew() && performance.now() - begin < 5000;
    while (isOpen()) await new Promise((done) => setTimeout(done, 1));
    times.push(performance.now() - begin);
  }
  times.sort((a, b) => a - b);
  return [times[9], times[18]].map((time) => Math.round(time * 10) / 10);
}"""


def report(**figures: Any) -> None:
    print(json.dumps(figures))


class WorkMeter:
    """Processor time of the page's main thread, which other programs on the machine do not change
    much.
    """

    def __init__(self, page: Any) -> None:
        self.session = page.context.new_cdp_session(page)
        self.session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read_ms(self) -> float:
        """Milliseconds so far."""
        metrics = {
            item["name"]: item["value"]
            for item in self.session.send("Performance.getMetrics")["metrics"]
        }
        return metrics["TaskDuration"] * 1000


def open_map(page: Any, url: str, query: str = "") -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    if query:
        page.evaluate(f"location.hash = '#/map?{query}'")
    wait_until(
        page, "[...document.querySelectorAll('.band > canvas')].some((canvas) => canvas.width > 1)"
    )
    page.wait_for_timeout(150)


def cell_pixels(page: Any, name: str) -> np.ndarray:
    """The pixels of the canvas under a cell, [height, width, 3]."""
    flat = page.evaluate(
        f"""(name) => {{
          const cell = document.querySelector(`[role=gridcell][aria-label^="${{name}}"]`);
          const canvas = cell.closest('.band').querySelector('canvas');
          const [a, b] = [cell.getBoundingClientRect(), canvas.getBoundingClientRect()];
          return ({READ_PIXELS})(canvas, [a.left - b.left, a.top - b.top, a.width, a.height]);
        }}""",
        name,
    )
    return np.array(flat[1:]).reshape(-1, flat[0], 4)[:, :, :3]


def colour(page: Any, name: str) -> list[int]:
    text = page.evaluate(
        f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()"
    )
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


# --- the Map --------------------------------------------------------------------------------------


def test_a_map_of_a_thousand_heads_is_drawn_on_few_canvases(page: Any):
    trace = make_large_trace(32, 32, 24)
    with served(OpenModel(trace, table=make_table(trace))) as url:
        open_map(page, url)
        assert page.get_by_role("gridcell").count() == 1024
        assert page.locator("[role=gridcell] canvas").count() == 0
        assert page.locator("canvas").count() <= 10
        page.wait_for_timeout(1000)
        meter = WorkMeter(page)
        for kind in ("keys", "scroll", "hover"):
            begin = meter.read_ms()
            median, slow = page.evaluate(FRAMES, kind)
            work = round((meter.read_ms() - begin) / 40, 1)
            report(
                heads=1024, kind=kind, median_ms=median, ninetieth_percentile_ms=slow, work_ms=work
            )
        found = page.evaluate(WALK, 16)
        assert found["drawn"] == 0  # the selection is a style of the cells above the canvases
        assert found["changed"] <= 2 * 17
        assert found["nodes"] <= 2000


def test_pruned_ablated_and_grouped_heads_are_marked(page: Any):
    trace = make_large_trace(2, 6, 12, kv_heads=2)
    opened = OpenModel(trace, pruned={"layers.1.attention": [0, 3]})
    with served(opened) as url:
        open_map(page, url, "theme=light")
        plain = cell_pixels(page, "L0 H4")
        assert page.locator(".grid-row").nth(0).locator(".cell-gap").count() == 0
        order = (
            page.locator(".grid-row")
            .nth(1)
            .locator(".cell, .cell-gap")
            .evaluate_all("(cells) => cells.map((cell) => cell.dataset.head ?? 'gap')")
        )
        assert order == ["gap", "1.0", "1.1", "gap", "1.2", "1.3", "1.4", "1.5"]
        label = page.get_by_role("gridcell").nth(6 + 2).get_attribute("aria-label")
        assert "H4 before pruning" in label
        assert "shares key-value head 0" in label
        canvas = "document.querySelector('.band > canvas')"
        bracket = page.evaluate(f"({READ_PIXELS})({canvas}, [0, 2, {canvas}.width, 1])")[4::4]
        runs = np.flatnonzero(np.diff(np.array([0, *(np.array(bracket) > 0), 0]))).reshape(-1, 2)
        assert len(runs) == 2
    with served(opened) as url:
        open_map(page, url, "theme=light&off=0.4")
        struck = cell_pixels(page, "L0 H4")
        assert "ablated" in page.get_by_role("gridcell").nth(4).get_attribute("aria-label")
        height, width = struck.shape[:2]
        rows = np.arange(20, 60)
        diagonal = struck[rows, width * (height - rows) // height]
        assert struck.mean() > plain.mean()  # paler
        assert diagonal.mean() < 160


def test_one_cell_of_the_grid_takes_the_focus_and_arrows_walk_as_shown(page: Any):
    trace = make_large_trace(4, 8, 12)
    table = make_table(trace)
    with served(OpenModel(trace, table=table)) as url:
        open_map(page, url, "sort=entropy")
        first = sorted(range(8), key=lambda head: -table.heads[head].measures["entropy"].value)
        page.get_by_role("gridcell").first.click()
        assert page.locator(".head-name").inner_text() == f"L0 H{first[0]}"
        assert page.locator("[role=gridcell][tabindex='0']").count() == 1
        page.locator("[role=gridcell][tabindex='0']").focus()
        page.keyboard.press("ArrowRight")
        wait_until(page, f"document.querySelector('.head-name').textContent === 'L0 H{first[1]}'")
        wait_until(
            page, f"document.activeElement.getAttribute('aria-label').startsWith('L0 H{first[1]}')"
        )
        page.keyboard.press("End")
        wait_until(
            page, f"document.activeElement.getAttribute('aria-label').startsWith('L0 H{first[7]}')"
        )
        page.keyboard.press("ArrowDown")
        wait_until(page, "document.activeElement.getAttribute('aria-label').startsWith('L1 ')")
        assert page.get_by_role("grid").get_attribute("aria-rowcount") == "4"
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Head L1").wait_for()


def test_the_scatter_selects_and_dims_heads(page: Any):
    trace = make_large_trace(2, 8, 12)
    table = make_table(trace)
    with served(OpenModel(trace, table=table)) as url:
        open_map(page, url, "x=entropy&y=sink")
        plot = page.get_by_role("img", name="Scatter of 16 heads: entropy across, sink up")
        plot.scroll_into_view_if_needed()
        box = settled_box(plot)
        values = np.array(
            [[head.measures[name].value for name in ("entropy", "sink")] for head in table.heads]
        )
        x, y = values[5] / values.max(0)
        page.mouse.click(box["x"] + 44 + x * (box["width"] - 58), box["y"] + 224 - y * 202)
        wait_until(page, "document.querySelector('.head-name').textContent === 'L0 H5'")
        page.mouse.move(box["x"] + 44, box["y"] + 22)
        page.mouse.down()
        page.mouse.move(box["x"] + 44 + (box["width"] - 58) / 2, box["y"] + 230)
        page.mouse.up()
        count = int((values[:, 0] <= values[:, 0].max() / 2).sum())
        page.get_by_text(f"{count} heads chosen").wait_for()
        page.get_by_role("button", name="Show all").click()
        page.get_by_text("Drag to choose heads").wait_for()
        page.get_by_label("colour").select_option("importance")
        wait_until(page, "location.hash.includes('color=importance')")
        assert "chosen=" not in page.url


# --- the Head screen ------------------------------------------------------------------------------


def open_head(page: Any, url: str, query: str = "") -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '#/head?{query}'")
    wait_until(page, "document.querySelector('.matrix-canvas:not(.draft) canvas')?.width > 1")


def point(page: Any, across: float, down: float) -> None:
    box = settled_box(page.locator(".matrix-canvas canvas"))
    page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])


EXACT = "document.querySelector('[data-testid=exact] b')?.textContent"


def test_a_long_head_opens_at_once_and_answers_exactly(page: Any):
    opened = OpenModel(make_large_trace(1, 2, 4096))
    opened.thumbnails()
    weights = opened.get_trace().head_weights("layers.0.attention", 1)
    with served(opened) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.wait_for_timeout(300)
        begin = time.monotonic()
        page.evaluate("location.hash = '#/head?head=1&scale=lin'")
        wait_until(page, "document.querySelector('.matrix-canvas canvas')?.width > 1")
        draft = time.monotonic() - begin
        wait_until(
            page, "document.querySelector('.matrix-canvas:not(.draft) canvas')?.width >= 512"
        )
        report(tokens=4096, draft_s=round(draft, 2), exact_s=round(time.monotonic() - begin, 2))
        page.get_by_role("img", name="entropy of each row").wait_for()
        median, slowest = page.evaluate(HOVER)
        report(tokens=4096, hover_median_ms=median, hover_slowest_ms=slowest)
        for cell in (100, 300):
            rows, columns = slice(cell * 8, cell * 8 + 8), slice((cell - 3) * 8, (cell - 2) * 8)
            point(page, (cell - 2.5) / 512, (cell + 0.5) / 512)
            expected = f"{weights[rows, columns].max():.6}"
            wait_until(page, f"Math.abs({EXACT} - {expected}) <= 2e-5 * {expected}")
            query, key = np.unravel_index(weights[rows, columns].argmax(), (8, 8))
            words = f"w{rows.start + query} → key ␣w{columns.start + key}"
            assert words in page.get_by_test_id("exact").inner_text()


def test_a_model_of_images_shows_its_weights_over_the_patches(page: Any):
    trace = make_large_trace(1, 2, 17, causal=False)
    opened = OpenModel(type(trace)(trace.model, {}, trace.layers))
    with served(opened) as url:
        open_head(page, url)
        page.get_by_role("heading", name="Patches").wait_for()
        page.get_by_text("This trace holds no image").wait_for()
        point(page, 0.5 / 17, 6.5 / 17)
        page.get_by_text("4 × 4 patches in reading order").wait_for()
        assert page.locator(".minimap canvas").count() == 1


def test_the_importance_of_heads_is_computed_when_it_is_asked_for(page: Any):
    opened = OpenModel(
        bundled_sample.load_sample_trace(),
        load_model=bundled_sample.load_sample_model,
        table=bundled_sample.load_sample_table(),
    )
    with served(opened) as url:
        open_map(page, url)
        page.get_by_role("button", name="Importance").click()
        page.get_by_text("importance, 0.00 to").wait_for(timeout=60_000)
        changes = sweep_heads(opened, {}, JobProgress(Job("sweep", {})))["heads"]
        most = max(changes, key=lambda change: change[2])
        number = opened.heads.index((opened.site_name(most[0]), most[1]))
        label = page.get_by_role("gridcell").nth(number).get_attribute("aria-label")
        assert float(label.split()[-1]) == pytest.approx(most[2], rel=0.02)
        assert page.get_by_label("colour").locator("option", has_text="importance").count() == 1
