"""The bundled sample: a small trained translator of dates and amounts, one trace of it, and the
measures of its heads.

`tools/view_files.py sample` makes the files. The trace and the measures are read without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..util.errors import SpecError
from .head_analysis.head_table import HeadClass, HeadMeasures, HeadTable, Measure, order_classes
from .traces import Trace, load_trace

if TYPE_CHECKING:
    from ..models import Transformer

FOLDER = Path(__file__).with_name("sample")
MODEL = FOLDER / "model"
TRACE = FOLDER / "sample.trace"
MEASURES = FOLDER / "measures.json"
PLACE = ("stack", "kind", "layer", "head", "kv", "site")
SOURCE = "<zh>12,345,678.90 dollars"  # the tag names the target language
TEXTS = (  # sources with their targets
    "<zh>12,345,678.90 dollars\t一千二百三十四万五千六百七十八美元九十美分",
    "<en>二〇九九年四月二日\t2 April 2099",
    "<zh>1983-01-12\t一九八三年一月十二日",
    "<zh>EUR 50000530.88\t五千万零五百三十欧元八十八欧分",
    "<en>1905-08-21\t21 August 1905",
    "<iso>20 January 2001\t2001-01-20",
    "<zh>494,245.63 yuan\t四十九万四千二百四十五元六角三分",
    "<iso>一九二三年八月二十日\t1923-08-20",
    "<iso>八百零六美元\tUSD 806.00",
    "<en>二〇八八年五月十四日\t14 May 2088",
)


def load_sample_trace() -> Trace:
    """The trace of the sample: the translator writes an amount of money in Chinese.

    >>> trace = load_sample_trace()
    >>> "".join(trace.streams["source"][0].words)
    '<zh>12,345,678.90 dollars'
    """
    return load_trace(TRACE)


def load_sample_model() -> Transformer:
    """The translator of the sample, in eval mode."""
    from ..hub.pretrained_models import load

    return load(MODEL)


def load_sample_table() -> HeadTable:
    """The measures and classes of all heads of the sample, over held-out examples.

    >>> table = load_sample_table()
    >>> sorted(table.sites) == sorted(layer.name for layer in load_sample_trace().layers)
    True
    """
    try:
        return table_from_data(json.loads(MEASURES.read_text(encoding="utf-8")))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SpecError(f"{MEASURES} cannot be read: {error}; install headwise again") from None


def table_from_data(data: Mapping[str, Any]) -> HeadTable:
    """The head table that `HeadTable.data` described; each head also has the name of its site."""
    heads: list[HeadMeasures] = []
    for head in data["heads"]:
        measures: dict[str, Measure] = {}
        for name, one in head["measures"].items():
            values = {key: math.nan if value is None else value for key, value in one.items()}
            measures[name] = Measure(**values)
        classes = order_classes(HeadClass(**head_class) for head_class in head["classes"])
        place = {name: head[name] for name in PLACE}
        heads.append(HeadMeasures(**place, measures=measures, classes=classes))
    return HeadTable(data["model"], data["data"], tuple(heads), tuple(data["notes"]))
