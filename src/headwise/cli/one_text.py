"""`headwise heads MODEL --text TEXT --show VIEW`: one view of the heads over a single text, or a
comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .argument_checks import check_model_path, check_text_model
from .arguments import print_page, to_json
from .options import UsageError
from .text_arguments import attach_named_tokenizer

if TYPE_CHECKING:
    from ..observe.head_analysis.attention_maps import AttentionMaps
    from ..observe.traces import Trace

VIEWS = ("weights", "norms", "rollout", "logits", "points")
MATRICES = ("weights", "norms")
USES = {  # views that an option is for, by its field
    "head": (*MATRICES, "points"),
    "over": MATRICES,
    "top": (*MATRICES, "rollout"),
    "position": ("logits",),
    "token": ("logits",),
}


def check_one_text(args: Any) -> None:
    """Refuse what cannot work before the model is loaded."""
    from ..observe.head_analysis.head_table import check_head_name

    check_model_path("MODEL", args.model)
    check_text_model(args.model, "--text", "give --images PATH")
    is_comparison = args.compare_text is not None or args.compare_model is not None
    if is_comparison and args.show is not None:
        raise UsageError(
            "--show and a comparison are two views; leave out --show, or --compare-text, "
            "--compare-model"
        )
    if args.head is not None:
        check_head_name(args.head)
    if args.show == "points" and args.head is None:
        raise UsageError("--show points needs a head; add --head L3H2, for example")
    view = "comparison" if is_comparison else args.show or "weights"
    for name, views in USES.items():
        if getattr(args, name) is not None and view not in views:
            raise UsageError(f"--{name} belongs to --show {' or '.join(views)}; leave it out")
    if args.head is not None and args.over is not None:
        raise UsageError("--over combines heads, and --head shows one; leave one of them out")


def show_one_text(args: Any) -> int:
    """Print the view that the options name."""
    model = _load(args.model, args)
    if args.compare_text is not None or args.compare_model is not None:
        view: Any = _compare(model, args)
        print_page(to_json(view.data) if args.json else str(view))
        return 0
    if args.show == "logits":
        from ..observe.head_analysis.logit_attribution import attribute_logit

        position = -1 if args.position is None else args.position
        view = attribute_logit(model, _inputs(args, args.text), position=position, token=args.token)
    elif args.show == "points":
        view = _map_points(model, args)
    else:
        view = _make_matrix(model, args)
    print_page(to_json(view.data) if args.json else str(view))
    return 0


def _load(name: str, args: Any) -> Any:
    from ..hub.pretrained_models import load_original
    from ..observe.inspect.model_inputs import is_encoder_decoder

    model = load_original(name).eval()
    attach_named_tokenizer(model, args)
    if is_encoder_decoder(model) and args.target is None:
        raise UsageError(
            f"{name} is an encoder-decoder; add --target TEXT, which its decoder reads"
        )
    return model


def _inputs(args: Any, text: str) -> Any:
    return text if args.target is None else {"source": text, "text": args.target}


def _make_matrix(model: Any, args: Any) -> Any:
    from ..observe.head_analysis.attention_maps import compute_attention_maps

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
    from ..observe.head_analysis.head_table import locate_head
    from ..observe.inspect.attention_sites import sites

    site, head = locate_head(name, sites(model))
    matrix = maps.weights(site) if quantity == "weights" else maps.norms(site)
    if head >= len(matrix):
        raise UsageError(f"{site} has no head {head}; its heads are 0..{len(matrix) - 1}")
    return maps.table(matrix[head], f"{quantity} of {site} head {head}", site, top=top)


def _trace(model: Any, args: Any, text: str) -> Trace:
    from ..observe.inspect.trace_capture import trace

    return trace(model, _inputs(args, text), max_new_tokens=0)


def _map_points(model: Any, args: Any) -> Any:
    from ..observe.head_analysis.head_table import locate_head
    from ..observe.traces import map_queries_and_keys

    captured = _trace(model, args, args.text)
    site, head = locate_head(args.head, captured.layers)
    return map_queries_and_keys(captured, site, head)


def _compare(model: Any, args: Any) -> Any:
    from ..observe.traces import compare_traces

    other = model if args.compare_model is None else _load(args.compare_model, args)
    text = args.text if args.compare_text is None else args.compare_text
    return compare_traces(_trace(model, args, args.text), _trace(other, args, text))
