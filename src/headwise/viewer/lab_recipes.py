"""Recipes of the Lab: which heads are ablated and how, as JSON, as Python lines, and as a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .lab_runs import AblationOptions, id_arguments
from .open_model import AblatedHead, OpenModel
from .surgery_arguments import UNKNOWN_MODEL, list_heads

if TYPE_CHECKING:
    from torch import nn

VERSION = 1


def describe_recipe(model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions) -> dict[str, Any]:
    """The recipe with the Python lines that repeat it, and the command that removes the heads, "" if none does."""
    return {
        "version": VERSION,
        "model": model.name,
        "heads": [head._asdict() for head in heads],
        "tokens": {stream: list(positions) for stream, positions in options.tokens.items()},
        "resampleText": options.resample_text,
        "seed": options.seed,
        "python": format_python(model, heads, options),
        "command": format_prune_command(model, heads, options),
    }


def format_prune_command(model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions) -> str:
    """`headwise prune` of these heads; "" unless all of them are ablated by zero, whole, and at all tokens."""
    if not heads or options.tokens or any(head.mode != "zero" or head.scale for head in heads):
        return ""
    named = list_heads([(head.site, head.head) for head in heads])
    target = model.target or UNKNOWN_MODEL
    return shlex.join(["headwise", "prune", target, "--heads", *named, "--data", "texts.txt", "--out", "pruned"])


def format_python(model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions) -> str:
    """Lines of Python that run the model on the open text, before and after the ablation."""
    if not heads:
        return ""
    net, patches = model.get_model(), _format_patches(heads, options)
    names, streams = id_arguments(net), model.get_recorded().streams
    ids = {names[stream]: list(rows[0].ids) for stream, rows in streams.items() if stream in names}
    lines = ["import torch", "import headwise as hw"]
    if any(head.mode == "zero" for head in heads):
        lines.append("from headwise.inspect.ablation import ScaledOutput")
    lines += _format_loading(model, net)
    lines.append(f"ids = {{{', '.join(f'{json.dumps(name)}: torch.tensor([{row}])' for name, row in ids.items())}}}")
    if any(head.mode == "resample" for head in heads):
        lines += _format_resample_ids(options)
    groups = _group_by_tokens(model, heads, options)
    contexts: list[str] = []
    for number, (tokens, group) in enumerate(groups):
        lines += ["", f"patches_{number} = {{}}", *(f"patches_{number} |= {part}" for part in patches(group))]
        chosen = f", tokens={list(tokens)}" if tokens else ""
        contexts.append(f"hw.patch(net, patches_{number}{chosen})")
    lines += ["", "with torch.inference_mode():", "    before = net(**ids)", f"    with {', '.join(contexts)}:"]
    return "\n".join([*lines, "        after = net(**ids)", ""])


def _format_loading(model: OpenModel, net: nn.Module) -> list[str]:
    """The lines that open the model."""
    from ..models import Transformer

    target = json.dumps(model.target or UNKNOWN_MODEL)
    if isinstance(net, Transformer):
        return [f"net = hw.load({target})"]
    return ["from headwise.viewer.model_targets import load_target", f"net = load_target({target})"]


def _format_resample_ids(options: AblationOptions) -> list[str]:
    """The lines that make the ids of "resample"."""
    if options.resample_text:
        return [
            "from headwise.inspect.model_inputs import prepare_inputs",
            f"row = prepare_inputs(net, [{json.dumps(options.resample_text)}], 0).token_rows['text'][0].ids",
            "other = {name: torch.tensor([list(row[: ids[name].shape[1]])]) for name in ids}",
        ]
    return [
        f"generator = torch.Generator().manual_seed({options.seed})",
        "other = {n: x[:, torch.randperm(x.shape[1], generator=generator)] for n, x in ids.items()}",
    ]


def _format_patches(
    heads: Sequence[AblatedHead], options: AblationOptions
) -> Callable[[Sequence[AblatedHead]], list[str]]:
    """A function that gives the expressions of the patches of some heads."""

    def parts(group: Sequence[AblatedHead]) -> list[str]:
        lines: list[str] = []
        if scaled := [head for head in group if head.mode == "zero"]:
            items = ", ".join(f"({head.site!r}, {head.head}): ScaledOutput({head.scale})" for head in scaled)
            lines.append(f"{{{items}}}")
        calls = {
            "mean": "hw.head_means(net, [ids], {})",
            "noise": f"hw.head_noise(net, [ids], {{}}, seed={options.seed})",
            "resample": "hw.head_outputs(net, other, {})",
        }
        for mode, call in calls.items():
            if refs := [(head.site, head.head) for head in group if head.mode == mode]:
                lines.append(call.format(refs))
        return lines

    return parts


def _group_by_tokens(
    model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions
) -> list[tuple[tuple[int, ...], list[AblatedHead]]]:
    """The heads by the tokens at which they are ablated; () is all tokens."""
    trace = model.get_recorded()
    groups: dict[tuple[int, ...], list[AblatedHead]] = {}
    for head in heads:
        tokens = options.tokens.get(trace.get_layer(head.site).query_stream, ())
        groups.setdefault(tokens, []).append(head)
    return list(groups.items())
