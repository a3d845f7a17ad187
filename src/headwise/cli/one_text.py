"""`headwise heads MODEL --text TEXT --show VIEW`: one view of the heads over a single text, or a
comparison.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import known_names
from .argument_checks import check_choice, check_model_path, check_text_model, check_tokenizer
from .arguments import print_page, to_json
from .command_parser import CommandParser, UsageError
from .text_arguments import attach_named_tokenizer

if TYPE_CHECKING:
    from ..head_analysis.attention_maps import AttentionMaps
    from ..traces import Trace

VIEWS = ("weights", "norms", "rollout", "logits", "points")
ONE_TEXT_OPTIONS = (
    "target",
    "show",
    "head",
    "over",
    "position",
    "token",
    "top",
    "compare_text",
    "compare_model",
)
OPTIONS = ("model", "text", "tokenizer", "json", *ONE_TEXT_OPTIONS)


def add_one_text_arguments(parser: CommandParser) -> None:
    """Add the options for one text."""
    parser.add_argument(
        "--text",
        metavar="TEXT",
        help="show the heads over this text alone; see --show in --help-all",
    )
    group = parser.add_expert_group("one text (--text)")
    group.add_argument(
        "--show",
        metavar="VIEW",
        help="weights, norms (weights times the length of values after W_O), rollout, logits "
        "(what heads add to a "
        "logit) or points (queries and keys of a head on a plane) (default: weights)",
    )
    group.add_argument("--target", metavar="TEXT", help="target text, for an encoder-decoder model")
    group.add_argument(
        "--head", metavar="HEAD", help="show weights, norms or points of this head, such as L3H2"
    )
    group.add_argument(
        "--over",
        metavar="HOW",
        help="without --head, mean, max, min or sum over heads and layers (default: mean)",
    )
    group.add_argument(
        "--position",
        type=int,
        metavar="INDEX",
        help="position whose logit --show logits explains (default: the last)",
    )
    group.add_argument(
        "--token", type=int, metavar="ID", help="token id to explain (default: the likeliest token)"
    )
    group.add_argument(
        "--top", type=int, metavar="COUNT", help="keys to list for each query (default: 3)"
    )
    group.add_argument(
        "--compare-text", metavar="TEXT", help="compare the weights of every head with this text"
    )
    group.add_argument(
        "--compare-model", metavar="MODEL", help="compare with another checkpoint on the same text"
    )


def check_one_text(args: argparse.Namespace, parser: CommandParser) -> None:
    """Refuse what cannot work before the model is loaded."""
    from ..head_analysis.head_table import check_head_name

    unused = [
        name
        for name in vars(args)
        if name not in OPTIONS and getattr(args, name) != parser.get_default(name)
    ]
    if unused:
        option = {"align_files": "align"}.get(unused[0], unused[0].replace("_", "-"))
        raise UsageError(
            f"--{option} needs many texts, and --text gives one; leave one of them out"
        )
    check_model_path(args.model)
    check_text_model(args.model, "--text", "give --images PATH")
    check_tokenizer(args.tokenizer)
    check_choice("--show", args.show, VIEWS)
    check_choice("--over", args.over, known_names.AGGREGATIONS)
    is_comparison = args.compare_text is not None or args.compare_model is not None
    if is_comparison and args.show is not None:
        raise UsageError(
            "--show and a comparison are two views; leave out --show, or --compare-text, "
            "--compare-model"
        )
    if args.compare_model is not None:
        check_model_path(args.compare_model)
    if args.head is not None:
        check_head_name(args.head)
    if args.show == "points" and args.head is None:
        raise UsageError("--show points needs a head; add --head L3H2, for example")
    _check_uses(args, "comparison" if is_comparison else args.show or "weights")
    if args.top is not None and args.top < 1:
        raise UsageError(f"--top {args.top} is too small; give 1 or more")


def _check_uses(args: argparse.Namespace, view: str) -> None:
    """Refuse options that this view does not use."""
    matrices = ("weights", "norms")
    uses = {
        "head": (*matrices, "points"),
        "over": matrices,
        "top": (*matrices, "rollout"),
        "position": ("logits",),
        "token": ("logits",),
    }
    for name, views in uses.items():
        if getattr(args, name) is not None and view not in views:
            raise UsageError(f"--{name} belongs to --show {' or '.join(views)}; leave it out")
    if args.head is not None and args.over is not None:
        raise UsageError("--over combines heads, and --head shows one; leave one of them out")


def show_one_text(args: argparse.Namespace) -> int:
    """Print the view that the options name."""
    model = _load(args.model, args)
    if args.compare_text is not None or args.compare_model is not None:
        view: Any = _compare(model, args)
        print_page(to_json(view.data) if args.json else str(view))
        return 0
    if args.show == "logits":
        from ..head_analysis.logit_attribution import attribute_logit

        position = -1 if args.position is None else args.position
        view = attribute_logit(model, _inputs(args, args.text), position=position, token=args.token)
    elif args.show == "points":
        view = _map_points(model, args)
    else:
        view = _make_matrix(model, args)
    print_page(to_json(view.data) if args.json else str(view))
    return 0


def _load(name: str, args: argparse.Namespace) -> Any:
    from ..hub.pretrained_models import load_original
    from ..inspect.model_inputs import is_encoder_decoder

    model = load_original(name).eval()
    attach_named_tokenizer(model, args)
    if is_encoder_decoder(model) and args.target is None:
        raise UsageError(
            f"{name} is an encoder-decoder; add --target TEXT, which its decoder reads"
        )
    return model


def _inputs(args: argparse.Namespace, text: str) -> Any:
    return text if args.target is None else {"source": text, "text": args.target}


def _make_matrix(model: Any, args: argparse.Namespace) -> Any:
    from ..head_analysis.attention_maps import compute_attention_maps

    maps = compute_attention_maps(model, _inputs(args, args.text))
    top = 3 if args.top is None else args.top
    if args.show == "rollout":
        return maps.table(maps.rollout(), "rollout over layers", top=top)
    quantity = "norms" if args.show == "norms" else "weights"
    if args.head is not None:
        return _one_head(maps, model, args.head, quantity, top)
    how = args.over or "mean"
    matrix = maps.aggregate(of=quantity, heads=how, layers=how)
    return maps.table(matrix, f"{quantity}, {how} over heads and layers", top=top)


def _one_head(maps: AttentionMaps, model: Any, name: str, quantity: str, top: int) -> Any:
    from ..head_analysis.head_table import locate_head
    from ..inspect.attention_sites import sites

    site, head = locate_head(name, sites(model))
    matrix = maps.weights(site) if quantity == "weights" else maps.norms(site)
    if head >= len(matrix):
        raise UsageError(f"{site} has no head {head}; its heads are 0..{len(matrix) - 1}")
    return maps.table(matrix[head], f"{quantity} of {site} head {head}", site, top=top)


def _trace(model: Any, args: argparse.Namespace, text: str) -> Trace:
    from ..inspect.trace_capture import trace

    return trace(model, _inputs(args, text), max_new_tokens=0)


def _map_points(model: Any, args: argparse.Namespace) -> Any:
    from ..head_analysis.head_table import locate_head
    from ..traces import map_queries_and_keys

    captured = _trace(model, args, args.text)
    site, head = locate_head(args.head, captured.layers)
    return map_queries_and_keys(captured, site, head)


def _compare(model: Any, args: argparse.Namespace) -> Any:
    from ..traces import compare_traces

    other = model if args.compare_model is None else _load(args.compare_model, args)
    text = args.text if args.compare_text is None else args.compare_text
    return compare_traces(_trace(model, args, args.text), _trace(other, args, text))
