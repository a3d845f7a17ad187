"""`Slider`: inputs that a reader of the pages moves, beside an entry, and the values that follow.
The texts are in `sliders.toml`; `slider_values` has the start values, and the script of the pages
all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .catalogue import Text, read_text, read_toml
from .slider_values import Output, find_computation

SCRIPT = Path(__file__).parents[1] / "viewer" / "static" / "learn.js"


@dataclass(frozen=True)
class Slider:
    """A slider beside an entry. `inputs` and `pictures` are as in `sliders.toml`; `outputs` are the
    names of the values, `errors` the messages for a text that cannot be read.
    """

    id: str
    entry: str
    title: Text
    text: Text
    inputs: tuple[Mapping[str, Any], ...]
    outputs: Mapping[str, Text]
    pictures: tuple[str, ...]
    labels: tuple[str, ...]
    errors: Mapping[str, Text]

    def start_outputs(self, language: str) -> Mapping[str, Output]:
        """The values at the start of all inputs."""
        starts = {
            field["name"]: field["text"][language] if "text" in field else field["start"]
            for field in self.inputs
        }
        return find_computation(self.id)(**starts)

    def tabulate(
        self, picture: str, outputs: Mapping[str, Any], names: Mapping[str, str]
    ) -> list[list[str]]:
        """Return the cells of the table of bars or of a matrix: heads of the columns, then each
        list with its title before it; no cells for a curve.
        """
        kind, listed, *_ = picture.split(" ")
        if kind not in ("bars", "matrix"):
            return []
        titles = [names[name] for name in listed.split(",")]
        rows = [outputs[name] for name in listed.split(",")]
        rows = rows if kind == "bars" else rows[0]
        heads = list(outputs.get("labels", self.labels))
        heads = heads or [str(n + 1) for n in range(len(rows[0]))]
        titles = titles if kind == "bars" else heads
        lines = zip(titles, rows, strict=False)  # a matrix may have fewer rows than columns
        return [["", *heads], *([title, *map(format_output, row)] for title, row in lines)]


@cache
def load_sliders() -> tuple[Slider, ...]:
    """Return all sliders, in the order of their documents."""
    return tuple(
        Slider(
            table["id"],
            table["entry"],
            read_text(table["title"]),
            read_text(table["text"]),
            tuple(table["inputs"]),
            {output["name"]: read_text(output) for output in table["outputs"]},
            tuple(table["pictures"]),
            tuple(table.get("labels", ())),
            {name: read_text(text) for name, text in table.get("errors", {}).items()},
        )
        for table in read_toml("sliders")["slider"]
    )


def format_output(output: Any) -> str:
    """A value as the script of the page prints it.

    >>> format_output(4096.0), format_output(0.123456), format_output([0.00001, 1])
    ('4,096', '0.1235', '1.00e-5  1')
    """
    if isinstance(output, list | tuple):
        return "  ".join(map(format_output, output))
    whole = round(output)
    is_whole = abs(output - whole) < 1e-9 and (whole != 0 or output == 0)
    if abs(output) >= 1000 or is_whole:
        return f"{whole:,}"
    if abs(output) < 1e-4:
        mantissa, _, exponent = f"{output:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{output:.4g}"


def read_script() -> str:
    """Return the script of the pages; "" if it has not been built."""
    return SCRIPT.read_text(encoding="utf-8") if SCRIPT.is_file() else ""
