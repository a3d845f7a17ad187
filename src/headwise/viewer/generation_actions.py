"""The job that continues the open text, and shows the weights of every decode step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .lab_runs import open_inputs
from .model_actions import check_token_counts, read_text
from .model_worker import JobProgress
from .open_model import CAPTURE_BUDGET, OpenModel

MAX_NEW_TOKENS = 64


def generate_text(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Continue `text` (the open text by default) by `count` tokens of greedy decoding, and show the new trace.

    Returns the position of the first new token `first` and the number of new tokens `count`.
    """
    from ..head_analysis.objectives import detect_head_objective
    from ..inspect.model_inputs import prepare_inputs
    from ..inspect.trace_capture import Capture, trace

    net, count, text = model.get_model(), arguments.get("count", 16), read_text(arguments, "text")
    if type(count) is not int or not 1 <= count <= MAX_NEW_TOKENS:
        raise ValueError(f"count={count!r} is no number of tokens to generate; give 1 to {MAX_NEW_TOKENS}")
    if detect_head_objective(net) != "next-token":
        raise ValueError("only a decoder that predicts next tokens can continue a text; open such a model")
    inputs: Any = [text] if text.strip() else dict(open_inputs(model).kwargs)
    first = (prepare_inputs(net, inputs, count).token_counts or {}).get("text", 0)
    check_token_counts({"text": first + count}, model.max_tokens)
    progress(0, 2, "generating one token" if count == 1 else f"generating {count} tokens")
    captured = trace(
        net,
        inputs,
        max_new_tokens=count,
        capture=Capture(extra=("v",), budget=CAPTURE_BUDGET),
        log=lambda note: progress(0, 2, note),
    )
    progress(1, 2, "drawing thumbnails")
    model.set_trace(captured.with_thumbnails())
    generated = len(captured.streams["text"][0].ids) - first
    return {"revision": model.revision, "first": first, "count": generated}
